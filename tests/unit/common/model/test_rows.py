"""Row floors: what padding asks for, and the measurement against products that do and do not depend on the batch."""

import pytest
import torch
import torch.nn.functional as F

from common.model.rows import linear_products, padded, row_floor, widen_single_outputs


@pytest.mark.parametrize(
    ("num_rows", "floor", "expected"),
    [(1, 4, 4), (4, 4, 4), (5, 4, 8), (1, 16, 16), (17, 16, 20), (7, 0, 7), (0, 16, 0), (512, 12, 512)],
)
def test_rows_are_padded_to_the_floor_and_to_whole_vectors(num_rows: int, floor: int, expected: int) -> None:
    assert padded(num_rows, floor) == expected


def fickle_below(limit: int) -> torch.nn.Module:
    """A product whose rows come out otherwise in batches of fewer than `limit` rows."""

    class Fickle(torch.nn.Module):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return rows * 2 + (1e-6 if rows.shape[0] < limit else 0)

    return Fickle()


@pytest.mark.parametrize(("limit", "floor"), [(1, 4), (5, 8), (10, 12), (14, 16), (17, 24), (33, 64), (65, None)])
def test_the_floor_is_where_products_stop_depending_on_the_batch(limit: int, floor: int | None) -> None:
    assert row_floor([(8, torch.float32, fickle_below(1)), (8, torch.float32, fickle_below(limit))]) == floor


def test_a_product_that_depends_on_the_place_in_the_batch_has_no_floor() -> None:
    assert row_floor([(8, torch.float32, lambda rows: rows + torch.arange(rows.shape[0])[:, None])]) is None


def test_one_layer_of_each_shape_is_measured() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(8, n, bias=False) for n in (8, 8, 16, 8)))
    assert [width for width, _, _ in linear_products(model)] == [8, 8]


def test_a_single_output_is_the_same_whatever_the_batch() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 1)
    rows = torch.randn(200, 64)
    expected = F.linear(rows.double(), layer.weight.double(), layer.bias.double())
    widen_single_outputs(torch.nn.Sequential(layer))
    with torch.no_grad():
        whole = layer(rows)
        torch.testing.assert_close(whole.double(), expected, atol=1e-5, rtol=1e-5)
        for count in (4, 8, 20, 44, 100):
            assert torch.equal(layer(rows[3 : 3 + count].clone()), whole[3 : 3 + count])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "outputs", "dtype"),
    [
        *((w, n, torch.float32) for w, n in ((576, 192), (576, 1536), (1536, 576), (64, 96), (48, 2), (100, 37))),
        *((w, n, torch.bfloat16) for w, n in ((576, 48), (64, 96), (48, 2))),
    ],
)
def test_from_the_measured_floor_on_every_row_count_gives_the_same_bits(
    width: int, outputs: int, dtype: torch.dtype
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        torch.manual_seed(1)
        rows, weight = torch.randn(1100, width).to(dtype), (torch.randn(outputs, width) / width**0.5).to(dtype)
        floor = row_floor([(width, dtype, lambda x: F.linear(x, weight))])
        assert floor is not None
        whole = F.linear(rows, weight)
        counts = {padded(count, floor) for count in (*range(1, 70), *range(70, 1060, 61), 255, 512, 513, 1024)}
        for count in sorted(counts):
            for start in (0, 7):
                part = F.linear(rows[start : start + count].clone(), weight)
                assert torch.equal(part, whole[start : start + count]), (count, start)
    finally:
        torch.set_num_threads(before)

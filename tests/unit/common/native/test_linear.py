"""Linear layers in C++: right, and the same bits for a row however it is computed."""

import platform
from pathlib import Path

import numpy as np
import pytest
import torch

from common.errors import ConfigError
from common.model.quantize import fake_quantise_rows
from common.native.build import SOURCES, library
from common.native.linear import (
    Kind,
    PackedLinear,
    dequantised,
    linear,
    load_kernel,
    pack_f32,
    pack_quantised,
    weight_row,
)
from tests.unit.common.native.linear_reference import float_product, fma, quantised_product

try:
    library(SOURCES / "linear.cpp")
except ConfigError as error:
    pytest.skip(error.message, allow_module_level=True)

KINDS = list(Kind)
SHAPES = [(16, 32), (1, 64), (17, 96), (100, 576), (40, 1536), (33, 4096)]  # n, k
HAS_FMA = platform.machine() != "x86_64" or " fma " in Path("/proc/cpuinfo").read_text()


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def quantised_parts(n: int, k: int, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    values = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    values[0] = (1 << bits) - 1  # a row that needs every bit of the sums
    return values, (random(n, k // 32, seed=3) * 0.01).half(), (random(n, k // 32, seed=4) * 0.1).half()


def layer(kind: Kind, n: int, k: int, bias: torch.Tensor | None = None) -> PackedLinear:
    if kind in (Kind.F32, Kind.BF16):
        weight = random(n, k, seed=5)
        return pack_f32(weight if kind is Kind.F32 else weight.bfloat16(), bias)
    bits = 8 if kind is Kind.Q8 else 4
    return pack_quantised(*quantised_parts(n, k, bits), bits, bias)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_products_are_near_those_of_float64(kind: Kind, n: int, k: int) -> None:
    packed = layer(kind, n, k)
    for rows in (1, 2, 3, 5, 8, 13, 70) + ((512,) if k <= 576 else ()):
        x = random(rows, k)
        y = linear(packed, x)
        quantised = kind in (Kind.Q8, Kind.Q4)
        wanted = (fake_quantise_rows(x.double()) if quantised else x.double()) @ dequantised(packed).double().T
        # A tie may round either way in float64: then one integer of a group differs by 1.
        largest = wanted.abs().max() * (2e-3 if quantised else 2e-6) + 1e-6 * k**0.5
        assert (y - wanted).abs().max() < largest


@pytest.mark.skipif(not HAS_FMA, reason="products round separately without FMA")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(16, 32), (17, 96), (40, 576)])
def test_bits_are_those_of_the_formulas(kind: Kind, n: int, k: int) -> None:
    x = random(9, k)
    x[0] = 0.0
    x[1, :32] = 0.0
    x[2, 3] = 1e30
    x[3] *= 1e-42  # subnormal, and so are its scales
    x[4] = 127.0 * torch.arange(k).remainder(2).sub(0.5).sign()
    x[5] = (torch.arange(k) % 255 - 127) * 0.5  # ties
    got = linear(layer(kind, n, k), x)
    if kind in (Kind.F32, Kind.BF16):
        wanted = float_product(x.numpy(), dequantised(layer(kind, n, k)).numpy())
    else:
        values, scales, minimums = quantised_parts(n, k, 8 if kind is Kind.Q8 else 4)
        wanted = quantised_product(x.numpy(), values.numpy(), scales.float().numpy(), minimums.float().numpy())
    np.testing.assert_array_equal(got.numpy(), wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(17, 96), (100, 576), (33, 4096)])
def test_a_row_has_the_same_bits_alone_in_any_batch_and_with_any_number_of_threads(kind: Kind, n: int, k: int) -> None:
    packed = layer(kind, n, k)
    x = random(150, k)
    whole = linear(packed, x)
    for rows in (*range(1, 20), 31, 70, 149):
        assert torch.equal(linear(packed, x[:rows], num_threads=1 + rows % 4), whole[:rows])
    assert torch.equal(torch.cat([linear(packed, row) for row in x.split(1)]), whole)
    assert torch.equal(linear(packed, x.flip(0), num_threads=2).flip(0), whole)


@pytest.mark.skipif(not HAS_FMA, reason="products round separately without FMA")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [4, *(pytest.param(width, marks=pytest.mark.slow) for width in (8, 16))])
def test_every_vector_width_computes_the_same_bits(kind: Kind, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain code for integers among them: what another machine would compute, with this one's instructions."""
    packed, x = layer(kind, 40, 576), random(11, 576)
    wanted = linear(packed, x), linear(packed, x[:1])
    other = library(SOURCES / "linear.cpp", extra_flags=(f"-DBATON_WIDTH={width}", "-O1", "-Wno-psabi"))
    monkeypatch.setattr("common.native.linear._kernel", lambda: load_kernel(other))
    assert torch.equal(linear(packed, x), wanted[0])
    assert torch.equal(linear(packed, x[:1]), wanted[1])
    assert torch.equal(weight_row(packed, 39), dequantised(packed)[39])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_bias_is_added_to_the_sum_and_then_to_what_out_holds(kind: Kind, rows: int) -> None:
    n, k = 37, 64
    bias, x, before = random(n, seed=6), random(rows, k), random(rows, n, seed=7)
    plain = linear(layer(kind, n, k), x)
    packed = layer(kind, n, k, bias)
    assert torch.equal(linear(packed, x), plain + bias)
    out = before.clone()
    assert linear(packed, x, out=out, add=True) is out
    assert torch.equal(out, (plain + bias) + before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_rows_may_lie_apart_and_nothing_between_them_is_touched(kind: Kind, rows: int) -> None:
    n, k = 21, 96
    packed, x = layer(kind, n, k), random(rows, 2 * k + 3)
    out = torch.full((rows, 50), 7.0)
    linear(packed, x[:, 5 : 5 + k], out=out[:, 3 : 3 + n])
    assert torch.equal(out[:, 3 : 3 + n], linear(packed, x[:, 5 : 5 + k].contiguous()))
    assert bool((out[:, :3] == 7).all())
    assert bool((out[:, 3 + n :] == 7).all())


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_spoils_its_own_row_only(kind: Kind) -> None:
    packed, x = layer(kind, 20, 64), random(6, 64)
    wanted = linear(packed, x)
    x[1, 40], x[4, 3] = float("nan"), float("inf")
    y = linear(packed, x)
    assert not bool(y[1].isfinite().any())
    assert not bool(y[4].isfinite().any())
    kept = [0, 2, 3, 5]
    assert torch.equal(y[kept], wanted[kept])


@pytest.mark.parametrize("bits", [4, 8])
def test_a_tile_is_filled_up_with_zeros(bits: int) -> None:
    packed = pack_quantised(*quantised_parts(18, 64, bits), bits)
    assert packed.scales is not None
    assert packed.minimums is not None
    assert packed.data.shape[0] == 2
    for part in (packed.data[1, :, :, 2:], packed.scales[1, :, 2:], packed.minimums[1, :, 2:]):
        assert not bool(part.any())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(17, 96), (4200, 32)])
def test_weights_come_back_out_of_their_tiles(kind: Kind, n: int, k: int) -> None:
    packed = layer(kind, n, k)
    whole = dequantised(packed)
    if kind in (Kind.F32, Kind.BF16):
        weight = random(n, k, seed=5)
        assert torch.equal(whole, weight if kind is Kind.F32 else weight.bfloat16().float())
    else:
        values, scales, minimums = quantised_parts(n, k, 8 if kind is Kind.Q8 else 4)
        parts = (part.float().repeat_interleave(32, 1) for part in (scales, minimums))
        scale, minimum = parts
        assert torch.equal(whole, scale * values + minimum)
    for row in (0, 1, 15, 16, n - 1):
        assert torch.equal(weight_row(packed, row), whole[row])


def test_halves_of_every_value_are_read_right() -> None:
    halves = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.float16)
    halves = halves[halves.isfinite()].view(-1, 1)  # subnormals and both zeros among them
    n = halves.shape[0]
    packed = pack_quantised(torch.ones(n, 32, dtype=torch.uint8), halves, torch.zeros(n, 1).half(), 8)
    x = torch.zeros(1, 32)
    x[0, 0] = 127.0
    assert torch.equal(linear(packed, x)[0], 127 * halves[:, 0].float())


def test_no_rows_are_no_work() -> None:
    assert linear(layer(Kind.Q4, 20, 64), torch.empty(0, 64)).shape == (0, 20)


def test_what_does_not_fit_is_refused() -> None:
    values, scales, minimums = quantised_parts(4, 64, 8)
    packed = layer(Kind.F32, 20, 64)
    with pytest.raises(ValueError, match="finite"):
        pack_quantised(values, scales, torch.full((4, 2), float("inf")).half(), 8)
    with pytest.raises(ValueError, match="at most 15"):
        pack_quantised(values, scales, minimums, 4)
    with pytest.raises(ValueError, match="multiple of 32"):
        pack_quantised(values[:, :40], scales, minimums, 8)
    with pytest.raises(ValueError, match="scales are float16"):
        pack_quantised(values, scales.float(), minimums, 8)
    with pytest.raises(ValueError, match="scales: missing"):
        PackedLinear(Kind.Q8, 4, 64, torch.zeros(1, 2, 8, 16, 4, dtype=torch.uint8))
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        pack_f32(torch.zeros(4, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match="x: float32 rows of 64"):
        linear(packed, torch.zeros(2, 63))
    with pytest.raises(ValueError, match="out: float32 rows of 20"):
        linear(packed, torch.zeros(2, 64), out=torch.zeros(3, 20))
    with pytest.raises(IndexError):
        weight_row(packed, 20)


def test_the_reference_rounds_a_product_and_a_sum_once() -> None:
    one, tiny = np.float32([1 + 2**-23]), np.float32([2**-60])
    assert fma(one, np.float32([2**-24 + 2**-47]), np.float32([1.0]))[0] == np.float32(1 + 2**-23)
    assert fma(np.float32([2**-24]), np.float32([1.0]), np.float32([1.0]))[0] == 1
    assert fma(tiny, tiny, one)[0] == one[0]

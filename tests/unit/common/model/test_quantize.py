"""Weights in groups of 32: the error is bounded, exact grids come back exactly, and what cannot be is refused."""

import pytest
import torch

from common.errors import ConfigError
from common.model.quantize import GROUP, Bits, GroupQuantised, dequantise, fake_quantise_rows, quantise

SHAPE = (70, 96)


def random_weight(seed: int = 0, *, scale: float = 0.05) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)) * scale


def worst_in_group(difference: torch.Tensor) -> torch.Tensor:
    return difference.abs().view(SHAPE[0], -1, GROUP).amax(-1)


def test_8_bits_are_symmetric_and_half_a_step_away_at_most() -> None:
    weight = random_weight()
    found = quantise(weight, 8)
    assert (found.values.dtype, found.values.shape, found.scales.shape) == (torch.uint8, SHAPE, (70, 3))
    assert torch.equal(found.minimums, found.scales * -128)
    steps = found.scales.float()
    assert (worst_in_group(dequantise(found) - weight) <= steps * 0.53).all()
    assert torch.allclose(steps, worst_in_group(weight) / 127, rtol=1e-3)


def test_4_bits_never_do_worse_than_cutting_the_range_into_15_steps() -> None:
    weight = random_weight(1)
    groups = weight.view(-1, GROUP)
    low = groups.amin(1, keepdim=True)
    step = (groups.amax(1, keepdim=True) - low) / 15
    plain = (((groups - low) / step).round() * step + low - groups).square().sum(1)
    found = quantise(weight, 4)
    error = (dequantise(found) - weight).view(-1, GROUP).square().sum(1)
    assert found.values.max() <= 15
    assert (error <= plain * 1.01).all()  # that one did not round its scales
    assert error.sum() < 0.9 * plain.sum()


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_of_a_grid_come_back_exactly(bits: Bits) -> None:
    generator = torch.Generator().manual_seed(3)
    values = torch.randint(0 if bits == 4 else 1, 1 << bits, SHAPE, generator=generator, dtype=torch.uint8)
    values.view(-1, GROUP)[:, 0], values.view(-1, GROUP)[:, 1] = (1 << bits) - 1, 0 if bits == 4 else 1
    scales = (torch.rand(SHAPE[0], 3, generator=generator) * 0.02 + 1e-3).half()
    minimums = (scales * -128) if bits == 8 else (torch.randn(SHAPE[0], 3, generator=generator) * 0.1).half()
    weight = dequantise(GroupQuantised(values, scales, minimums, bits))
    again = quantise(weight, bits)
    assert torch.equal(dequantise(again), weight)
    assert torch.equal(again.values, values)


@pytest.mark.parametrize("bits", [4, 8])
def test_bfloat16_is_quantised_as_the_numbers_that_it_holds(bits: Bits) -> None:
    weight = random_weight().bfloat16()
    found, expected = quantise(weight, bits), quantise(weight.float(), bits)
    assert torch.equal(dequantise(found), dequantise(expected))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("value", [0.0, 0.25, -3.0])
def test_a_constant_group_stays_what_it_is(bits: Bits, value: float) -> None:
    found = dequantise(quantise(torch.full(SHAPE, value), bits))
    assert torch.allclose(found, torch.full(SHAPE, value), rtol=5e-3)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("scale", [1e-10, 1e-7, 1e-5, 1e-3])
def test_weights_too_small_for_float16_lose_no_more_than_its_least_step(bits: Bits, scale: float) -> None:
    weight = random_weight(scale=scale)
    least_step = 2.0**-24
    step = weight.abs().max() / (15 if bits == 4 else 127)
    assert (dequantise(quantise(weight, bits)) - weight).abs().max() <= max(least_step * 16, float(step) * 2)


def test_slices_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight()
    whole = quantise(weight, 4)
    monkeypatch.setattr("common.model.quantize._SLICE_ELEMENTS", 96 * 9)
    sliced = quantise(weight, 4)
    assert torch.equal(whole.values, sliced.values)
    assert torch.equal(whole.scales, sliced.scales)
    assert torch.equal(whole.minimums, sliced.minimums)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("bad", "why"), [(float("nan"), "NaN"), (float("-inf"), "infinity"), (3e6, "beyond float16")])
def test_what_cannot_be_quantised_is_refused_with_the_reason(bits: Bits, bad: float, why: str) -> None:
    weight = random_weight()
    weight[-1, -1] = bad
    with pytest.raises(ConfigError, match=rf"{why}.*quantization = none"):
        quantise(weight, bits)


@pytest.mark.parametrize("shape", [(4, 33), (32,), (2, 3, 32)])
def test_rows_that_are_no_multiple_of_a_group_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="multiple of 32"):
        quantise(torch.zeros(shape), 8)


def test_rounded_activations_are_half_a_step_away_at_most_and_four_neighbours_set_no_step() -> None:
    rows = random_weight(5, scale=3.0)
    rows[0, :GROUP] = 0
    rows[1, 4:8] = torch.tensor([-700.0, 2.0, 3.0, 550.0])
    rounded = fake_quantise_rows(rows)
    fours = rows.abs().view(SHAPE[0], -1, 8, 4).amax(3).sort(2, descending=True).values
    step = torch.maximum(fours[..., 0] / 128, fours[..., 1]) / 127
    assert (worst_in_group(rounded - rows) <= step * 0.501).all()
    assert worst_in_group(rounded - rows)[1, 0] < 700 / 127 / 10
    assert torch.equal(fake_quantise_rows(rows[:1]), rounded[:1])

"""GGUF's blocks keep their weights to the bit, as gguf itself dequantises them."""

from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from common.model.gguf_blocks import read_blocks
from common.model.quantize import dequantise

KEPT = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 8, "Q5_1": 8, "Q8_0": 8}
SHAPE = (48, 160)


def encoded(type_name: str, *, seed: int = 0) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
    """Random weights in that format, and what gguf reads back."""
    quants: Any = gguf.quants
    kind = gguf.GGMLQuantizationType[type_name]
    weight = np.random.default_rng(seed).normal(size=SHAPE).astype(np.float32) * 0.1
    weight[3, 32:64] = 0.0
    data = quants.quantize(weight, kind)
    return data, quants.dequantize(data, kind)


@pytest.mark.parametrize(("type_name", "bits"), KEPT.items())
def test_every_weight_is_gguf_s_own_to_the_bit(type_name: str, bits: int) -> None:
    data, expected = encoded(type_name)
    found = read_blocks(data, type_name)
    assert found is not None
    assert found.bits == bits
    assert int(found.values.max()) < 1 << bits
    ours = dequantise(found).numpy()
    # Adding 0 turns -0.0 (a value of 0 under a negative scale) into 0.0 and changes no other number
    assert np.array_equal(ours.view(np.uint32), (expected + np.float32(0)).view(np.uint32))
    assert np.abs(expected).max() > 0.2


@pytest.mark.parametrize("type_name", KEPT)
def test_any_bytes_with_finite_scales_are_read_as_gguf_reads_them(type_name: str) -> None:
    """Also what no encoder writes: every value, negative and subnormal scales."""
    data, _ = encoded(type_name)
    random = np.random.default_rng(1)
    noise = random.integers(0, 256, data.shape, dtype=np.uint8)
    block_bytes = data.shape[1] // (SHAPE[1] // 32)
    blocks = noise.reshape(len(noise), -1, block_bytes)
    num_floats = 2 if type_name.endswith("_1") else 1
    floats = (
        random.normal(size=(*blocks.shape[:2], num_floats))
        * 10.0 ** random.integers(-7, 2, blocks.shape[:2])[..., None]
    )
    blocks[..., : 2 * num_floats] = floats.astype(np.float16).view(np.uint8)
    found = read_blocks(noise, type_name)
    assert found is not None
    quants: Any = gguf.quants
    expected = quants.dequantize(noise, gguf.GGMLQuantizationType[type_name])
    assert np.array_equal(dequantise(found).numpy(), expected)


@pytest.mark.parametrize("type_name", ["Q4_K", "Q6_K", "F16", "F32", "IQ4_NL"])
def test_other_types_are_not_kept(type_name: str) -> None:
    assert read_blocks(np.zeros((2, 64), np.uint8), type_name) is None


@pytest.mark.parametrize(("scale", "is_kept"), [(500.0, True), (600.0, False), (float("nan"), False)])
def test_a_scale_whose_minimum_float16_cannot_hold_is_not_kept(scale: float, is_kept: bool) -> None:
    data, _ = encoded("Q8_0")
    data[0, :2] = np.array([scale], np.float16).view(np.uint8)
    assert (read_blocks(data, "Q8_0") is not None) == is_kept

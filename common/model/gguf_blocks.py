"""GGUF's plain block formats, 32 weights a block, as `GroupQuantised`: not a bit of a weight changes.

Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. Nibble i of a block's first half is weight
i, of its second half weight i + 16; bit i of `high` is the fifth bit of weight i. A symmetric format's weight is
scale * (value - offset), which is scale * value + minimum with minimum = -offset * scale: a power of two, so exact.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from common.model.quantize import GROUP, Bits, GroupQuantised

_SCALE = ("scale", "<f2")
_MINIMUM = ("minimum", "<f2")
_HIGH = ("high", "<u4")
_NIBBLES = ("nibbles", "u1", (GROUP // 2,))
_BYTES = ("bytes", "i1", (GROUP,))


@dataclass(frozen=True, slots=True)
class _Format:
    block: "np.dtype[Any]"
    bits: Bits
    offset: int = 0  # 0: the block has a minimum of its own


_FORMATS = {
    "Q4_0": _Format(np.dtype([_SCALE, _NIBBLES]), 4, offset=8),
    "Q4_1": _Format(np.dtype([_SCALE, _MINIMUM, _NIBBLES]), 4),
    "Q5_0": _Format(np.dtype([_SCALE, _HIGH, _NIBBLES]), 8, offset=16),
    "Q5_1": _Format(np.dtype([_SCALE, _MINIMUM, _HIGH, _NIBBLES]), 8),
    "Q8_0": _Format(np.dtype([_SCALE, _BYTES]), 8, offset=128),
}


def read_blocks(rows: npt.NDArray[np.uint8], type_name: str) -> GroupQuantised | None:
    """The matrix in `rows` [n, bytes of a row], copied; None for types (K-quants, floats) that are not of this kind.

    None also where float16 cannot hold -offset * scale, which no real weight comes near.
    """
    form = _FORMATS.get(type_name)
    if form is None or rows.ndim != 2:
        return None
    blocks = np.ascontiguousarray(rows).view(form.block)
    scales = blocks["scale"]
    if form.offset:
        with np.errstate(over="ignore", invalid="ignore"):
            minimums = scales * np.float16(-form.offset)
    else:
        minimums = blocks["minimum"]
    if not (np.isfinite(scales).all() and np.isfinite(minimums).all()):
        return None
    return GroupQuantised(
        torch.from_numpy(_values(blocks).reshape(len(rows), -1)),
        torch.from_numpy(np.ascontiguousarray(scales)),
        torch.from_numpy(np.ascontiguousarray(minimums)),
        form.bits,
    )


def _values(blocks: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """uint8 [n, blocks of a row, 32]."""
    fields = blocks.dtype.names or ()
    if "bytes" in fields:
        return np.ascontiguousarray(blocks["bytes"]).view(np.uint8) ^ np.uint8(0x80)  # q + 128
    nibbles = blocks["nibbles"]
    values = np.concatenate([nibbles & 0x0F, nibbles >> 4], axis=-1)
    if "high" in fields:
        high = np.ascontiguousarray(blocks["high"])[..., None].view(np.uint8)
        values |= np.unpackbits(high, axis=-1, bitorder="little") << 4
    return values

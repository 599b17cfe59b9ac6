"""Linear layers in C++ (`csrc/linear.h`): weights packed once, a row's bits the same in any batch.

A layer's weights are fp32, bf16 (computed in fp32), or unsigned integers of 4 or 8 bits in groups of 32 along k
with an fp16 scale and minimum each: weight = scale * value + minimum. GGUF's Q4_1 is that as it stands; Q4_0 and
Q8_0 take a minimum of -8 and -128 scales. Packed, outputs stand in tiles of 16, the same on every machine.

Before quantised weights a row's activations are rounded too, in the same groups: to 8 bits, but to 15 in those four
neighbours that hold the group's largest (`csrc/gemm_q.h` has the formulas).
"""

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from common.errors import InternalError
from common.native.abi import LinearArgs
from common.native.abi import WeightKind as Kind
from common.native.build import SOURCES, library

TILE = 16  # outputs
GROUP = 32  # consecutive k that share a scale and a minimum
_SOURCE = SOURCES / "linear.cpp"
_ROWS_AT_A_TIME = 4096  # of a weight while it is packed: a large one is never there twice


@dataclass(frozen=True, eq=False)
class PackedLinear:
    """A layer ready for the kernel. `struct` points into the tensors, which may lie in a mapped file.

    data: float32 or bfloat16 [tiles, k, 16]; uint8 [tiles, k / 32, 8, 16, 4] (Q8: step, output, consecutive k) or
    [tiles, k / 32, 4, 16, 4] (Q4: steps 0..3 in low nibbles, 4..7 in high ones). scales, minimums: float16
    [tiles, k / 32, 16]. bias: float32 [n]. ValueError where they are not so.
    """

    kind: Kind
    n: int
    k: int
    data: torch.Tensor
    scales: torch.Tensor | None = None
    minimums: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    struct: LinearArgs = field(init=False, repr=False)

    def __post_init__(self) -> None:
        shape, dtype = packed_shape(self.kind, n=self.n, k=self.k)
        factors = (shape[0], self.k // GROUP, TILE) if self.kind in (Kind.Q8, Kind.Q4) else None
        struct = LinearArgs(
            kind=self.kind,
            n=self.n,
            k=self.k,
            data=_address("data", self.data, shape, dtype),
            scales=_address("scales", self.scales, factors, torch.float16),
            minimums=_address("minimums", self.minimums, factors, torch.float16),
            bias=None if self.bias is None else _address("bias", self.bias, (self.n,), torch.float32),
        )
        object.__setattr__(self, "struct", struct)

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for t in (self.data, self.scales, self.minimums, self.bias) if t is not None)


def packed_shape(kind: Kind, *, n: int, k: int) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and type of a packed weight's `data`. ValueError if there is no such weight."""
    if n < 1 or k < 1 or (kind in (Kind.Q8, Kind.Q4) and k % GROUP):
        raise ValueError(f"no {kind.name} weight of [{n}, {k}]: sizes are positive, k of groups a multiple of {GROUP}")
    tiles = -(-n // TILE)
    match kind:
        case Kind.F32:
            return (tiles, k, TILE), torch.float32
        case Kind.BF16:
            return (tiles, k, TILE), torch.bfloat16
        case Kind.Q8:
            return (tiles, k // GROUP, 8, TILE, 4), torch.uint8
        case Kind.Q4:
            return (tiles, k // GROUP, 4, TILE, 4), torch.uint8


def pack_f32(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
    """A float32 or bfloat16 weight [n, k], kept in its type. ValueError for another."""
    kinds = {torch.float32: Kind.F32, torch.bfloat16: Kind.BF16}
    if weight.ndim != 2 or weight.dtype not in kinds:
        raise ValueError(f"a weight is float32 or bfloat16 [n, k], got {weight.dtype} {list(weight.shape)}")
    (n, k), kind = weight.shape, kinds[weight.dtype]
    data = _packed(weight, packed_shape(kind, n=n, k=k), _outputs_last)
    return PackedLinear(kind, n, k, data, bias=_bias(bias))


def pack_quantised(
    values: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor, bits: int, bias: torch.Tensor | None = None
) -> PackedLinear:
    """uint8 values [n, k], float16 scales and minimums [n, k / 32]; `bits` 4 (values up to 15) or 8.

    ValueError for other shapes, types and values, and for factors that are not finite (a minimum that overflowed).
    """
    if bits not in (4, 8):
        raise ValueError(f"weights have 4 or 8 bits, not {bits}")
    if values.ndim != 2 or values.dtype is not torch.uint8:
        raise ValueError(f"values are uint8 [n, k], got {values.dtype} {list(values.shape)}")
    (n, k), kind = values.shape, Kind.Q4 if bits == 4 else Kind.Q8
    shape, dtype = packed_shape(kind, n=n, k=k)
    if bits == 4 and int(values.max()) > 15:
        raise ValueError(f"values of 4 bits are at most 15, got {int(values.max())}")
    for name, factor in (("scales", scales), ("minimums", minimums)):
        if factor.shape != (n, k // GROUP) or factor.dtype is not torch.float16:
            raise ValueError(f"{name} are float16 [{n}, {k // GROUP}], got {factor.dtype} {list(factor.shape)}")
        if not bool(factor.isfinite().all()):
            raise ValueError(f"{name} must be finite: some overflow float16")
    factors = (shape[0], k // GROUP, TILE), torch.float16
    return PackedLinear(
        kind,
        n,
        k,
        _packed(values, (shape, dtype), _nibbles if bits == 4 else _steps),
        _packed(scales, factors, _outputs_last),
        _packed(minimums, factors, _outputs_last),
        _bias(bias),
    )


def linear(
    packed: PackedLinear,
    x: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    add: bool = False,
    num_threads: int = 1,
) -> torch.Tensor:
    """x [rows, k] times the weight: [rows, n], both float32 on the host, the last dimension contiguous.

    Written to `out` if it is given, or added to what it holds if `add`. `num_threads` changes no bit.
    """
    if out is None:
        out = x.new_zeros((x.shape[0], packed.n)) if add else x.new_empty((x.shape[0], packed.n))
    for name, rows, width in (("x", x, packed.k), ("out", out, packed.n)):
        good = rows.dtype is torch.float32 and rows.device.type == "cpu" and rows.shape == (x.shape[0], width)
        if not good or rows.stride(1) != 1:
            raise ValueError(f"{name}: float32 rows of {width} on the host wanted, got {rows.dtype} {list(rows.shape)}")
    failed = _kernel().baton_linear(
        ctypes.byref(packed.struct),
        *(x.data_ptr(), x.stride(0), out.data_ptr(), out.stride(0)),
        *(x.shape[0], add, num_threads),
    )
    if failed:
        raise InternalError("native linear: out of memory for scratch")
    return out


def weight_row(packed: PackedLinear, row: int) -> torch.Tensor:
    """One row of the weight, [k] float32: the embedding of a token. IndexError if there is none."""
    if not 0 <= row < packed.n:
        raise IndexError(f"row {row} of {packed.n}")
    out = torch.empty(packed.k)
    _kernel().baton_weight_row(ctypes.byref(packed.struct), row, out.data_ptr())
    return out


def dequantised(packed: PackedLinear) -> torch.Tensor:
    """The whole weight, [n, k] float32."""
    data = packed.data
    if packed.kind in (Kind.F32, Kind.BF16):
        return data.transpose(1, 2).flatten(0, 1)[: packed.n].float().contiguous()
    assert packed.scales is not None
    assert packed.minimums is not None
    if packed.kind is Kind.Q4:
        data = torch.cat([data & 15, data >> 4], dim=2)
    values = data.permute(0, 3, 1, 2, 4).flatten(3).float()  # [tiles, 16, groups, 32]
    scales, minimums = (factor.transpose(1, 2).float()[..., None] for factor in (packed.scales, packed.minimums))
    return (values * scales + minimums).flatten(2).flatten(0, 1)[: packed.n].contiguous()


@functools.cache
def _kernel() -> ctypes.CDLL:
    return load_kernel(library(_SOURCE))


def load_kernel(path: Path) -> ctypes.CDLL:
    """The compiled library, its signatures declared."""
    loaded = ctypes.CDLL(str(path))
    pointer, stride, integer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    loaded.baton_linear.argtypes = (pointer, pointer, stride, pointer, stride, integer, integer, integer)
    loaded.baton_linear.restype = integer
    loaded.baton_weight_row.argtypes = (pointer, integer, pointer)
    loaded.baton_weight_row.restype = None
    return loaded


def _packed(
    rows: torch.Tensor,
    target: tuple[tuple[int, ...], torch.dtype],
    pack: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """`pack` turns whole tiles [16 * tiles, ...] into [tiles, ...]; what is missing in the last one is zero."""
    out = torch.empty(target[0], dtype=target[1])
    for first in range(0, rows.shape[0], _ROWS_AT_A_TIME):
        some = rows[first : first + _ROWS_AT_A_TIME].cpu()
        missing = -some.shape[0] % TILE
        if missing:
            some = torch.cat([some, some.new_zeros((missing, *some.shape[1:]))])
        out[first // TILE : (first + some.shape[0]) // TILE] = pack(some)
    return out


def _outputs_last(rows: torch.Tensor) -> torch.Tensor:
    return rows.reshape(-1, TILE, rows.shape[1]).transpose(1, 2)


def _steps(rows: torch.Tensor) -> torch.Tensor:
    return rows.reshape(-1, TILE, rows.shape[1] // GROUP, 8, 4).permute(0, 2, 3, 1, 4)


def _nibbles(rows: torch.Tensor) -> torch.Tensor:
    steps = _steps(rows)
    return steps[:, :, :4] | (steps[:, :, 4:] << 4)


def _bias(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else bias.detach().to("cpu", torch.float32).contiguous()


def _address(name: str, tensor: torch.Tensor | None, shape: tuple[int, ...] | None, dtype: torch.dtype) -> int | None:
    """Where a tensor begins, once it is what the kernel takes on trust; None where there is none to be."""
    if tensor is None or shape is None:
        if tensor is not None or shape is not None:
            raise ValueError(f"{name}: {'no such part' if shape is None else 'missing'} for this kind of weight")
        return None
    good = tensor.shape == shape and tensor.dtype is dtype and tensor.device.type == "cpu" and tensor.is_contiguous()
    if not good:
        raise ValueError(
            f"{name}: contiguous {dtype} {list(shape)} wanted on the host, got {tensor.dtype} {list(tensor.shape)}"
        )
    return tensor.data_ptr()

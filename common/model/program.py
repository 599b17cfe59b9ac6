"""A recipe and its weights, run by the kernels: a whole step is one call, during which Python is free to go on.

The library (csrc/step.cpp) is compiled at first use. Whoever holds a Program holds all arrays that it points into.
"""

import ctypes
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from common.errors import InternalError
from common.model.recipe import Recipe
from common.model.step import StepArrays
from common.native import abi, build
from common.native.build import SOURCES, library
from common.native.loans import Loans

Floats = npt.NDArray[np.float32]

_SOURCE = SOURCES / "step.cpp"


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A linear layer's weight [n, k] in the kernels' layout (common/native/linear.py)."""

    kind: abi.WeightKind
    n: int
    k: int
    data: abi.Array
    scales: abi.Array | None = None
    minimums: abi.Array | None = None
    bias: abi.Array | None = None

    def args(self) -> abi.LinearArgs:
        return abi.LinearArgs(
            self.kind, self.n, self.k, *(_address(part) for part in (self.data, self.scales, self.minimums, self.bias))
        )


@functools.cache
def kernels() -> ctypes.CDLL:
    """The compiled library. ConfigError if there is no compiler or it fails; OSError if it does not load."""
    loaded = ctypes.CDLL(str(library(_SOURCE)))
    loaded.baton_step.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    loaded.baton_step.restype = ctypes.c_int
    return loaded


def unavailable() -> str | None:
    """Why no program can run on this machine, or None. Compiles the kernels if need be (some seconds, once)."""
    return build.unavailable(kernels)


class Program:
    """One model on one pool. `num_threads` and the batch change the time taken, never a bit. For one engine thread."""

    def __init__(
        self,
        recipe: Recipe,
        weights: Mapping[str, PackedWeight],
        arrays: Mapping[str, Floats],
        pool: npt.NDArray[np.uint8],
        *,
        block_size: int,
        dtype: str,
        num_threads: int = 1,
        loans: Loans | None = None,
    ) -> None:
        """`pool` is [num_blocks, block_bytes] of the recipe's layout in `dtype` (float32 or bfloat16)."""
        self.recipe = recipe
        self._step_call = kernels().baton_step
        self._kept: list[object] = [weights, arrays, pool]
        self._tables = [(arrays[table.frequencies], np.float32(table.scaling)) for table in recipe.tables]
        self._program = self._bound(recipe, weights, arrays, block_size=block_size, is_bf16=dtype == "bfloat16")
        itemsize = 2 if dtype == "bfloat16" else 4
        self._step = abi.StepArgs(threads=num_threads)
        self._batch = abi.BatchArgs(
            pool=pool.ctypes.data, block_stride=pool.strides[0] // itemsize, block_size=block_size
        )
        self.loans = loans
        self.spent_ns = np.zeros(len(abi.OpCode), np.int64)
        """By OpCode, since the start; counted while `timed`."""

    @property
    def timed(self) -> bool:
        return bool(self._step.spent_ns)

    @timed.setter
    def timed(self, on: bool) -> None:
        self._step.spent_ns = self.spent_ns.ctypes.data if on else None

    def run(self, arrays: StepArrays) -> Floats:
        """One step: K and V of all rows are in the pool, and the logits [logit_rows, vocab] are returned."""
        out = np.empty((arrays.logit_rows.shape[0], self.recipe.vocab_size), np.float32)
        rotary = [_rotary(arrays.positions, *table) for table in self._tables]
        cos, sin = abi.pointers([cos for cos, _ in rotary]), abi.pointers([sin for _, sin in rotary])
        batch, step = self._batch, self._step
        batch.starts, batch.context_lens = arrays.starts.ctypes.data, arrays.context_lens.ctypes.data
        batch.block_tables, batch.table_stride = arrays.block_tables.ctypes.data, arrays.block_tables.shape[1]
        batch.row_blocks, batch.row_offsets = arrays.row_blocks.ctypes.data, arrays.row_offsets.ctypes.data
        batch.num_seqs, batch.num_rows = arrays.context_lens.shape[0], arrays.ids.shape[0]
        step.batch = batch
        step.ids, step.logit_rows, step.num_logits = arrays.ids.ctypes.data, arrays.logit_rows.ctypes.data, out.shape[0]
        step.cos, step.sin, step.out = ctypes.addressof(cos), ctypes.addressof(sin), out.ctypes.data
        step.loans = self.loans.address() if self.loans else None
        if self._step_call(ctypes.addressof(self._program), ctypes.addressof(step)):
            raise InternalError("a step's kernels: out of memory for its rows")
        return out

    def _bound(
        self,
        recipe: Recipe,
        weights: Mapping[str, PackedWeight],
        arrays: Mapping[str, Floats],
        *,
        block_size: int,
        is_bf16: bool,
    ) -> abi.ProgramArgs:
        buffers = list(recipe.widths)
        ops = [
            abi.OpArgs(op.code, buffers.index(op.src or op.dst), buffers.index(op.dst), op.index, op.value, op.add)
            for op in recipe.ops
        ]
        rotations = [
            abi.RotationArgs(
                rotation.num_heads,
                rotation.num_kv_heads,
                rotation.dim,
                rotation.rotary_dim,
                rotation.table,
                rotation.epsilon,
                *(_address(arrays[name] if name else None) for name in (rotation.query_norm, rotation.key_norm)),
            )
            for rotation in recipe.rotations
        ]
        parts: dict[str, ctypes.Array[Any]] = {
            "ops": _struct_array(abi.OpArgs, ops),
            "linears": _struct_array(abi.LinearArgs, [weights[name].args() for name in recipe.linears]),
            "layers": _struct_array(abi.LayerArgs, _layers(recipe, block_size, is_bf16)),
            "norms": abi.pointers([arrays[name] for name in recipe.norms]),
            "rotations": _struct_array(abi.RotationArgs, rotations),
            "widths": (ctypes.c_int32 * len(buffers))(*recipe.widths.values()),
        }
        self._kept.append(parts)
        return abi.ProgramArgs(
            **{name: ctypes.addressof(part) for name, part in parts.items()},
            num_ops=len(ops),
            num_buffers=len(buffers),
            logits=buffers.index("logits"),
        )


def _rotary(positions: npt.NDArray[np.int64], frequencies: Floats, scaling: np.float32) -> tuple[Floats, Floats]:
    """cos and sin [rows, rotary_dim / 2], in single precision as the model was trained with."""
    angles = positions.astype(np.float32)[:, None] * frequencies
    return np.cos(angles) * scaling, np.sin(angles) * scaling


def _layers(recipe: Recipe, block_size: int, is_bf16: bool) -> list[abi.LayerArgs]:
    found, offset = [], 0
    for layer in recipe.layers:
        v_offset = offset + layer.num_kv_heads * block_size * layer.k_head_dim
        found.append(
            abi.LayerArgs(
                k_offset=offset,
                v_offset=v_offset,
                num_heads=layer.num_heads,
                num_kv_heads=layer.num_kv_heads,
                k_dim=layer.k_head_dim,
                v_dim=layer.v_head_dim,
                window=layer.window or 0,
                pool_is_bf16=is_bf16,
                scale=layer.scale,
                softcap=layer.softcap,
            )
        )
        offset = v_offset + layer.num_kv_heads * block_size * layer.v_head_dim
    return found


def _struct_array(kind: type[ctypes.Structure], items: Sequence[ctypes.Structure]) -> "ctypes.Array[ctypes.Structure]":
    return (kind * len(items))(*items)


def _address(array: abi.Array | None) -> int | None:
    return None if array is None else array.ctypes.data

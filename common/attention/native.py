"""Attention in C++ (`csrc/`): reads the pool in place through the block table, the same bits in any batch.

The library is compiled at first use (`build`) and called through ctypes: structs hold what is fixed for a
layer or a step, so a call passes four pointers.
"""

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import torch

from common.attention.base import AttentionBatch, LayerSpec, beyond_limits
from common.errors import InternalError
from common.native.abi import BatchArgs, LayerArgs, RowsArgs
from common.native.build import SOURCES, library, unavailable

_SOURCE = SOURCES / "attention.cpp"
_DTYPES = (torch.float32, torch.bfloat16)
_MAX_HEAD_DIM = 4096


@functools.cache
def load_library(path: Path) -> ctypes.CDLL:
    """The compiled kernel, its signatures declared."""
    loaded = ctypes.CDLL(str(path))
    loaded.baton_attend.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
    loaded.baton_attend.restype = ctypes.c_int
    return loaded


@dataclass(frozen=True, slots=True)
class _BoundLayer:
    """A layer as the kernel wants it. Holds the tensors that `args` points into."""

    layer: LayerSpec
    sinks: torch.Tensor | None
    args: LayerArgs
    address: int


class NativeAttention:
    """`num_threads` only changes the time taken. One instance serves one engine thread."""

    name = "native"

    def __init__(self, *, num_threads: int = 1) -> None:
        """ConfigError if there is no kernel to be had (`available` says why)."""
        self._attend = load_library(library(_SOURCE)).baton_attend
        self._num_threads = num_threads
        self._layers: dict[tuple[int, torch.dtype], _BoundLayer] = {}
        self._batch: AttentionBatch | None = None  # the one that _batch_args describe: one a step, asked for by layer
        self._batch_args = BatchArgs()
        self._batch_address = ctypes.addressof(self._batch_args)
        self._rows = RowsArgs()
        self._rows_address = ctypes.addressof(self._rows)

    @staticmethod
    def available(device_type: str = "cpu") -> str | None:
        """Why the kernel cannot be used on this machine, or None. Compiles it if need be (some seconds, once)."""
        if device_type != "cpu":
            return "it is for the CPU"
        return unavailable(lambda: load_library(library(_SOURCE)))

    def unsupported(self, layer: LayerSpec, dtype: torch.dtype, block_size: int) -> str | None:
        return beyond_limits(layer, dtype, block_size, dtypes=_DTYPES, most_head_dim=_MAX_HEAD_DIM)

    def attend(
        self, layer: LayerSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: AttentionBatch
    ) -> torch.Tensor:
        if batch is not self._batch:
            self._bind_batch(batch)
        bound = self._layers.get((id(layer), batch.pool.dtype))
        if bound is None:
            bound = self._bind_layer(layer, batch.pool.dtype)
        key, value = _rows(key, query.dtype), _rows(value, query.dtype)
        query = _rows(query, query.dtype)
        out = query.new_empty((query.shape[0], layer.num_heads, layer.v_head_dim))
        rows = self._rows
        rows.query, rows.key, rows.value, rows.out = query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr()
        rows.query_token, rows.query_head, _ = query.stride()
        rows.key_token, rows.key_head, _ = key.stride()
        rows.value_token, rows.value_head, _ = value.stride()
        rows.num_tokens = query.shape[0]
        rows.is_bf16 = query.dtype is torch.bfloat16
        if self._attend(bound.address, self._batch_address, self._rows_address, self._num_threads):
            raise InternalError("native attention: out of memory for scratch")
        return out

    def _bind_batch(self, batch: AttentionBatch) -> None:
        """Check once what the kernel takes on trust, and describe it."""
        if batch.pool.dtype not in _DTYPES or batch.pool.device.type != "cpu" or batch.pool.stride(1) != 1:
            raise ValueError("native attention: the pool must be float32 or bfloat16 blocks in host memory")
        for tensor, dtype in (
            (batch.starts, torch.int32),
            (batch.context_lens, torch.int32),
            (batch.block_tables, torch.int32),
            (batch.row_blocks, torch.int64),
            (batch.row_offsets, torch.int64),
        ):
            if tensor.dtype is not dtype or tensor.stride()[-1:] not in ((1,), ()) or tensor.device.type != "cpu":
                raise ValueError(f"native attention: batch tensors must be contiguous on the host, got {tensor.dtype}")
        args = self._batch_args
        args.pool, args.block_stride = batch.pool.data_ptr(), batch.pool.stride(0)
        args.starts, args.context_lens = batch.starts.data_ptr(), batch.context_lens.data_ptr()
        args.block_tables, args.table_stride = batch.block_tables.data_ptr(), batch.block_tables.stride(0)
        args.row_blocks, args.row_offsets = batch.row_blocks.data_ptr(), batch.row_offsets.data_ptr()
        args.num_seqs, args.block_size = batch.num_seqs, batch.block_size
        args.num_rows = int(batch.starts[-1])
        self._batch = batch

    def _bind_layer(self, layer: LayerSpec, pool_dtype: torch.dtype) -> _BoundLayer:
        sinks = None if layer.sinks is None else layer.sinks.detach().to("cpu", torch.float32).contiguous()
        args = LayerArgs(
            k_offset=layer.k_offset,
            v_offset=layer.v_offset,
            sinks=None if sinks is None else sinks.data_ptr(),
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            k_dim=layer.k_head_dim,
            v_dim=layer.v_head_dim,
            window=layer.window or 0,
            pool_is_bf16=pool_dtype is torch.bfloat16,
            scale=layer.scale,
            softcap=layer.softcap,
        )
        bound = _BoundLayer(layer, sinks, args, ctypes.addressof(args))
        self._layers[id(layer), pool_dtype] = bound  # `bound` keeps the layer, so its id stays its own
        return bound


def _rows(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As the kernel reads rows: one type for query, key and value, the head dimension contiguous."""
    if tensor.dtype is not dtype:
        tensor = tensor.to(dtype)
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()

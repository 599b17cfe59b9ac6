"""Attention in Triton: on a CUDA device, or in Triton's interpreter on the CPU, slowly, for the tests.

Three launches a layer at most. Sequences of one token with a long context are split over it (`attend_split`,
then `combine`), all others take `attend_rows`; nothing here waits for the device. How rows are grouped changes
no bit of theirs: `triton_kernels` says why, and where that would end.
"""

from importlib.util import find_spec
from typing import Any

import torch

from common.attention.base import AttentionBatch, LayerSpec, beyond_limits

DECODE_ROWS = 16  # the fewest that a tensor core takes; heads of a group share them
PREFILL_ROWS = 32
INTERPRETED_ROWS = 128  # an operation costs the interpreter the same for any number of rows
SPLIT_TOKENS = 512
_MAX_HEAD_DIM = 512  # a tile of K and of V must fit into shared memory
_TILE_BYTES = 16 << 10
LAUNCH = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": False}
_STORED_ROWS = 4  # whose K and V one program stores
_COMBINED_HEADS = 4  # that one program merges
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


Shape = dict[str, Any]
"""The constants that a layer's kernels are compiled for: they follow from the layer and the types, not from a batch."""


class TritonAttention:
    """Any head dimensions up to 512, window, softcap and sinks; float32, bfloat16 and float16, KV in another of them.

    Where query and KV share a 16-bit type, weights are rounded to it before they meet the values, as the tensor
    cores want them; otherwise everything is computed in float32.
    """

    name = "triton"

    def __init__(
        self,
        *,
        num_threads: int = 1,
        split_tokens: int = SPLIT_TOKENS,
        decode_rows: int = DECODE_ROWS,
        prefill_rows: int = 0,
    ) -> None:
        """`num_threads` means nothing here. `split_tokens`, a power of two of at least 16, changes last bits.

        Rows, powers of two of at least 16, change none below 64 (see `triton_kernels`); 0: the device's own number.
        """
        from common.attention import triton_kernels  # here, so that this module imports without triton

        self._kernels: Any = triton_kernels
        self._split_tokens = split_tokens
        self._decode_rows = decode_rows
        self._prefill_rows = prefill_rows or (INTERPRETED_ROWS if triton_kernels.INTERPRETED else PREFILL_ROWS)
        self._stored_rows = INTERPRETED_ROWS if triton_kernels.INTERPRETED else _STORED_ROWS
        self._shapes: dict[tuple[int, torch.dtype, torch.dtype, int], tuple[LayerSpec, Shape]] = {}

    @staticmethod
    def available(device_type: str = "cpu") -> str | None:
        """Why it cannot be used here on such a device, or None."""
        if find_spec("triton") is None:
            return "triton is not installed"
        from common.attention.triton_kernels import INTERPRETED

        if INTERPRETED:
            return None if device_type == "cpu" else "TRITON_INTERPRET is set: its interpreter is for the CPU"
        if not torch.cuda.is_available():
            return "there is no CUDA device"
        return None if device_type == "cuda" else "it needs a CUDA device"

    def unsupported(self, layer: LayerSpec, dtype: torch.dtype, block_size: int) -> str | None:
        return beyond_limits(layer, dtype, block_size, dtypes=_DTYPES, most_head_dim=_MAX_HEAD_DIM)

    def attend(
        self, layer: LayerSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: AttentionBatch
    ) -> torch.Tensor:
        num_rows = batch.row_blocks.shape[0]
        padded = num_rows < query.shape[0]
        out = (query.new_zeros if padded else query.new_empty)((query.shape[0], layer.num_heads, layer.v_head_dim))
        if num_rows == 0:
            return out
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        shape = self.shape(layer, query.dtype, batch)
        self._store(layer, key, value, batch)
        num_splits = -(-batch.block_tables.shape[1] * batch.block_size // self._split_tokens)
        all_single = num_rows == batch.num_seqs
        if num_splits == 1:
            rows = self._decode_rows if all_single else self._prefill_rows
            self._attend_rows(layer, shape, query, out, batch, rows=rows, skip_single=False)
            return out
        self._attend_splits(layer, shape, query, out, batch, num_splits)
        if not all_single:
            self._attend_rows(layer, shape, query, out, batch, rows=self._prefill_rows, skip_single=True)
        return out

    def _store(self, layer: LayerSpec, key: torch.Tensor, value: torch.Tensor, batch: AttentionBatch) -> None:
        num_rows, stored = batch.row_blocks.shape[0], self._stored_rows
        self._kernels.store[(-(-num_rows // stored),)](
            key,
            value,
            *_blocks(layer, batch),
            batch.row_blocks,
            batch.row_offsets,
            num_rows,
            BLOCK_SIZE=batch.block_size,
            KV_HEADS=layer.num_kv_heads,
            K_DIM=layer.k_head_dim,
            V_DIM=layer.v_head_dim,
            K_ROW=_power_of_two(layer.num_kv_heads * layer.k_head_dim),
            V_ROW=_power_of_two(layer.num_kv_heads * layer.v_head_dim),
            ROWS=stored,
        )

    def _attend_rows(
        self,
        layer: LayerSpec,
        shape: Shape,
        query: torch.Tensor,
        out: torch.Tensor,
        batch: AttentionBatch,
        *,
        rows: int,
        skip_single: bool,
    ) -> None:
        num_tiles = batch.row_blocks.shape[0] * shape["GROUP"] // rows + batch.num_seqs
        self._kernels.attend_rows[(num_tiles, layer.num_kv_heads)](
            query,
            out,
            *_blocks(layer, batch),
            batch.starts,
            batch.context_lens,
            batch.block_tables,
            batch.block_tables.stride(0),
            layer.sinks,
            batch.num_seqs,
            layer.scale,
            SKIP_SINGLE=skip_single,
            SINKS=layer.sinks is not None,
            ROWS=rows,
            **shape,
            **LAUNCH,
        )

    def _attend_splits(
        self,
        layer: LayerSpec,
        shape: Shape,
        query: torch.Tensor,
        out: torch.Tensor,
        batch: AttentionBatch,
        num_splits: int,
    ) -> None:
        num_seqs, num_heads = batch.num_seqs, layer.num_heads
        group_tiles = -(-shape["GROUP"] // self._decode_rows)
        part_m, part_mass = query.new_empty((2, num_seqs, num_heads, num_splits), dtype=torch.float32)
        part = query.new_empty((num_seqs, num_heads, num_splits, shape["V_PAD"]), dtype=torch.float32)
        self._kernels.attend_split[(num_splits, layer.num_kv_heads * group_tiles, num_seqs)](
            query,
            part_m,
            part_mass,
            part,
            *_blocks(layer, batch),
            batch.starts,
            batch.context_lens,
            batch.block_tables,
            batch.block_tables.stride(0),
            num_splits,
            layer.scale,
            ROWS=self._decode_rows,
            GROUP_TILES=group_tiles,
            **shape,
            **LAUNCH,
        )
        self._kernels.combine[(num_seqs, -(-num_heads // _COMBINED_HEADS))](
            part_m,
            part_mass,
            part,
            out,
            batch.starts,
            batch.context_lens,
            layer.sinks,
            num_splits,
            NUM_HEADS=num_heads,
            V_DIM=shape["V_DIM"],
            V_PAD=shape["V_PAD"],
            WINDOW=shape["WINDOW"],
            SINKS=layer.sinks is not None,
            TILE=shape["TILE"],
            SPLIT=shape["SPLIT"],
            HEADS=_COMBINED_HEADS,
            **LAUNCH,
        )

    def shape(self, layer: LayerSpec, dtype: torch.dtype, batch: AttentionBatch) -> Shape:
        """For queries of type `dtype`."""
        key = (id(layer), dtype, batch.pool.dtype, batch.block_size)
        found = self._shapes.get(key)
        if found is None:
            found = (layer, self._new_shape(layer, dtype, batch))  # holds the layer, so its id stays its own
            self._shapes[key] = found
        return found[1]

    def _new_shape(self, layer: LayerSpec, dtype: torch.dtype, batch: AttentionBatch) -> Shape:
        pool = batch.pool
        if (pool.device.type == "cpu") is not self._kernels.INTERPRETED or pool.stride(1) != 1:
            raise ValueError(f"triton attention: a pool on {pool.device}, whose elements lie {pool.stride(1)} apart")
        k_pad, v_pad = (max(16, _power_of_two(dim)) for dim in (layer.k_head_dim, layer.v_head_dim))
        same_narrow = dtype is pool.dtype and dtype.itemsize == 2
        return {
            "BLOCK_SIZE": batch.block_size,
            "KV_HEADS": layer.num_kv_heads,
            "GROUP": layer.num_heads // layer.num_kv_heads,
            "K_DIM": layer.k_head_dim,
            "V_DIM": layer.v_head_dim,
            "K_PAD": k_pad,
            "V_PAD": v_pad,
            "WINDOW": layer.window or 0,
            "SOFTCAP": layer.softcap,
            "ROUND": same_narrow,
            "WIDE": self._kernels.INTERPRETED or not same_narrow,
            "TILE": min(64, self._split_tokens, max(16, _TILE_BYTES // (max(k_pad, v_pad) * pool.dtype.itemsize))),
            "SPLIT": self._split_tokens,
        }


def _blocks(layer: LayerSpec, batch: AttentionBatch) -> tuple[torch.Tensor, int, int, int]:
    """The pool and where in it this layer lies, as every kernel takes them."""
    return batch.pool, batch.pool.stride(0), layer.k_offset, layer.v_offset


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()

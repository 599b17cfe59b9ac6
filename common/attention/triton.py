"""Attention in Triton: on a CUDA device, or in Triton's interpreter on the CPU, slowly, for the tests.

Three launches a layer at most. Sequences of one token with a long context are split over it (`attend_split`,
then `combine`), all others take `attend_rows`; nothing here waits for the device. How rows are grouped changes
no bit of theirs: `triton_kernels` says why, and where that would end.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from common.attention.base import AttentionBatch, LayerSpec

DECODE_ROWS = 16  # the fewest that a tensor core takes; heads of a group share them
PREFILL_ROWS = 32
SPLIT_TOKENS = 512
_MAX_HEAD_DIM = 512  # a tile of K and of V must fit into shared memory
_TILE_BYTES = 16 << 10
_LAUNCH = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": False}
_COMBINED_HEADS = 4  # that one program merges
_PIECE = 1024  # elements of a block that one program copies
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True)
class _Geometry:
    """What the kernels of a layer are compiled for. Depends on the layer and the types alone, never on a batch."""

    shape: dict[str, Any]  # constants that attend_rows and attend_split share
    num_heads: int
    heads_pad: int


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
        prefill_rows: int = PREFILL_ROWS,
    ) -> None:
        """`num_threads` means nothing here. `split_tokens` changes last bits; rows, powers of two of at least 16, do not
        below 64 (see `triton_kernels`)."""
        from common.attention import triton_kernels  # here, so that this module imports without triton

        self._kernels: Any = triton_kernels
        self._split_tokens = split_tokens
        self._decode_rows = decode_rows
        self._prefill_rows = prefill_rows
        self._geometries: dict[tuple[int, torch.dtype, torch.dtype, int], tuple[LayerSpec, _Geometry]] = {}

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
        if dtype not in _DTYPES:
            return f"KV of type {dtype} (float32, bfloat16 and float16 are supported)"
        if layer.num_heads % layer.num_kv_heads:
            return f"{layer.num_heads} heads do not divide into {layer.num_kv_heads} KV heads"
        if max(layer.k_head_dim, layer.v_head_dim) > _MAX_HEAD_DIM:
            return f"a head dimension above {_MAX_HEAD_DIM}"
        if layer.sinks is not None and layer.sinks.numel() != layer.num_heads:
            return f"{layer.sinks.numel()} sinks for {layer.num_heads} heads"
        if block_size < 1 or (layer.window is not None and layer.window < 1):
            return "a block size or window below 1"
        return None

    def attend(
        self, layer: LayerSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: AttentionBatch
    ) -> torch.Tensor:
        num_rows = batch.row_blocks.shape[0]
        padded = num_rows < query.shape[0]
        out = (query.new_zeros if padded else query.new_empty)((query.shape[0], layer.num_heads, layer.v_head_dim))
        if num_rows == 0:
            return out
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        geometry = self._geometry(layer, query.dtype, batch)
        self._store(layer, geometry, key, value, batch)
        num_splits = -(-batch.block_tables.shape[1] * batch.block_size // self._split_tokens)
        all_single = num_rows == batch.num_seqs
        if num_splits == 1:
            rows = self._decode_rows if all_single else self._prefill_rows
            self._attend_rows(layer, geometry, query, out, batch, rows=rows, skip_single=False)
            return out
        self._attend_splits(layer, geometry, query, out, batch, num_splits)
        if not all_single:
            self._attend_rows(layer, geometry, query, out, batch, rows=self._prefill_rows, skip_single=True)
        return out

    def _store(
        self, layer: LayerSpec, geometry: _Geometry, key: torch.Tensor, value: torch.Tensor, batch: AttentionBatch
    ) -> None:
        shape = geometry.shape
        self._kernels.store[(batch.row_blocks.shape[0],)](
            key,
            value,
            *_blocks(layer, batch),
            batch.row_blocks,
            batch.row_offsets,
            BLOCK_SIZE=batch.block_size,
            KV_HEADS=layer.num_kv_heads,
            HEADS_PAD=geometry.heads_pad,
            K_DIM=shape["K_DIM"],
            V_DIM=shape["V_DIM"],
            K_PAD=shape["K_PAD"],
            V_PAD=shape["V_PAD"],
        )

    def _attend_rows(
        self,
        layer: LayerSpec,
        geometry: _Geometry,
        query: torch.Tensor,
        out: torch.Tensor,
        batch: AttentionBatch,
        *,
        rows: int,
        skip_single: bool,
    ) -> None:
        num_tiles = batch.row_blocks.shape[0] * geometry.shape["GROUP"] // rows + batch.num_seqs
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
            **geometry.shape,
            **_LAUNCH,
        )

    def _attend_splits(
        self,
        layer: LayerSpec,
        geometry: _Geometry,
        query: torch.Tensor,
        out: torch.Tensor,
        batch: AttentionBatch,
        num_splits: int,
    ) -> None:
        shape, num_seqs, num_heads = geometry.shape, batch.num_seqs, geometry.num_heads
        group_tiles = -(-shape["GROUP"] // self._decode_rows)
        part_m, part_l = query.new_empty((2, num_seqs, num_heads, num_splits), dtype=torch.float32)
        part = query.new_empty((num_seqs, num_heads, num_splits, shape["V_PAD"]), dtype=torch.float32)
        self._kernels.attend_split[(num_splits, layer.num_kv_heads * group_tiles, num_seqs)](
            query,
            part_m,
            part_l,
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
            **_LAUNCH,
        )
        self._kernels.combine[(num_seqs, -(-num_heads // _COMBINED_HEADS))](
            part_m,
            part_l,
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
            **_LAUNCH,
        )

    def _geometry(self, layer: LayerSpec, dtype: torch.dtype, batch: AttentionBatch) -> _Geometry:
        key = (id(layer), dtype, batch.pool.dtype, batch.block_size)
        found = self._geometries.get(key)
        if found is None:
            found = (layer, self._new_geometry(layer, dtype, batch))  # holds the layer, so its id stays its own
            self._geometries[key] = found
        return found[1]

    def _new_geometry(self, layer: LayerSpec, dtype: torch.dtype, batch: AttentionBatch) -> _Geometry:
        pool = batch.pool
        if (pool.device.type == "cpu") is not self._kernels.INTERPRETED or pool.stride(1) != 1:
            raise ValueError(f"triton attention: a pool on {pool.device}, whose elements lie {pool.stride(1)} apart")
        k_pad, v_pad = (max(16, _power_of_two(dim)) for dim in (layer.k_head_dim, layer.v_head_dim))
        same_narrow = dtype is pool.dtype and dtype.itemsize == 2
        tile = min(64, self._split_tokens, max(16, _TILE_BYTES // (max(k_pad, v_pad) * pool.dtype.itemsize)))
        shape = {
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
            "TILE": tile,
            "SPLIT": self._split_tokens,
        }
        return _Geometry(shape, layer.num_heads, _power_of_two(layer.num_kv_heads))


def copy_blocks(pool: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """`pool[targets[i]] = pool[sources[i]]`; no target may be a source or another target. Indices int32 or int64."""
    _copy(pool, pool, sources, targets, sources.shape[0])


def gather_blocks(pool: torch.Tensor, blocks: torch.Tensor, staging: torch.Tensor) -> None:
    """`staging[i] = pool[blocks[i]]`: staging is [at least len(blocks), block_elements], of the pool's type and device."""
    _copy(pool, staging, blocks, None, blocks.shape[0])


def scatter_blocks(staging: torch.Tensor, blocks: torch.Tensor, pool: torch.Tensor) -> None:
    """`pool[blocks[i]] = staging[i]`; no block twice."""
    _copy(staging, pool, None, blocks, blocks.shape[0])


def _copy(
    source: torch.Tensor,
    target: torch.Tensor,
    source_rows: torch.Tensor | None,
    target_rows: torch.Tensor | None,
    num_rows: int,
) -> None:
    from common.attention.triton_kernels import copy_rows

    if source.dtype is not target.dtype or source.shape[1] != target.shape[1] or source.device != target.device:
        raise ValueError(f"blocks of {source.shape[1]} {source.dtype} and of {target.shape[1]} {target.dtype}")
    if num_rows == 0:
        return
    word = _WORDS[source.dtype.itemsize]  # as bits: a copy must not touch a NaN's
    source, target = source.view(word), target.view(word)
    row_elements = source.shape[1]
    copy_rows[(-(-row_elements // _PIECE), num_rows)](
        source,
        target,
        source_rows,
        target_rows,
        source.stride(0),
        target.stride(0),
        row_elements,
        FROM_ROWS=source_rows is not None,
        TO_ROWS=target_rows is not None,
        PIECE=_PIECE,
    )


def _blocks(layer: LayerSpec, batch: AttentionBatch) -> tuple[torch.Tensor, int, int, int]:
    """The pool and where in it this layer lies, as every kernel takes them."""
    return batch.pool, batch.pool.stride(0), layer.k_offset, layer.v_offset


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()

"""Attention as the textbook has it, one row at a time: slow, obvious, the oracle of every other backend.

A row is computed in double precision from its own query and its own context and rounded once, so its bits
cannot depend on what else is in the batch or on how its sequence was cut into chunks.
"""

import torch

from common.attention.base import AttentionBatch, LayerSpec


class ReferenceAttention:
    """Any head dimensions, window, softcap and sinks; any floating dtype; any device."""

    name = "reference"

    def __init__(self, *, num_threads: int = 1) -> None:
        """`num_threads` is torch's own business here."""

    @staticmethod
    def available(device_type: str = "cpu") -> str | None:
        """Why it cannot be used on such a device of this machine: never."""
        return None

    def unsupported(self, layer: LayerSpec, dtype: torch.dtype, block_size: int) -> str | None:
        return None if dtype.is_floating_point else f"{dtype} is not a floating point type"

    def attend(
        self,
        layer: LayerSpec,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: AttentionBatch,
    ) -> torch.Tensor:
        keys, values = layer_views(layer, batch.pool, batch.block_size)
        num_rows = batch.row_blocks.shape[0]
        keys[batch.row_blocks, :, batch.row_offsets] = key[:num_rows].to(keys.dtype)
        values[batch.row_blocks, :, batch.row_offsets] = value[:num_rows].to(values.dtype)
        out = query.new_zeros(query.shape[0], layer.num_heads, layer.v_head_dim)
        starts, context_lens = batch.starts.tolist(), batch.context_lens.tolist()
        for seq, context_len in enumerate(context_lens):
            blocks = batch.block_tables[seq, : -(-context_len // batch.block_size)]
            k, v = _gathered(keys, blocks), _gathered(values, blocks)
            first = context_len - (starts[seq + 1] - starts[seq])
            for row in range(starts[seq], starts[seq + 1]):
                length = first + row - starts[seq] + 1  # what this row sees ends with itself
                oldest = max(0, length - layer.window) if layer.window else 0
                out[row] = _one_row(layer, query[row], k[:, oldest:length], v[:, oldest:length])
        return out


def layer_views(layer: LayerSpec, pool: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer's K and V inside the pool: [num_blocks, num_kv_heads, block_size, head_dim] each, no copy."""

    def view(offset: int, head_dim: int) -> torch.Tensor:
        shape = (pool.shape[0], layer.num_kv_heads, block_size, head_dim)
        stride = (pool.stride(0), block_size * head_dim, head_dim, 1)
        return pool.as_strided(shape, stride, pool.storage_offset() + offset)

    return view(layer.k_offset, layer.k_head_dim), view(layer.v_offset, layer.v_head_dim)


def _gathered(view: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """One sequence's K or V in order: [num_kv_heads, tokens, head_dim], double."""
    return view[blocks.long()].transpose(0, 1).flatten(1, 2).double()


def _one_row(layer: LayerSpec, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """query [num_heads, k_head_dim], keys and values [num_kv_heads, tokens, head_dim] -> [num_heads, v_head_dim]."""
    group = layer.num_heads // layer.num_kv_heads
    q = query.double().view(layer.num_kv_heads, group, -1)
    scores = torch.matmul(q, keys.transpose(1, 2)) * layer.scale  # [num_kv_heads, group, tokens]
    if layer.softcap:
        scores = torch.tanh(scores / layer.softcap) * layer.softcap
    if layer.sinks is not None:  # one more logit in the softmax, whose share goes nowhere
        sinks = layer.sinks.double().view(layer.num_kv_heads, group, 1)
        weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    return torch.matmul(weights, values).view(layer.num_heads, -1).to(query.dtype)

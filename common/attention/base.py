"""What an attention backend is: write this step's K and V into the pool, attend over the block table.

One forward pass runs a flattened batch without padding: the sequences' new tokens one after the other.
The pool is a single tensor of whole blocks (`messages.KVLayout`), so a backend finds layer `l` of block
`b` at `pool[b] + offset`, reads it in place and never gathers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One attention layer, as found by the dry run at load.

    Offsets count elements from the start of a block to the layer's K and V. `window` is the number of
    positions a token sees, itself included; `softcap` 0 means none; `sinks` holds one logit a head or None.
    """

    index: int
    num_heads: int
    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    k_offset: int
    v_offset: int
    scale: float
    window: int | None = None
    softcap: float = 0.0
    sinks: torch.Tensor | None = None  # [num_heads], float32


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Where the rows of this step belong. All tensors live on the pool's device.

    Sequence `s` owns rows `starts[s] .. starts[s + 1]`; they are its last positions, its context being
    `context_lens[s]` tokens, this step's included. Its blocks are `block_tables[s, : ceil(context / block_size)]`.
    Rows from `starts[num_seqs]` on are padding: a backend writes nothing for them and leaves their output zero.
    """

    pool: torch.Tensor  # [num_blocks, block_elements]
    block_size: int
    starts: torch.Tensor  # int32 [num_seqs + 1]
    context_lens: torch.Tensor  # int32 [num_seqs]
    block_tables: torch.Tensor  # int32 [num_seqs, max_blocks]
    row_blocks: torch.Tensor  # int64 [num_rows]: the block that each real row's K and V go to
    row_offsets: torch.Tensor  # int64 [num_rows]: and the position inside it

    @property
    def num_seqs(self) -> int:
        return self.context_lens.shape[0]


class AttentionBackend(Protocol):
    """A row's result depends on its own sequence alone: same bits alone, batched or chunked."""

    name: str

    def unsupported(self, layer: LayerSpec, dtype: torch.dtype, block_size: int) -> str | None:
        """Why this layer cannot run here, or None. Asked once per layer at load."""
        ...

    def attend(
        self,
        layer: LayerSpec,
        query: torch.Tensor,  # [num_tokens, num_heads, k_head_dim]
        key: torch.Tensor,  # [num_tokens, num_kv_heads, k_head_dim]
        value: torch.Tensor,  # [num_tokens, num_kv_heads, v_head_dim]
        batch: AttentionBatch,
    ) -> torch.Tensor:  # [num_tokens, num_heads, v_head_dim]
        """Store `key` and `value` of the real rows in the pool, then attend causally over the context."""
        ...


def beyond_limits(
    layer: LayerSpec, dtype: torch.dtype, block_size: int, *, dtypes: Sequence[torch.dtype], most_head_dim: int
) -> str | None:
    """`AttentionBackend.unsupported` of a backend whose kernels take any layer but for types and head dimensions."""
    if dtype not in dtypes:
        *others, last = (str(one).removeprefix("torch.") for one in dtypes)
        return f"KV of type {dtype} ({', '.join(others)} and {last} are supported)"
    if layer.num_heads % layer.num_kv_heads:
        return f"{layer.num_heads} heads do not divide into {layer.num_kv_heads} KV heads"
    if max(layer.k_head_dim, layer.v_head_dim) > most_head_dim:
        return f"a head dimension above {most_head_dim}"
    if layer.sinks is not None and layer.sinks.numel() != layer.num_heads:
        return f"{layer.sinks.numel()} sinks for {layer.num_heads} heads"
    if block_size < 1 or (layer.window is not None and layer.window < 1):
        return "a block size or window below 1"
    return None


BACKENDS = {
    "reference": "common.attention.reference:ReferenceAttention",
    "native": "common.attention.native:NativeAttention",
    "triton": "common.attention.triton:TritonAttention",
}
"""Name -> "module:Class", imported on use (`common.registry`)."""

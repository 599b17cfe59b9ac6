"""A model's forward pass as data: read off a transformers module once (`lowering`), run by the kernels (`program`).

A recipe names its weights; their bytes lie beside it in a packed file. It holds everything that a node must know of a
model, so that serving a prepared one needs neither transformers nor torch.
"""

import msgspec

from common.messages import KVLayout, LayerKV
from common.native.abi import OpCode

LOWERED = frozenset(
    {"llama", "mistral", "qwen2", "qwen3", "phi3", "smollm3", "granite", "gemma", "gemma2", "gemma3_text"}
)
"""Architectures (`model_type` of a config.json) that `lowering` knows."""


class Op(msgspec.Struct, frozen=True, omit_defaults=True):
    """One operation (csrc/program.h). `src` and `dst` name buffers of rows; `index` counts in the list it needs."""

    code: OpCode
    dst: str
    src: str = ""
    index: int = 0
    value: float = 1.0
    add: bool = False


class Layer(msgspec.Struct, frozen=True):
    """An attention layer, as `attention.base.LayerSpec` without its place in a block."""

    num_heads: int
    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    scale: float
    window: int | None = None
    softcap: float = 0.0


class Rotation(msgspec.Struct, frozen=True):
    """How a layer's queries and keys are prepared: the norms of their heads, then the rotary embedding."""

    num_heads: int
    num_kv_heads: int
    dim: int
    rotary_dim: int
    table: int = 0
    epsilon: float = 0.0
    query_norm: str = ""
    key_norm: str = ""


class RotaryTable(msgspec.Struct, frozen=True):
    """cos and sin of position * frequency, times `scaling`; `frequencies` names an array [rotary_dim / 2]."""

    frequencies: str
    scaling: float


class Recipe(msgspec.Struct, frozen=True):
    """Buffers are named by `widths` (floats a row); `logits` is the result, one row for each token wanted."""

    model_type: str
    ops: tuple[Op, ...]
    widths: dict[str, int]
    linears: tuple[str, ...]
    norms: tuple[str, ...]
    layers: tuple[Layer, ...]
    rotations: tuple[Rotation, ...]
    tables: tuple[RotaryTable, ...]
    vocab_size: int
    max_model_len: int
    """The longest sequence for which all of this holds; a longer one may want other rotary frequencies."""

    def layout(self, block_size: int, dtype: str, itemsize: int) -> KVLayout:
        return KVLayout(
            block_size=block_size,
            dtype=dtype,
            itemsize=itemsize,
            layers=tuple(LayerKV(layer.num_kv_heads, layer.k_head_dim, layer.v_head_dim) for layer in self.layers),
        )

"""Where transformers meets our attention: one name in its AttentionInterface, the batch from a context variable.

No mask function is registered under the name, so transformers builds no mask. What a layer's call means is
decided by whoever is `bound`: the dry run at load records it, a step sends it to the backend. A context
variable, because some models do not forward extra arguments to their attention.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from transformers import AttentionInterface

from common.errors import InternalError

ATTENTION = "baton"
"""The name models are loaded with (`attn_implementation`)."""

LayerAttention = Callable[[torch.nn.Module, torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]], torch.Tensor]
"""(module, query [tokens, heads, k_head_dim], key, value [tokens, kv heads, head_dim], options) -> [tokens, heads,
v_head_dim]; `options` are the keyword arguments of the model: scaling, sliding_window, softcap, s_aux, ..."""

_bound: ContextVar[LayerAttention | None] = ContextVar("baton_attention", default=None)


@contextmanager
def bound(attention: LayerAttention) -> Iterator[None]:
    """Within this context, in this thread, attention layers call `attention`."""
    token = _bound.set(attention)
    try:
        yield
    finally:
        _bound.reset(token)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, num_heads, num_tokens, k_head_dim]
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    attention = _bound.get()
    if attention is None:
        raise InternalError("an attention layer was called outside a step")
    if attention_mask is not None:
        options["attention_mask"] = attention_mask
    out = attention(module, _by_token(query), _by_token(key), _by_token(value), options)
    return out.unsqueeze(0), None


def _by_token(states: torch.Tensor) -> torch.Tensor:
    """[1, heads, tokens, dim] -> [tokens, heads, dim], contiguous (as most models already lay it out)."""
    return states[0].transpose(0, 1).contiguous()


AttentionInterface.register(ATTENTION, _attention)

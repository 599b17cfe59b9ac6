"""Rotary embeddings whose frequencies change with the length of the batch, made to depend on nothing.

Under `longrope` (Phi-3) and `dynamic` NTK scaling transformers picks the frequencies by the largest position in
a forward pass: the same token would be rotated differently next to a long sequence, and keys in the pool would
not fit later ones. So a served model stays within its original length, where frequencies are constant (dynamic
scaling knows no other); asked for more, longrope uses its long frequencies for every length.
"""

from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from common.errors import ConfigError


def _scalings(text: Any) -> list[dict[str, Any]]:
    """The rope parameters whose type depends on length; some models have a set for each layer type."""
    parameters = getattr(text, "rope_parameters", None) or {}
    sets = (
        [parameters] if "rope_type" in parameters else [part for part in parameters.values() if isinstance(part, dict)]
    )
    return [part for part in sets if part.get("rope_type") in ("longrope", "dynamic")]


def _original(text: Any, scaling: dict[str, Any]) -> int:
    if scaling["rope_type"] == "dynamic":
        return int(text.max_position_embeddings)
    original = scaling.get("original_max_position_embeddings") or text.original_max_position_embeddings
    return int(original)


def longest(text: Any, asked: int, own: int) -> int:
    """The served length: `asked`, else the longest at which frequencies are constant and as trained."""
    limits = [_original(text, scaling) for scaling in _scalings(text)]
    if asked:
        return asked
    return min([own, *limits])


def pin(module: torch.nn.Module, text: Any, max_model_len: int) -> None:
    """Fix the frequencies for sequences of up to `max_model_len`. ConfigError where that cannot be done."""
    for scaling in _scalings(text):
        if max_model_len <= _original(text, scaling):
            continue
        parts: list[Any] = [part for part in module.modules() if hasattr(part, "original_inv_freq")]
        if "rope_type" not in text.rope_parameters or not parts:
            raise ConfigError(
                f"max_model_len: the rotary frequencies of {text.model_type} beyond {_original(text, scaling)} tokens "
                "depend on the batch; set max_model_len to that or less"
            )
        long, _ = ROPE_INIT_FUNCTIONS["longrope"](text, torch.device("cpu"), seq_len=_original(text, scaling) + 1)
        for part in parts:
            part.original_inv_freq.copy_(long)  # what transformers falls back to for short batches
            part.inv_freq.copy_(long)

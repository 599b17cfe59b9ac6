"""A model folder into a model that runs on paged attention, or a refusal that says why it cannot.

Any transformers causal LM whose layers all go through AttentionInterface works. A dry run of two tokens finds
out what each layer keeps per token; whatever the pool or a backend could not honour is refused here, by name,
rather than answered wrongly later.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common import telemetry
from common.attention.base import LayerSpec
from common.attention.hook import bound
from common.errors import ConfigError
from common.messages import KVLayout, LayerKV
from common.model import rope
from common.model.quantised_weights import round_weights
from common.model.quantization import Quantization, quantised_digest, weights_only
from common.model.store import model_digest
from common.model.weights import Model, load_config, load_model

log = telemetry.logger(__name__)

_REFUSED = {
    "bloom": "its attention never calls AttentionInterface",
    "falcon": "its attention never calls AttentionInterface",
    "mpt": "its attention never calls AttentionInterface",
    "llama4_text": "its chunked attention and temperature tuning do not pass through AttentionInterface",
    "llama4": "its chunked attention and temperature tuning do not pass through AttentionInterface",
    "mamba": "it keeps a recurrent state instead of keys and values",
    "mamba2": "it keeps a recurrent state instead of keys and values",
    "falcon_h1": "some of its layers keep a recurrent state",
    "falcon_mamba": "it keeps a recurrent state instead of keys and values",
    "jamba": "some of its layers keep a recurrent state",
    "qwen3_next": "some of its layers keep a recurrent state",
}
_LAYER_TYPES = {"full_attention", "sliding_attention", "attention", "sparse", "dense"}
_UNDERSTOOD = {"scaling", "sliding_window", "softcap", "s_aux"}
_HARMLESS = {
    "dropout",  # 0 in evaluation
    "position_ids",  # already in the rotated queries and keys
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "is_causal",
    "cache_position",
    "logits_to_keep",
    "output_router_logits",
}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run under `attention.hook.bound`, and what its KV pool must hold."""

    module: Model
    layers: tuple[LayerSpec, ...]
    layout: KVLayout
    max_model_len: int
    vocab_size: int
    digest: str
    quantization: str


def load(
    folder: Path,
    *,
    dtype: torch.dtype,
    block_size: int,
    max_model_len: int = 0,
    device: torch.device | None = None,
    quantization: Quantization = "none",
    kv_dtype: torch.dtype | None = None,
) -> LoadedModel:
    """Load `folder` (see `store.resolve`). ConfigError names what cannot be served and why."""
    config = load_config(folder)
    text = config.get_text_config(decoder=True)
    for model_type in (config.model_type, text.model_type):
        if model_type in _REFUSED:
            raise ConfigError(f"model: {model_type} cannot be served: {_REFUSED[model_type]}")
    length = _length(text, max_model_len)
    module, mapped = load_model(folder, config, dtype)
    round_weights(module, folder, quantization)
    rope.pin(module, text, length)
    if device is not None:
        module = module.to(device)
    layers = discover(module, text, block_size=block_size, max_model_len=length)
    layout = KVLayout(
        block_size=block_size,
        dtype=str(kv_dtype or dtype).removeprefix("torch."),
        itemsize=(kv_dtype or dtype).itemsize,
        layers=tuple(LayerKV(layer.num_kv_heads, layer.k_head_dim, layer.v_head_dim) for layer in layers),
    )
    computed = weights_only(quantization)
    digest = quantised_digest(model_digest(folder), computed)
    log.info(
        "model loaded",
        folder=str(folder),
        architecture=type(module).__name__,
        mapped=mapped,
        quantization=computed,
        digest=digest,
    )
    return LoadedModel(module, layers, layout, length, text.vocab_size, digest, computed)


def _length(text: Any, asked: int) -> int:
    """The longest sequence: the model's own limit, or less if asked for."""
    own = getattr(text, "max_position_embeddings", None)
    if own is None and not asked:
        raise ConfigError(f"max_model_len: {text.model_type} states no limit of its own; set one")
    if own is not None and asked > own:
        raise ConfigError(f"max_model_len: {asked} is more than the {own} positions that the model knows")
    return rope.longest(text, asked, own or asked)


def discover(module: Model, text: Any, *, block_size: int, max_model_len: int) -> tuple[LayerSpec, ...]:
    """One LayerSpec for each attention layer, in model order, with offsets into a block.

    ConfigError unless every layer calls AttentionInterface exactly once with nothing that we would ignore.
    """
    calls: dict[int, list[_Call]] = {}

    def record(
        layer: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        index = getattr(layer, "layer_idx", -1)
        causal = getattr(layer, "is_causal", True) is not False
        calls.setdefault(index, []).append(
            _Call(query.shape[1], key.shape[1], key.shape[2], value.shape[2], options, causal)
        )
        return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])

    ids = torch.zeros(1, 2, dtype=torch.long, device=module.device)
    try:
        with torch.inference_mode(), bound(record):
            module(input_ids=ids, position_ids=torch.arange(2, device=module.device)[None], use_cache=False)
    except Exception as error:  # whatever a model's own code does when it meets attention it was not made for
        raise ConfigError(f"model: {text.model_type} cannot be served: its dry run failed: {error!r}") from error
    wrong = [index for index in range(text.num_hidden_layers) if len(calls.get(index, ())) != 1]
    if wrong or len(calls) != text.num_hidden_layers:
        raise ConfigError(
            f"model: {text.model_type} cannot be served: its layers {wrong or sorted(calls)} do not call "
            "AttentionInterface exactly once"
        )
    layers, offset = [], 0
    for index in range(text.num_hidden_layers):
        call = calls[index][0]
        reason = call.unservable(_window(text, index, max_model_len))
        if reason is not None:
            raise ConfigError(f"model: {text.model_type} cannot be served: its layer {index} {reason}")
        layer = call.spec(index, offset, block_size)
        layers.append(layer)
        offset = layer.v_offset + layer.num_kv_heads * block_size * layer.v_head_dim
    return tuple(layers)


def _window(text: Any, index: int, max_model_len: int) -> int | None:
    """What the configuration says layer `index` sees, where that is less than the longest sequence.

    Some models slide by their mask alone, which is never built here. ConfigError for layers that are no attention.
    """
    layer_types = getattr(text, "layer_types", None)
    layer_type = layer_types[index] if layer_types else "attention"
    if layer_type not in _LAYER_TYPES:
        raise ConfigError(f"model: {text.model_type} cannot be served: its layer {index} is of type {layer_type}")
    window = getattr(text, "attention_chunk_size", None)
    if layer_type == "sliding_attention" or not layer_types:
        window = window or getattr(text, "sliding_window", None)
    return window if window is not None and window < max_model_len else None


@dataclass(frozen=True, slots=True)
class _Call:
    """What a layer passed in the dry run."""

    num_heads: int
    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    options: dict[str, Any]
    causal: bool

    def unservable(self, expected_window: int | None) -> str | None:
        """Why paged attention would answer wrongly for this layer, or None."""
        unknown = sorted(
            name for name, value in self.options.items() if value is not None and name not in _UNDERSTOOD | _HARMLESS
        )
        if unknown:
            return f"passes {', '.join(unknown)} to its attention, which paged attention would ignore"
        if not self.causal:
            return "is not causal"
        if expected_window is not None and self.options.get("sliding_window") is None:
            return f"sees {expected_window} tokens only, without passing that to AttentionInterface"
        return None

    def spec(self, index: int, offset: int, block_size: int) -> LayerSpec:
        given = {name: value for name, value in self.options.items() if value is not None}
        window = given.get("sliding_window")
        sinks = given.get("s_aux")
        return LayerSpec(
            index=index,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            k_head_dim=self.k_head_dim,
            v_head_dim=self.v_head_dim,
            k_offset=offset,
            v_offset=offset + self.num_kv_heads * block_size * self.k_head_dim,
            scale=float(given.get("scaling", self.k_head_dim**-0.5)),
            window=None if window is None else int(window),
            softcap=float(given.get("softcap", 0.0)),
            sinks=None if sinks is None else sinks.detach().float().contiguous(),
        )

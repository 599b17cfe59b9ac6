"""A transformers module of a known architecture to a `Recipe`, and the weights it names.

Only decoder layers of the Llama kind: RMS norms, rotary attention, a gated product. What decides is the module
itself (which projections and norms a layer has), for architectures in a list; whoever packs the result compares it
with the module (`prepare`), so an architecture that changed its ways is noticed rather than answered wrongly.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from common.attention.base import LayerSpec
from common.model.loader import LoadedModel
from common.model.recipe import LOWERED, Layer, Op, Recipe, RotaryTable, Rotation
from common.native.abi import Activation, OpCode

_ACTIVATIONS = {"silu": Activation.SILU, "swish": Activation.SILU, "gelu_pytorch_tanh": Activation.GELU_TANH}


class NotLoweredError(Exception):
    """Why this model is not run by the kernels alone."""


@dataclass(frozen=True, slots=True)
class LinearSource:
    """A packed weight's parts, one below the other: names of the module's parameters; biases as tensors."""

    weights: tuple[str, ...]
    biases: tuple[torch.Tensor | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Lowered:
    recipe: Recipe
    linears: dict[str, LinearSource]
    arrays: dict[str, torch.Tensor]
    """Norms and rotary frequencies, float32."""


def lower(loaded: LoadedModel, text: Any) -> Lowered:
    """NotLoweredError says why not. `text` is the configuration of the language model."""
    if text.model_type not in LOWERED:
        raise NotLoweredError(f"{text.model_type} is not one of {', '.join(sorted(LOWERED))}")
    return _Lowering(loaded, text).result()


@dataclass(slots=True)
class _Lowering:
    loaded: LoadedModel
    text: Any
    ops: list[Op] = field(default_factory=list)
    linears: dict[str, LinearSource] = field(default_factory=dict)
    norms: list[str] = field(default_factory=list)
    arrays: dict[str, torch.Tensor] = field(default_factory=dict)
    rotations: list[Rotation] = field(default_factory=list)
    tables: dict[str, RotaryTable] = field(default_factory=dict)
    widths: dict[str, int] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)

    def result(self) -> Lowered:
        module = self.loaded.module
        self.names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._embed(module)
        for spec, layer in zip(self.loaded.layers, module.model.layers, strict=True):
            self._layer(spec, layer, last=spec.index == len(self.loaded.layers) - 1)
        self._head(module)
        recipe = Recipe(
            model_type=self.text.model_type,
            ops=tuple(self.ops),
            widths=self.widths,
            linears=tuple(self.linears),
            norms=tuple(self.norms),
            layers=tuple(_layer_of(spec) for spec in self.loaded.layers),
            rotations=tuple(self.rotations),
            tables=tuple(self.tables.values()),
            vocab_size=self.loaded.vocab_size,
            max_model_len=self.loaded.max_model_len,
        )
        return Lowered(recipe, self.linears, self.arrays)

    # --- the model's parts -----------------------------------------------------------------------------

    def _embed(self, module: Any) -> None:
        embedding = module.model.embed_tokens
        scale = float(getattr(embedding, "scalar_embed_scale", 1.0))
        scale *= float(getattr(self.text, "embedding_multiplier", None) or 1.0)
        self.widths["hidden"] = self.text.hidden_size
        index = self._linear("embedding" if module.lm_head.weight is not embedding.weight else "head", embedding)
        self.ops.append(Op(OpCode.EMBED, "hidden", index=index, value=scale))

    def _layer(self, spec: LayerSpec, layer: Any, *, last: bool) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        sandwich = hasattr(layer, "pre_feedforward_layernorm")
        at = f"layers.{spec.index}"
        self._norm("hidden", "normed", layer.input_layernorm, f"{at}.input_norm")
        self._into("normed", "qkv", f"{at}.qkv", *_projections(attention, "qkv_proj", "q_proj", "k_proj", "v_proj"))
        self._rotate(spec, attention, at)
        self.widths["attended"] = spec.num_heads * spec.v_head_dim
        self.ops.append(Op(OpCode.ATTEND, "attended", "qkv", spec.index))
        if last:
            self.ops.append(Op(OpCode.GATHER, "hidden", "attended"))
        after = layer.post_attention_layernorm
        self._add("attended", f"{at}.out", attention.o_proj, after if sandwich else None)
        self._norm("hidden", "normed", layer.pre_feedforward_layernorm if sandwich else after, f"{at}.mlp_norm")
        self._into("normed", "gate_up", f"{at}.gate_up", *_projections(mlp, "gate_up_proj", "gate_proj", "up_proj"))
        self._gate()
        self._add("gated", f"{at}.down", mlp.down_proj, layer.post_feedforward_layernorm if sandwich else None)

    def _head(self, module: Any) -> None:
        self._norm("hidden", "normed", module.model.norm, "norm")
        self._into("normed", "logits", "head", module.lm_head)
        scaling = float(getattr(self.text, "logits_scaling", None) or 1.0)
        if scaling != 1.0:
            self.ops.append(Op(OpCode.SCALE, "logits", value=1.0 / scaling))
        cap = getattr(self.text, "final_logit_softcapping", None)
        if cap:
            self.ops.append(Op(OpCode.SOFTCAP, "logits", value=float(cap)))

    def _rotate(self, spec: LayerSpec, attention: Any, at: str) -> None:
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        names = [
            self._norm_weight(norm, f"{at}.{name}") if norm else "" for norm, name in zip(norms, "qk", strict=True)
        ]
        table, rotary_dim = self._table(spec, attention)
        if not rotary_dim and not any(names):
            return
        rotation = Rotation(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            dim=spec.k_head_dim,
            rotary_dim=rotary_dim,
            table=table,
            epsilon=_epsilon(norms[0]) if norms[0] else 0.0,
            query_norm=names[0],
            key_norm=names[1],
        )
        if rotation in self.rotations:
            index = self.rotations.index(rotation)
        else:
            index = len(self.rotations)
            self.rotations.append(rotation)
        self.ops.append(Op(OpCode.ROTATE, "qkv", index=index))

    def _table(self, spec: LayerSpec, attention: Any) -> tuple[int, int]:
        """Which table of cos and sin a layer uses, and how much of a head it turns; 0 for none."""
        if not getattr(attention, "use_rope", True):
            return 0, 0
        rotary = self.loaded.module.model.rotary_emb
        kind = getattr(rotary, "layer_types", None) and self.text.layer_types[spec.index]
        prefix = f"{kind}_" if kind else ""
        name = f"{prefix}frequencies"
        if name not in self.tables:
            self.arrays[name] = getattr(rotary, f"{prefix}inv_freq").detach().float()
            self.tables[name] = RotaryTable(name, float(getattr(rotary, f"{prefix}attention_scaling")))
        return list(self.tables).index(name), 2 * self.arrays[name].numel()

    # --- operations ------------------------------------------------------------------------------------

    def _linear(self, name: str, *parts: Any) -> int:
        if name not in self.linears:
            biases = tuple(getattr(part, "bias", None) for part in parts)
            self.linears[name] = LinearSource(
                tuple(self.names[id(part.weight)] for part in parts),
                biases if any(bias is not None for bias in biases) else (),
            )
        return list(self.linears).index(name)

    def _into(self, src: str, dst: str, name: str, *parts: Any, add: bool = False) -> None:
        width = sum(part.weight.shape[0] for part in parts)
        if self.widths.setdefault(dst, width) != width:
            raise NotLoweredError(f"{name} has {width} outputs where other layers have {self.widths[dst]}")
        self.ops.append(Op(OpCode.LINEAR, dst, src, self._linear(name, *parts), add=add))

    def _norm_weight(self, norm: Any, name: str) -> str:
        weight = norm.weight.detach().float()
        self.arrays[name] = weight + 1.0 if type(norm).__name__.startswith("Gemma") else weight
        return name

    def _norm(self, src: str, dst: str, norm: Any, name: str) -> None:
        self.widths[dst] = self.widths[src]
        index = len(self.norms)
        self.norms.append(self._norm_weight(norm, name))
        self.ops.append(Op(OpCode.NORM, dst, src, index, _epsilon(norm)))

    def _add(self, src: str, name: str, projection: Any, norm: Any) -> None:
        """hidden += the projection of `src`, through a norm or times a multiplier where the model has one."""
        multiplier = float(getattr(self.text, "residual_multiplier", None) or 1.0)
        if norm is None and multiplier == 1.0:
            self._into(src, "hidden", name, projection, add=True)
            return
        self._into(src, "normed", name, projection)
        if norm is not None:
            self._norm("normed", "normed", norm, f"{name}_norm")
        self.ops.append(Op(OpCode.ADD, "hidden", "normed", value=multiplier))

    def _gate(self) -> None:
        name = getattr(self.text, "hidden_activation", None) or self.text.hidden_act
        if name not in _ACTIVATIONS:
            raise NotLoweredError(f"its activation is {name}")
        self.widths["gated"] = self.widths["gate_up"] // 2
        self.ops.append(Op(OpCode.GATE, "gated", "gate_up", int(_ACTIVATIONS[name])))


def _projections(module: Any, whole: str, *parts: str) -> Iterator[Any]:
    """The projection that computes all of `parts` at once, or each of them."""
    return iter([getattr(module, whole)] if hasattr(module, whole) else [getattr(module, part) for part in parts])


def _epsilon(norm: Any) -> float:
    if not type(norm).__name__.endswith("RMSNorm"):
        raise NotLoweredError(f"it has a {type(norm).__name__}")
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


def _layer_of(spec: LayerSpec) -> Layer:
    if spec.sinks is not None:
        raise NotLoweredError("its attention has sinks")
    return Layer(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        k_head_dim=spec.k_head_dim,
        v_head_dim=spec.v_head_dim,
        scale=spec.scale,
        window=spec.window,
        softcap=spec.softcap,
    )

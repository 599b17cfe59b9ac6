"""Mixture-of-experts layers whose rows do not depend on the batch.

An expert sees only the rows routed to it, often fewer than the row floor (`rows`), so each expert's rows are
padded. Registered in transformers' ExpertsInterface; layers that do not use that keep their own code.
"""

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from common.model.rows import Product, padded

_NAME = "baton"


def expert_layers(model: torch.nn.Module) -> list[Any]:
    """The layers of `model` that come through ExpertsInterface in the form that we compute."""
    return [layer for layer in model.modules() if getattr(layer, "has_gate", False) and not layer.has_post_expert_norm]


def expert_products(layer: Any) -> Iterator[tuple[int, torch.dtype, Product]]:
    """(input width, dtype, product) of one expert's two products, for measuring the row floor."""
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(layer, name)
        width = weight.shape[1 if layer.is_transposed else 2]
        yield width, weight.dtype, functools.partial(_product, layer, name, expert=0)


def pad_experts(model: Any, row_floor: int) -> None:
    """From now on every expert of `model` computes at least `row_floor` rows at a time."""
    layers = expert_layers(model)
    for layer in layers:
        layer.row_floor = row_floor
    if layers:
        model.set_experts_implementation(_NAME)


def _experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """hidden_states [rows, hidden], top_k_index and top_k_weights [rows, k] -> [rows, hidden].

    Experts add to a row in the order of their numbers, whatever else the batch holds.
    """
    out = torch.zeros_like(hidden_states)
    for expert in torch.unique(top_k_index).tolist():
        if expert >= self.num_experts:
            continue
        rows, choice = torch.where(top_k_index == expert)
        count = rows.shape[0]
        states = F.pad(hidden_states[rows], (0, 0, 0, padded(count, self.row_floor) - count))
        states = self._apply_gate(_product(self, "gate_up_proj", states, expert=expert))
        states = _product(self, "down_proj", states, expert=expert)[:count]
        out.index_add_(0, rows, (states * top_k_weights[rows, choice, None]).to(out.dtype))
    return out


def _product(layer: Any, name: str, states: torch.Tensor, *, expert: int) -> torch.Tensor:
    weight = getattr(layer, name)[expert]
    bias = getattr(layer, f"{name}_bias")[expert] if layer.has_bias else None
    return F.linear(states, weight.T if layer.is_transposed else weight, bias)


ALL_EXPERTS_FUNCTIONS.register(_NAME, _experts)

"""The weights of a transformers model that are quantised, as `quantization` says."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from common.model.kept_weights import load_quantised
from common.model.quantization import Quantization
from common.model.quantize import GROUP, Bits, GroupQuantised, dequantise, quantise

_MIN_OUTPUTS = 32


def quantised_weights(module: Any, folder: Path, quantization: Quantization) -> Iterator[tuple[str, GroupQuantised]]:
    """The linear layers of a transformers model that are quantised, by the name of their weight, one at a time.

    A head that is tied comes under the embedding's name. ConfigError for weights that cannot be (`quantise`).
    """
    if quantization == "none":
        return
    kept = load_quantised(folder) if quantization == "checkpoint" else {}
    layers = linear_weights(module)
    num_kept = sum(weight.numel() for name, weight in layers.items() if name in kept)
    mostly = 2 * num_kept > sum(weight.numel() for weight in layers.values())
    head = module.get_output_embeddings()
    for name, weight in layers.items():
        if name in kept:
            yield name, kept[name]
        elif quantization != "checkpoint" or mostly:
            is_head = head is not None and head.weight is weight
            bits: Bits = 4 if quantization == "int4" and not is_head else 8
            yield name, quantise(weight, bits)


def linear_weights(module: Any) -> dict[str, torch.Tensor]:
    """The weights [n, k] of all linear layers that can be quantised, by the first name that a parameter has."""
    first_names = {id(parameter): name for name, parameter in module.named_parameters()}
    return {
        first_names[id(layer.weight)]: layer.weight
        for layer in module.modules()
        if isinstance(layer, torch.nn.Linear) and layer.out_features >= _MIN_OUTPUTS and layer.in_features % GROUP == 0
    }


def round_weights(module: Any, folder: Path, quantization: Quantization) -> None:
    """Give the module the numbers that its quantised weights stand for, in the type that it has.

    The slow way to run quantised weights, and the reference for kernels that read them packed. What the folder keeps
    is in its fp32 weights already and stays mapped; the rest becomes memory of this process.
    """
    parameters = dict(module.named_parameters())
    kept = load_quantised(folder) if quantization == "checkpoint" else {}
    for name, weight in quantised_weights(module, folder, quantization):
        if name not in kept:
            parameters[name].data = dequantise(weight).to(parameters[name].dtype)

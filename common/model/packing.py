"""A lowered model's arrays in the kernels' layout, by name, as the packed file holds them.

A linear layer `x` becomes `x.data`, with `x.scales` and `x.minimums` where it is quantised and `x.bias` where it
has one; norms and frequencies keep their names.
"""

from collections.abc import Mapping

import msgspec

from common.model.program import Floats, PackedWeight
from common.model.recipe import Recipe
from common.native.abi import Array, WeightKind

_PARTS = ("data", "scales", "minimums", "bias")


class WeightShape(msgspec.Struct, frozen=True):
    kind: WeightKind
    n: int
    k: int


class Prepared(msgspec.Struct, frozen=True):
    """What a packed file says of itself: a recipe, or why there is none."""

    recipe: Recipe | None = None
    linears: dict[str, WeightShape] = {}
    refused: str = ""


def flatten(weights: Mapping[str, PackedWeight], arrays: Mapping[str, Floats]) -> dict[str, Array]:
    found: dict[str, Array] = dict(arrays)
    for name, weight in weights.items():
        parts = (weight.data, weight.scales, weight.minimums, weight.bias)
        found |= {f"{name}.{part}": array for part, array in zip(_PARTS, parts, strict=True) if array is not None}
    return found


def shapes(weights: Mapping[str, PackedWeight]) -> dict[str, WeightShape]:
    return {name: WeightShape(weight.kind, weight.n, weight.k) for name, weight in weights.items()}


def gather(prepared: Prepared, arrays: Mapping[str, Array]) -> dict[str, PackedWeight]:
    """The weights of a file, out of its arrays."""
    found = {}
    for name, shape in prepared.linears.items():
        rest = (arrays.get(f"{name}.{part}") for part in _PARTS[1:])
        found[name] = PackedWeight(shape.kind, shape.n, shape.k, arrays[f"{name}.data"], *rest)
    return found

"""How many rows a step must have so that each row's bits do not depend on the others.

A matrix product takes other kernels below some number of rows, with another order of summation; elementwise
kernels treat the last few elements of a tensor apart. Both end with enough padding rows: at least a floor that
is measured on the model's own layers, rounded up to a multiple.
"""

import functools
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from transformers.pytorch_utils import Conv1D

ROW_MULTIPLE = 4
"""Whole vectors for elementwise kernels (silu, sigmoid): 4 rows of any width that is a multiple of 8."""

_FLOORS = (4, 8, 12, 16, 24, 32, 64)
_REFERENCE_ROWS = 96
_SHIFT = 5  # rows are compared at another place in the batch too

Product = Callable[[torch.Tensor], torch.Tensor]


def padded(num_rows: int, floor: int) -> int:
    """Rows of a step that has `num_rows` real ones; `floor` 0 pads nothing."""
    if floor == 0 or num_rows == 0:
        return num_rows
    return max(floor, -(-num_rows // ROW_MULTIPLE) * ROW_MULTIPLE)


def row_floor(products: Iterable[tuple[int, torch.dtype, Product]]) -> int | None:
    """The smallest number of rows from which every one of `products` gives a row the same bits.

    Measured with random rows and the threads torch has now; None if there is no such number up to 64 (some
    BLAS with several threads).
    """
    generator = torch.Generator().manual_seed(0)
    floor = _FLOORS[0]
    for width, dtype, product in products:
        rows = torch.randn(_REFERENCE_ROWS, width, generator=generator, dtype=torch.float32).to(dtype)
        whole = product(rows)
        found = next((f for f in _FLOORS if f >= floor and _same_from(f, rows, whole, product)), None)
        if found is None:
            return None
        floor = found
    return floor


def _same_from(floor: int, rows: torch.Tensor, whole: torch.Tensor, product: Product) -> bool:
    counts = {floor, floor + ROW_MULTIPLE, 20, 28, 36, 44, 64}
    return all(
        torch.equal(product(rows[_SHIFT : _SHIFT + count].clone()), whole[_SHIFT : _SHIFT + count])
        for count in sorted(counts)
        if count >= floor
    )


def linear_products(model: torch.nn.Module) -> Iterator[tuple[int, torch.dtype, Product]]:
    """(input width, dtype, product) of one linear layer of each kind and shape."""
    seen = set()
    for module in model.modules():
        if type(module) is torch.nn.Linear or isinstance(module, Conv1D):
            key = (type(module), tuple(module.weight.shape), module.bias is None)
            if key not in seen:
                seen.add(key)
                width = module.weight.shape[0 if isinstance(module, Conv1D) else 1]
                yield width, module.weight.dtype, module


def widen_single_outputs(model: torch.nn.Module) -> None:
    """Compute layers of one output (gates of shared experts) with two: one alone is a matrix-vector product, whose
    order of summation differs from row to row."""
    for module in model.modules():
        if type(module) is torch.nn.Linear and module.out_features == 1:
            module.forward = functools.partial(_first_of_two, module)  # type: ignore[method-assign]


def _first_of_two(layer: torch.nn.Linear, rows: torch.Tensor) -> torch.Tensor:
    bias = None if layer.bias is None else layer.bias.expand(2)
    return F.linear(rows, layer.weight.expand(2, -1), bias)[..., :1]

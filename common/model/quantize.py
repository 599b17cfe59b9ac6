"""Weights in groups of 32 along a row: weight = scale * value + minimum, one float16 scale and minimum a group.

The product of a float16 and a value of 8 bits is exact in float32, so the sum is rounded once: a fused
multiply-add and two separate operations give the same bits.

8 bits are symmetric (values 1..255 stand for -127..127, minimum = -128 * scale), 4 bits are not: scale and
minimum are searched for the least squared error (after GGML's Q4_1, https://github.com/ggml-org/ggml, whose own
weights come back exactly).
"""

from dataclasses import dataclass
from typing import Literal

import torch

from common.errors import ConfigError

GROUP = 32
Bits = Literal[4, 8]

_SLICE_ELEMENTS = 1 << 18  # 1 MiB in fp32: a search's temporaries stay in the cache
_STEPS_INT4 = (15.0, 15.6, 14.7, 14.4, 14.0, 13.5)  # steps that the range of a group is first cut into


@dataclass(frozen=True, slots=True)
class GroupQuantised:
    """A matrix [n, k], k a multiple of 32. `bits` 4: every value is below 16."""

    values: torch.Tensor  # uint8 [n, k]
    scales: torch.Tensor  # float16 [n, k / 32]; may be negative (GGUF's Q4_0 has such)
    minimums: torch.Tensor  # float16 [n, k / 32]
    bits: Bits


def quantise(weight: torch.Tensor, bits: Bits) -> GroupQuantised:
    """The nearest `GroupQuantised` of `weight` [n, k] in fp32 or bf16. Needs a few MiB beside the result.

    ConfigError for rows that are no multiple of 32, for NaN and infinity, and where float16 cannot hold a scale.
    """
    if weight.ndim != 2 or weight.shape[1] % GROUP:
        raise ConfigError(
            f"quantization: a weight of shape {tuple(weight.shape)} has no rows of a multiple of {GROUP}; leave it out"
        )
    num_rows, num_columns = weight.shape
    values = torch.empty(num_rows, num_columns, dtype=torch.uint8)
    scales = torch.empty(num_rows, num_columns // GROUP, dtype=torch.float16)
    minimums = torch.empty_like(scales)
    slice_rows = max(1, _SLICE_ELEMENTS // max(1, num_columns))
    fit = _fit_int4 if bits == 4 else _fit_int8
    for start in range(0, num_rows, slice_rows):
        rows = slice(start, start + slice_rows)
        groups = weight[rows].float().view(-1, GROUP)
        if not groups.isfinite().all():
            raise ConfigError("quantization: the checkpoint's weights hold NaN or infinity; set quantization = none")
        found, scale, minimum = fit(groups)
        if not (scale.isfinite().all() and minimum.isfinite().all()):
            raise ConfigError(
                f"quantization: weights up to {groups.abs().max():g} are beyond float16 scales; set quantization = none"
            )
        values[rows] = found.to(torch.uint8).view(-1, num_columns)
        scales[rows] = scale.view(-1, num_columns // GROUP)
        minimums[rows] = minimum.view(-1, num_columns // GROUP)
    return GroupQuantised(values, scales, minimums, bits)


def dequantise(weight: GroupQuantised) -> torch.Tensor:
    """fp32 [n, k]."""
    num_rows, num_columns = weight.values.shape
    groups = weight.values.view(num_rows, -1, GROUP).float()
    groups *= weight.scales.float()[:, :, None]
    groups += weight.minimums.float()[:, :, None]
    return groups.view(num_rows, num_columns)


def fake_quantise_rows(activations: torch.Tensor) -> torch.Tensor:
    """`activations` [..., k], k a multiple of 32, as our kernels see them before a quantised layer (`gemm_q.h`): 8 bits
    a group, but 15 for those four neighbours that hold its largest. In their own type."""
    groups = activations.reshape(-1, 8, 4)
    largest = groups.abs().amax(2).sort(1, descending=True).values
    scale = torch.maximum(largest[:, 0] / 128, largest[:, 1])[:, None, None] / 127
    return ((groups / scale).nan_to_num_(0.0).round_() * scale).view(activations.shape)


_Fit = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Values as whole fp32 numbers [groups, 32]; scales and minimums in float16 [groups, 1]."""


def _fit_int8(groups: torch.Tensor) -> _Fit:
    largest = groups.abs().amax(1, keepdim=True)
    scale = (largest / 127).half()
    # Rounded to a coarse subnormal it may be far too small for the group's largest
    scale = (scale.view(torch.int16) + (scale.float() * 127.5 < largest).short()).view(torch.float16)
    values = (groups / scale.float()).nan_to_num_(0.0).round_().clamp_(-127, 127) + 128
    return values, scale, scale * -128


def _fit_int4(groups: torch.Tensor) -> _Fit:
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    best, least = _rounded(groups, (high - low) / 15, low)
    for steps in _STEPS_INT4:
        values = ((groups - low) * (steps / (high - low))).nan_to_num_(0.0).round_().clamp_(0, 15)
        candidate, error = _rounded(groups, *_least_squares(groups, values))
        is_better = error < least
        best = (
            torch.where(is_better, candidate[0], best[0]),
            torch.where(is_better, candidate[1], best[1]),
            torch.where(is_better, candidate[2], best[2]),
        )
        least = torch.where(is_better, error, least)
    return best


def _least_squares(groups: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale and minimum [groups, 1] that fit `values` best."""
    mean, mean_value = groups.mean(1, keepdim=True), values.mean(1, keepdim=True)
    offsets = values - mean_value
    spread = offsets.square().sum(1, keepdim=True)
    scale = ((groups - mean) * offsets).sum(1, keepdim=True) / spread
    scale = torch.where(spread > 0, scale, 0.0)
    return scale, mean - scale * mean_value


def _rounded(groups: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor) -> tuple[_Fit, torch.Tensor]:
    """The values nearest under these in float16, and the squared error [groups, 1]."""
    scale, minimum = scale.half(), minimum.half()
    values = ((groups - minimum.float()) / scale.float()).nan_to_num_(0.0).round_().clamp_(0, 15)
    error = (values * scale.float() + minimum.float() - groups).square_().sum(1, keepdim=True)
    return (values, scale, minimum), error

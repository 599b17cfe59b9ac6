"""`quantised.safetensors` of a converted folder: weights as the checkpoint stored them, beside their fp32 twins.

For each tensor NAME of model.safetensors that is kept: `NAME.values` (uint8 [n, k], or [n, k / 2] for 4 bits: value
2j in the low half of byte j, 2j + 1 in the high half, which halves the file), `NAME.scales` and `NAME.minimums`
(float16 [n, k / 32]). The metadata's `bits` is a JSON object of name to 4 or 8.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from common.errors import ConfigError
from common.model.quantize import Bits, GroupQuantised
from common.model.store import KEPT_WEIGHTS

_FORMAT = "baton group-32"


def save_quantised(folder: Path, weights: Mapping[str, GroupQuantised]) -> None:
    """Write the file. No weight, no file."""
    if not weights:
        return
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        values = weight.values if weight.bits == 8 else weight.values[:, ::2] | (weight.values[:, 1::2] << 4)
        tensors |= {f"{name}.values": values, f"{name}.scales": weight.scales, f"{name}.minimums": weight.minimums}
    bits = json.dumps({name: weight.bits for name, weight in weights.items()})
    save_file(tensors, folder / KEPT_WEIGHTS, metadata={"format": _FORMAT, "bits": bits})
    (folder / KEPT_WEIGHTS).chmod(0o644)  # safetensors keeps it to its owner


def load_quantised(folder: Path) -> Mapping[str, GroupQuantised]:
    """The kept weights by name, empty if there are none. The file is mapped; reading one weight unpacks it anew."""
    if not (folder / KEPT_WEIGHTS).is_file():
        return {}
    with safe_open(folder / KEPT_WEIGHTS, framework="pt") as file:
        metadata = file.metadata() or {}
    if metadata.get("format") != _FORMAT:
        raise ConfigError(
            f"model: {folder / KEPT_WEIGHTS} is of another format than {_FORMAT!r}; convert the model again"
        )
    return _KeptWeights(load_file(folder / KEPT_WEIGHTS), json.loads(metadata["bits"]))


class _KeptWeights(Mapping[str, GroupQuantised]):
    def __init__(self, tensors: Mapping[str, torch.Tensor], bits: Mapping[str, Bits]) -> None:
        self._tensors = tensors
        self._bits = bits

    def __getitem__(self, name: str) -> GroupQuantised:
        bits = self._bits[name]
        values, scales, minimums = (self._tensors[f"{name}.{part}"] for part in ("values", "scales", "minimums"))
        if bits == 4:
            values = torch.stack([values & 0x0F, values >> 4], dim=-1).flatten(1)
        return GroupQuantised(values, scales, minimums, bits)

    def __iter__(self) -> Iterator[str]:
        return iter(self._bits)

    def __len__(self) -> int:
        return len(self._bits)

"""Models as our kernels run them: prepared once into a packed file that every node of a host maps.

Preparing (`prepare`) loads the model through transformers, in a child process. From then on a node starts from the
file alone and imports neither transformers nor torch.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from common.config import ModelConfig
from common.model import fetch, packed_file
from common.model.packing import Prepared, gather
from common.model.program import Floats, PackedWeight, unavailable
from common.model.quantization import Quantization, quantised_digest, resolve_quantization
from common.model.recipe import LOWERED, Recipe
from common.model.store import Progress, cache_root, cached, model_digest, weight_files

_VERSION = 1  # raise it when what `prepare` writes changes: old files are then left alone


class UnpreparedError(Exception):
    """Why our kernels alone do not run this model; transformers may."""


@dataclass(frozen=True, slots=True)
class Opened:
    recipe: Recipe
    weights: dict[str, PackedWeight]
    arrays: dict[str, Floats]
    digest: str
    quantization: Quantization


def open_prepared(folder: Path, model: ModelConfig, *, progress: Progress) -> Opened:
    """The prepared model, made if it is not there yet (seconds to minutes). UnpreparedError for other models."""
    reason = _unsuitable(folder, model)
    if reason is not None:
        raise UnpreparedError(reason)
    quantization = resolve_quantization(model.quantization, folder)

    def build(scratch: Path, report: Progress) -> Path:
        target = scratch / "packed"
        wanted = (target, model.dtype, quantization)
        fetch.in_child("common.model.prepare", folder, *wanted, doing="preparing the model", report=report)
        return target

    target = prepared_path(folder, model)
    num_bytes = sum(path.stat().st_size for path in weight_files(folder))
    path = cached(target.parent, target.name, num_bytes, build, progress)
    digest = quantised_digest(model_digest(folder), quantization)
    opened = read_prepared(path, digest=digest, quantization=quantization)
    if model.max_model_len > opened.recipe.max_model_len:
        raise UnpreparedError(f"it is prepared for {opened.recipe.max_model_len} tokens, less than max_model_len")
    return opened


def prepared_path(folder: Path, model: ModelConfig) -> Path:
    """Where the packed file of `folder` is, or will be."""
    digest = quantised_digest(model_digest(folder), resolve_quantization(model.quantization, folder))
    return cache_root() / "prepared" / f"{folder.name[:48]}-{digest[:16]}-{model.dtype}-v{_VERSION}"


def read_prepared(path: Path, *, digest: str, quantization: Quantization) -> Opened:
    """What `prepare` wrote, mapped. UnpreparedError if that was a refusal."""
    prepared, arrays = packed_file.read(path, Prepared)
    if prepared.recipe is None:
        raise UnpreparedError(prepared.refused)
    floats = cast("dict[str, Floats]", arrays)
    return Opened(prepared.recipe, gather(prepared, arrays), floats, digest, quantization)


def _unsuitable(folder: Path, model: ModelConfig) -> str | None:
    """What rules it out at a look."""
    if model.device != "cpu":
        return f"the device is {model.device}"
    if model.attention not in ("auto", "native"):
        return f"attention = {model.attention} is not our kernels'"
    config = json.loads((folder / "config.json").read_bytes())
    if config.get("model_type") not in LOWERED:
        return f"the architecture is {config.get('model_type')}"
    if config.get("quantization_config"):
        return "its weights are in a form that transformers unpacks"
    return unavailable()

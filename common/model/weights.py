"""Weights onto a model: mapped from the checkpoint where they can be, so that nodes on one host share the pages.

Mapping needs a checkpoint in the type it is served in, with the model's own tensor names. Everything else
(another type, fused or renamed tensors, quantised weights) goes through transformers and is private memory.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from common.attention.hook import ATTENTION
from common.errors import ConfigError
from common.model.store import weight_files

Model = Any
"""A transformers causal language model; the library's own types say less than its documentation."""

_auto_model: Any = AutoModelForCausalLM
_logging: Any = transformers.logging


def load_config(folder: Path) -> Any:
    """The model's configuration. ConfigError if this transformers does not know the architecture."""
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        raise ConfigError(f"model: cannot read {folder / 'config.json'}: {error}") from error


def load_model(folder: Path, config: Any, dtype: torch.dtype) -> tuple[Model, bool]:
    """The model in evaluation mode on the CPU, and whether its weights are mapped from the checkpoint.

    ConfigError if transformers cannot build this architecture with our attention.
    """
    _logging.disable_progress_bar()
    tensors = _mapped_tensors(folder)
    try:
        model = _mapped_model(config, tensors, dtype)
        mapped = model is not None
        if model is None:
            tensors.clear()
            model, found = _auto_model.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation=ATTENTION,
                local_files_only=True,
                output_loading_info=True,
            )
            lacking = sorted([*found["missing_keys"], *(str(key) for key in found["mismatched_keys"])])
            if lacking:  # transformers would serve random numbers in their place
                raise ConfigError(f"model: the checkpoint has no fitting weights for {', '.join(lacking[:3])}")
    except KeyError as error:
        if error.args != (ATTENTION,):
            raise
        raise ConfigError(
            f"model: {config.model_type} cannot be served: it has attention classes of its own"
        ) from error
    except (ValueError, ImportError, OSError) as error:
        raise ConfigError(f"model: transformers cannot load {folder} ({config.model_type}): {error}") from error
    return model.eval().requires_grad_(False), mapped


def _mapped_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint as a view of its mapped file: nothing is read yet."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    elif (folder / "model.safetensors").is_file():
        names = ["model.safetensors"]
    else:
        names = [path.name for path in weight_files(folder)]
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        tensors |= load_file(folder / name)
    return tensors


def _mapped_model(config: Any, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Model | None:
    """A model whose parameters are the mapped tensors themselves, or None if they do not fit as they are."""
    if getattr(config, "quantization_config", None) is not None:
        return None
    # Only parameters stay empty: buffers (rotary frequencies, scales) are in no checkpoint and must be computed
    with init_empty_weights(include_buffers=False), no_init_weights():
        model = _auto_model.from_config(config, dtype=dtype, attn_implementation=ATTENTION)
    tied = model.all_tied_weights_keys
    for name, tensor in model.state_dict().items():
        found = tensors.get(name)
        if found is None and name in tied:
            continue
        if found is None or found.shape != tensor.shape or found.dtype != tensor.dtype or not found.is_contiguous():
            return None
        source = tensors.get(tied.get(name, name))
        if source is None or (source is not found and not torch.equal(found, source)):
            return None  # the checkpoint unties what the configuration ties; transformers knows what to do
    model.load_state_dict(
        {name: tensors[name] for name in model.state_dict() if name in tensors}, assign=True, strict=False
    )
    model.tie_weights()
    empty = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if empty:
        raise ConfigError(f"model: the checkpoint has no weights for {', '.join(empty[:3])}")
    return model

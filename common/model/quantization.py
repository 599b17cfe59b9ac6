"""Which weights of a model are quantised, and how: what `--quantization` means.

    none         none
    int8         every linear layer in 8 bits
    int4         every linear layer in 4 bits, the head in 8
    checkpoint   as a GGUF file stores them (`kept_weights`); linear layers that it stores otherwise in 8 bits, if
                 it stores most weights so. What "auto" comes to for such a folder, else "none"

Small layers stay as they are: the router of experts decides much and weighs little. So do stacked experts.
"""

import hashlib
from pathlib import Path
from typing import Literal

from common.model.store import KEPT_WEIGHTS

Quantization = Literal["none", "int8", "int4", "checkpoint"]


def resolve_quantization(setting: Literal["auto", "none", "int8", "int4"], folder: Path) -> Quantization:
    """What a setting comes to for a model's folder."""
    if setting != "auto":
        return setting
    return "checkpoint" if (folder / KEPT_WEIGHTS).is_file() else "none"


def weights_only(quantization: Quantization) -> str:
    """The name of one that leaves activations alone, as all but our kernels do: it computes other numbers."""
    return quantization if quantization == "none" else f"{quantization} (weights only)"


def quantised_digest(digest: str, quantization: str) -> str:
    """Of a model that computes other numbers than the one whose digest this is, unless nothing is quantised."""
    if quantization == "none":
        return digest
    return hashlib.sha256(f"{digest}\0{quantization}".encode()).hexdigest()[: len(digest)]

"""Model folder to packed file: `python -m common.model.prepare FOLDER TARGET DTYPE QUANTIZATION`, a process of its own.

Prints one line per step of progress (`convert.report`). The result is compared with the module of transformers that it
came from before it is written; where they differ, or the model is not one that we lower, the file says so instead.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.engine.request import Chunk, EngineRequest, StepPlan
from common.errors import ConfigError
from common.messages import BlockId, RequestId, Sampling
from common.model import loader, packed_file
from common.model.convert import report
from common.model.loader import LoadedModel
from common.model.lowering import Lowered, NotLoweredError, lower
from common.model.packing import Prepared, flatten, shapes
from common.model.program import Floats, PackedWeight, Program
from common.model.quantised_weights import quantised_weights
from common.model.quantization import Quantization
from common.model.quantize import GroupQuantised
from common.model.step import step_arrays
from common.model.transformers_runner import TransformersRunner, pick_backend
from common.model.weights import load_config
from common.native.linear import PackedLinear, pack_f32, pack_quantised

_BLOCK_SIZE = 16
_PROBE_TOKENS = 24  # of a prompt, and one decoded after it
_TOLERANCE = 1e-3
_TOLERANCE_QUANTISED = 0.3  # activations are rounded too; a layer gone wrong is off by more than everything
"""Largest difference between two logits, as a share of the largest logit."""


def main() -> int:
    folder, target, dtype = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    quantization: Any = sys.argv[4]
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        prepare(folder, target, dtype=dtype, quantization=quantization)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def prepare(folder: Path, target: Path, *, dtype: str, quantization: Quantization) -> None:
    """Write `target`. ConfigError if not even transformers can serve this model."""
    report("loading it")
    loaded = loader.load(folder, dtype=getattr(torch, dtype), block_size=_BLOCK_SIZE, quantization=quantization)
    try:
        lowered = lower(loaded, load_config(folder).get_text_config(decoder=True))
        weights = pack(loaded, lowered, dict(quantised_weights(loaded.module, folder, quantization)))
        arrays: dict[str, Floats] = {name: array.numpy() for name, array in lowered.arrays.items()}
        report("comparing it with transformers")
        _compare(loaded, lowered, weights, arrays)
    except NotLoweredError as error:
        packed_file.write(target, Prepared(refused=str(error)), {})
        return
    report("writing it")
    packed_file.write(target, Prepared(lowered.recipe, shapes(weights)), flatten(weights, arrays))


def pack(loaded: LoadedModel, lowered: Lowered, quantised: Mapping[str, GroupQuantised]) -> dict[str, PackedWeight]:
    """Every weight of the recipe: quantised where all of its parts are."""
    parameters = dict(loaded.module.named_parameters())
    packed = {}
    for done, (name, source) in enumerate(lowered.linears.items()):
        report("packing", done, len(lowered.linears))
        bias = _bias([parameters[part].shape[0] for part in source.weights], source.biases)
        if all(part in quantised for part in source.weights):
            parts = [quantised[part] for part in source.weights]
            whole = pack_quantised(
                torch.cat([part.values for part in parts]),
                torch.cat([part.scales for part in parts]),
                torch.cat([part.minimums for part in parts]),
                max(part.bits for part in parts),
                bias,
            )
        else:
            whole = pack_f32(torch.cat([parameters[part] for part in source.weights]), bias)
        packed[name] = as_weight(whole)
    return packed


def _bias(sizes: Sequence[int], biases: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    if not biases:
        return None
    parts = zip(sizes, biases, strict=True)
    return torch.cat([torch.zeros(size) if bias is None else bias.float() for size, bias in parts])


def as_weight(packed: PackedLinear) -> PackedWeight:
    """The same over numpy's arrays, which have no bf16: its bits instead."""
    data = packed.data.view(torch.int16) if packed.data.dtype is torch.bfloat16 else packed.data
    rest = (None if part is None else part.numpy() for part in (packed.scales, packed.minimums, packed.bias))
    return PackedWeight(packed.kind, packed.n, packed.k, data.numpy(), *rest)


def _compare(
    loaded: LoadedModel, lowered: Lowered, weights: dict[str, PackedWeight], arrays: dict[str, Floats]
) -> None:
    """NotLoweredError unless both give the same logits, up to rounding, after a prompt and after one more token.

    In fp32, as the kernels compute; a bf16 module would round after each of its operations.
    """
    elements = loaded.layout.block_elements
    blocks = [BlockId(3), BlockId(1)]
    loaded.module.float()
    backend = pick_backend("auto", loaded, num_threads=1)
    module = TransformersRunner(loaded, backend, torch.zeros(4, elements), row_floor=0)
    pool = np.zeros((4, 4 * elements), np.uint8)
    program = Program(lowered.recipe, weights, arrays, pool, block_size=_BLOCK_SIZE, dtype="float32")
    tokens = np.random.default_rng(0).integers(0, loaded.vocab_size, _PROBE_TOKENS + 1).tolist()
    request = EngineRequest(RequestId("0" * 32), tokens, len(tokens), Sampling(max_tokens=1, seed=0), blocks=blocks)
    tolerance = _TOLERANCE if loaded.quantization == "none" else _TOLERANCE_QUANTISED
    for chunk in (Chunk(request, 0, _PROBE_TOKENS, True), Chunk(request, _PROBE_TOKENS, 1, True)):
        expected = module.logits(StepPlan((chunk,)))
        difference = np.abs(program.run(step_arrays((chunk,), _BLOCK_SIZE)) - expected).max()
        if not difference <= tolerance * np.abs(expected).max():
            raise NotLoweredError(f"its logits differ from those of transformers by {difference:g}")


if __name__ == "__main__":
    sys.exit(main())

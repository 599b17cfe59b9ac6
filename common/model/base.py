"""What the engine needs of a model: run one step, hand back the drawn tokens."""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from common.engine.request import StepPlan
from common.messages import KVLayout


class Runner(Protocol):
    """Owns the weights and reads and writes the KV pool. Called from the engine thread only."""

    layout: KVLayout
    max_model_len: int
    vocab_size: int
    model_digest: str
    """Of the model as it computes: `quantization` enters it."""
    quantization: str

    def execute(self, plan: StepPlan) -> list[int]:
        """One forward pass; one token for each chunk that samples, in plan order.

        The KV of every chunk's tokens is in the pool when this returns.
        """
        ...


class ModelRunner(Runner, Protocol):
    """A runner of real weights, whose logits can be looked at."""

    def logits(self, plan: StepPlan) -> npt.NDArray[np.float32]:
        """The forward pass of `execute` alone: [chunks that sample, vocab], for the token after each."""
        ...

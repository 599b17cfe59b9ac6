"""What the engine needs of a model: run one step, hand back the drawn tokens."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from common.engine.request import StepPlan
from common.messages import BlockId, KVLayout, RequestId


class Runner(Protocol):
    """Owns the weights and reads and writes the KV pool. Called from the engine thread only."""

    layout: KVLayout
    max_model_len: int
    vocab_size: int
    model_digest: str
    """Of the model as it computes: `quantization` enters it."""
    quantization: str
    """How its weights are, and that activations are not where only weights are (`weights_only`)."""

    num_host_blocks: int
    """Places of the host tier (`kv_cache.host_tier`); 0 without one."""

    @property
    def logprobs(self) -> Mapping[RequestId, Sequence[float]]:
        """Of what `execute` drew last, by request, for those with `Sampling.scored`."""
        ...

    def rest(self) -> None:
        """The engine has nothing to run and is about to wait; until the next `execute` others may use its cores."""
        ...

    def execute(self, plan: StepPlan) -> list[int]:
        """One forward pass; `Chunk.samples` tokens for each chunk, in plan order: its request's, then those of `also`.

        The KV of every chunk's tokens is in the pool when this returns.
        """
        ...

    def copy_blocks(self, copies: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Copy whole blocks, from and to, in this order. Ids behind the pool's are places of the host tier."""
        ...


class ModelRunner(Runner, Protocol):
    """A runner of real weights, whose logits can be looked at."""

    def logits(self, plan: StepPlan) -> npt.NDArray[np.float32]:
        """The forward pass of `execute` alone: [chunks that sample, vocab], for the token after each."""
        ...

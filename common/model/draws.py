"""A step's logits to its tokens, and the part of a runner that is the same whoever computes the logits."""

from abc import ABC, abstractmethod
from itertools import islice

import numpy as np

from common.cores import HostCores
from common.engine.request import StepPlan
from common.messages import RequestId
from common.model.sampler import Logits, sample


def draw(logits: Logits, plan: StepPlan) -> list[int]:
    """As `Runner.execute` returns them. `logits` [chunks that sample, vocab]."""
    sampling = [chunk for chunk in plan.chunks if chunk.samples]
    rows = [(chunk.request.sampling, chunk.start + chunk.num_tokens) for chunk in sampling]
    if sum(chunk.samples for chunk in sampling) > len(sampling):
        logits = logits.repeat([chunk.samples for chunk in sampling], axis=0)
        rows = [
            (one, position)
            for chunk, (first, position) in zip(sampling, rows, strict=True)
            for one in (first, *chunk.request.also)
        ]
    return sample(logits, rows) if rows else []


def is_scored(plan: StepPlan) -> bool:
    return any(chunk.request.sampling.scored for chunk in plan.chunks)


def logprobs(logits: Logits, tokens: list[int], plan: StepPlan) -> dict[RequestId, list[float]]:
    """As `Runner.logprobs`; `tokens` are what `draw` made of the same."""
    row = -1

    def score(token: int) -> float:
        of_all = logits[row].astype(np.float64)
        top = of_all.max()
        return float(of_all[token] - top - np.log(np.exp(of_all - top).sum()))

    scores: dict[RequestId, list[float]] = {}
    drawn = iter(tokens)
    for chunk in plan.chunks:
        if chunk.samples:
            row += 1
            own = [*islice(drawn, chunk.samples)]
            if chunk.request.sampling.scored:
                scores[chunk.request.id] = [score(token) for token in own]
    return scores


class DrawingRunner(ABC):
    """What `model.base.Runner` asks beside the forward pass: cores at work and at rest, tokens, their scores."""

    def __init__(self, cores: HostCores | None) -> None:
        """`cores` is the node's place on this host."""
        self.logprobs: dict[RequestId, list[float]] = {}
        self._cores = cores

    def rest(self) -> None:
        """See `Runner.rest`."""
        if self._cores is not None:
            self._cores.rest()

    def execute(self, plan: StepPlan) -> list[int]:
        """See `Runner.execute`."""
        if self._cores is not None:
            self._cores.work()
        logits = self.logits(plan)
        tokens = draw(logits, plan)
        self.logprobs = logprobs(logits, tokens, plan) if is_scored(plan) else {}
        return tokens

    @abstractmethod
    def logits(self, plan: StepPlan) -> Logits:
        """The forward pass alone: [chunks that sample, vocab], for the token after each."""

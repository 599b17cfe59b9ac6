"""A step's logits to its tokens, for whoever has the logits."""

from itertools import islice

import numpy as np

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

"""A step's logits to its tokens, for whoever has the logits."""

from common.engine.request import StepPlan
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

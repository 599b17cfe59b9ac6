"""A step's logits to tokens and their log-probabilities."""

import numpy as np
import pytest

from common.engine.request import Chunk, EngineRequest, StepPlan, sampling_of
from common.messages import RequestId, Sampling
from common.model.draws import draw, is_scored, logprobs

LOGITS = np.random.default_rng(3).normal(0, 3, (2, 50)).astype(np.float32)
PLAIN = Sampling(max_tokens=9, seed=1)
SCORED = Sampling(max_tokens=9, seed=1, temperature=0.3, top_k=5, scored=True)


def chunk(id: str, sampling: Sampling, num_others: int = 0, *, samples: bool = True) -> Chunk:
    request = EngineRequest(RequestId(id), [1, 2, 3], 3, sampling)
    request.also = tuple(sampling_of(sampling, choice) for choice in range(1, num_others + 1))
    return Chunk(request, 0, 3, 1 + num_others if samples else 0)


def test_each_choice_is_drawn_from_the_same_row_as_it_would_be_alone() -> None:
    plan = StepPlan((chunk("a", PLAIN), chunk("part", PLAIN, samples=False), chunk("b", PLAIN, 3)))
    alone = [draw(LOGITS[1:], StepPlan((chunk("b", sampling_of(PLAIN, choice)),)))[0] for choice in range(4)]
    assert draw(LOGITS, plan) == [*draw(LOGITS[:1], StepPlan((chunk("a", PLAIN),))), *alone]
    assert not is_scored(plan)


def test_a_log_probability_is_the_models_own_whatever_the_temperature() -> None:
    plan = StepPlan((chunk("part", SCORED, samples=False), chunk("a", PLAIN), chunk("b", SCORED, 1)))
    tokens = draw(LOGITS, plan)
    scores = logprobs(LOGITS, tokens, plan)
    assert is_scored(plan)
    assert list(scores) == ["b"]
    row = LOGITS[1].astype(np.float64)
    expected = np.log(np.exp(row) / np.exp(row).sum())
    assert scores[RequestId("b")] == pytest.approx([expected[token] for token in tokens[1:]])

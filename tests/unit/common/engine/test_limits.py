from collections.abc import Iterator
from math import nan

import pytest

from common.engine.limits import Limits, QueueBounds
from common.errors import ContextLengthError, OverloadedError, RequestError
from common.messages import Priority, Sampling

LIMITS = Limits(model_digest="m", max_model_len=64, vocab_size=10, num_blocks=4, block_size=16)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=0, seed=1),
        Sampling(max_tokens=1, seed=1, temperature=-1.0),
        Sampling(max_tokens=1, seed=1, temperature=nan),
        Sampling(max_tokens=1, seed=1, top_p=0.0),
        Sampling(max_tokens=1, seed=1, top_p=nan),
        Sampling(max_tokens=1, seed=1, top_k=-1),
    ],
)
def test_sampling_that_cannot_draw_is_refused(sampling: Sampling) -> None:
    with pytest.raises(RequestError, match="sampling needs"):
        LIMITS.check(model_digest="m", tokens=[1], num_prompt_tokens=1, sampling=sampling)


class Unread(list[int]):
    """Tokens that must not be looked at one by one."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("looked at")


def test_a_prompt_that_is_too_long_is_refused_before_its_tokens_are_looked_at() -> None:
    """There may be millions of them, and the loop has others to serve."""
    tokens = Unread([99] * LIMITS.max_model_len)
    with pytest.raises(ContextLengthError):
        LIMITS.check(model_digest="m", tokens=tokens, num_prompt_tokens=1, sampling=Sampling(max_tokens=99, seed=1))


BOUNDS = QueueBounds(max_waiting=10, max_waiting_tokens=1000)


@pytest.mark.parametrize(("priority", "most"), [(Priority.HIGH, 10), (Priority.NORMAL, 9), (Priority.LOW, 5)])
def test_a_class_may_fill_its_part_of_the_queue_in_requests_and_in_tokens(priority: Priority, most: int) -> None:
    BOUNDS.check(priority, num_waiting=most - 1, num_waiting_tokens=most * 100 - 1, tokens_per_s=50.0)
    with pytest.raises(OverloadedError, match=f"{most} requests are waiting.*{priority}"):
        BOUNDS.check(priority, num_waiting=most, num_waiting_tokens=0, tokens_per_s=50.0)
    with pytest.raises(OverloadedError, match=f"{most * 100} tokens are waiting"):
        BOUNDS.check(priority, num_waiting=0, num_waiting_tokens=most * 100, tokens_per_s=50.0)


@pytest.mark.parametrize(("tokens", "speed", "retry_s"), [(1000, 50.0, 20.0), (1000, 0.0, 1.0), (9, 50.0, 1.0)])
def test_a_refusal_says_when_what_waits_will_be_done(tokens: int, speed: float, retry_s: float) -> None:
    with pytest.raises(OverloadedError) as refused:
        BOUNDS.check(Priority.HIGH, num_waiting=10, num_waiting_tokens=tokens, tokens_per_s=speed)
    assert refused.value.retry_after_s == retry_s


def test_the_smallest_queue_takes_one_of_every_class() -> None:
    for priority in Priority:
        QueueBounds(1, 1).check(priority, num_waiting=0, num_waiting_tokens=0, tokens_per_s=0.0)

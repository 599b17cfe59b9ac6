"""When a request counts as good, and when it is clear that it will not."""

from itertools import accumulate

import pytest

from tests.benchmarks.client import Stream
from tests.benchmarks.peers.objective import Objective

_OBJECTIVE = Objective()


def stream(first_s: float, *gaps_s: float) -> Stream:
    return Stream(10.0, arrivals_s=list(accumulate([10.0 + first_s, *gaps_s])))


def test_a_request_is_good_whose_first_token_and_gaps_are_in_time() -> None:
    assert _OBJECTIVE.is_good(stream(1.4, *[0.05] * 63))


def test_a_late_first_token_or_slow_gaps_are_not_good() -> None:
    assert not _OBJECTIVE.is_good(stream(1.6, *[0.05] * 63))
    assert not _OBJECTIVE.is_good(stream(1.4, *[0.05] * 53, *[0.2] * 10))


def test_a_few_slow_gaps_are_forgiven() -> None:
    assert _OBJECTIVE.is_good(stream(1.4, *[0.05] * 60, *[0.2] * 3))


def test_no_token_is_not_good() -> None:
    assert not _OBJECTIVE.is_good(Stream(10.0, ended_s=11.0))


def test_a_stream_without_a_token_is_lost_when_its_time_is_over() -> None:
    assert not _OBJECTIVE.is_lost(Stream(10.0), 11.4, 64)
    assert _OBJECTIVE.is_lost(Stream(10.0), 11.6, 64)


@pytest.mark.parametrize("slow", range(12))
def test_a_running_stream_is_lost_only_if_it_would_not_be_good_with_fast_gaps_from_now_on(slow: int) -> None:
    running = stream(1.0, *[0.2] * slow)
    ended = stream(1.0, *[0.2] * slow, *[0.01] * (63 - slow))
    assert _OBJECTIVE.is_lost(running, 100.0, 64) == (slow >= 5)
    assert not (_OBJECTIVE.is_lost(running, 100.0, 64) and _OBJECTIVE.is_good(ended))


@pytest.mark.parametrize(("requests", "misses"), [(1, 0), (9, 0), (10, 1), (19, 1), (20, 2), (60, 6)])
def test_one_in_ten_may_miss(requests: int, misses: int) -> None:
    assert _OBJECTIVE.may_miss(requests) == misses

"""The search for the highest rate that holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.benchmarks.peers.rate_search import RateSearch


def search(limit: float, *, first: float = 0.5) -> tuple[RateSearch, list[float]]:
    """Of a server that holds up to `limit`; with the rates tried."""
    searching, tried = RateSearch(first=first, least=0.1, most=16.0, narrow=1.12), []
    while (rate := searching.next_rate()) is not None:
        tried.append(rate)
        assert len(tried) < 30
        searching.record(rate, held=rate <= limit)
    return searching, tried


def test_a_rate_that_holds_is_doubled_until_one_fails_and_the_gap_is_then_halved() -> None:
    found, tried = search(1.5)
    assert tried[:3] == [0.5, 1.0, 2.0]
    assert tried[3] == pytest.approx(2**0.5)
    assert found.holds <= 1.5 < found.fails <= 1.12 * found.holds


def test_a_rate_that_fails_is_halved_until_one_holds() -> None:
    found, tried = search(0.2)
    assert tried[:3] == [0.5, 0.25, 0.125]
    assert found.holds <= 0.2 < found.fails <= 1.12 * found.holds


def test_nothing_below_the_least_rate_is_tried() -> None:
    found, tried = search(0.0)
    assert found.holds == 0.0
    assert min(tried) >= 0.1


def test_nothing_above_the_highest_rate_is_tried() -> None:
    found, tried = search(1e9)
    assert found.holds == max(tried) == 16.0


@given(st.floats(0.13, 15.9), st.floats(0.1, 16.0))
def test_the_limit_is_enclosed_wherever_it_lies(limit: float, first: float) -> None:
    found, tried = search(limit, first=first)
    assert len(set(tried)) == len(tried)
    assert found.holds <= limit < found.fails
    if found.holds and found.fails != float("inf"):
        assert found.fails / found.holds <= 1.12

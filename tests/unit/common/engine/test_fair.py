"""Whose turn it is: by arrival for one tenant, by what each had for several; nobody waits for ever."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.fair import HEAD_START_TOKENS, FairQueue
from common.messages import Origin, Priority, RequestId

A, B, C = Origin(b"a"), Origin(b"b"), Origin(b"c")
HIGH, NORMAL, LOW = (Origin(b"a", priority) for priority in Priority)
ORIGINS = st.builds(Origin, st.sampled_from([b"a", b"b", b"c"]), st.sampled_from(Priority))


def queue_of(*origins: Origin) -> FairQueue:
    queue = FairQueue()
    for index, origin in enumerate(origins):
        queue.add(RequestId(str(index)), origin)
    return queue


def serve(queue: FairQueue, num_tokens: int) -> tuple[RequestId, Origin]:
    """The first one gets so much and leaves."""
    id = queue.first
    assert id is not None
    origin = queue.origin(id)
    queue.charge(origin, num_tokens)
    queue.remove(id)
    queue.check_invariants()
    return id, origin


def order(queue: FairQueue, num_tokens: int = 100) -> list[str]:
    return [str(serve(queue, num_tokens)[0]) for _ in range(len(queue))]


def always(queue: FairQueue, origins: list[Origin], sizes: list[int]) -> list[tuple[Origin, int]]:
    """Who is served when all of `origins` always have something waiting."""
    served = []
    for origin in origins:
        queue.add(RequestId(f"more of {origin}"), origin)
    for number, size in enumerate(sizes):
        _, origin = serve(queue, size)
        served.append((origin, size))
        queue.add(RequestId(f"again {number}"), origin)
    return served


@given(st.lists(st.integers(1, 5000), max_size=20))
def test_one_tenant_of_one_class_is_served_in_order_of_arrival(sizes: list[int]) -> None:
    queue = queue_of(*[A] * len(sizes))
    assert [serve(queue, size)[0] for size in sizes] == [str(index) for index in range(len(sizes))]


def test_tenants_take_turns_however_many_one_of_them_sent_first() -> None:
    assert order(queue_of(A, A, A, A, B, B)) == ["0", "4", "1", "5", "2", "3"]


def test_a_newcomer_is_next_and_what_it_did_not_use_before_is_not_made_up_for() -> None:
    queue = queue_of(A, A, A, A, A)
    serve(queue, 1000)
    serve(queue, 1000)
    for id in ("b0", "b1", "b2"):
        queue.add(RequestId(id), B)
    assert order(queue, 1000) == ["b0", "2", "b1", "3", "b2", "4"]


def test_one_that_leaves_the_queue_is_charged_nothing() -> None:
    queue = queue_of(A, A, A, B)
    queue.remove(RequestId("0"))
    queue.remove(RequestId("1"))
    queue.remove(RequestId("1"))
    assert order(queue) == ["2", "3"]
    queue.check_invariants()
    assert queue.first is None


def test_what_had_its_turn_comes_back_before_all_others_by_turn() -> None:
    queue = queue_of(A, HIGH, B)
    queue.put_back(RequestId("y"), LOW, turn=7)
    queue.put_back(RequestId("x"), B, turn=5)
    assert order(queue)[:2] == ["x", "y"]
    queue.put_back(RequestId("x"), B, turn=5)
    queue.remove(RequestId("x"))
    queue.check_invariants()
    assert len(queue) == 0


def test_a_higher_class_passes_a_lower_one() -> None:
    assert order(queue_of(LOW, NORMAL, HIGH, LOW, NORMAL, HIGH)) == ["2", "5", "1", "4", "0", "3"]


@given(
    st.sampled_from([[A, B], [A, B, C], [Origin(b"a", Priority.LOW), Origin(b"b", Priority.LOW)]]),
    st.lists(st.integers(1, 3000), min_size=5, max_size=80),
)
def test_no_tenant_that_always_waits_gets_further_ahead_than_one_prompt(
    origins: list[Origin], sizes: list[int]
) -> None:
    queue, had = queue_of(*origins), Counter[Origin]()
    for origin, size in always(queue, origins, sizes):
        had[origin] += size
        assert max(had[origin] for origin in origins) - min(had[origin] for origin in origins) <= max(sizes)


@settings(deadline=None)
@given(st.lists(st.integers(16, 512), min_size=1, max_size=40), st.lists(st.sampled_from([A, B, HIGH]), max_size=30))
def test_whatever_was_served_before_a_low_one_waits_no_longer_than_promised(
    sizes: list[int], history: list[Origin]
) -> None:
    queue = FairQueue()
    for number, origin in enumerate(history):
        queue.add(RequestId(f"before {number}"), origin)
        serve(queue, sizes[number % len(sizes)])
    others = [HIGH, Origin(b"b", Priority.HIGH), NORMAL, B]
    for number, origin in enumerate(others):
        queue.add(RequestId(f"other {number}"), origin)
    queue.add(RequestId("low"), LOW)
    waited = Counter[Priority]()
    for step in range(100_000):
        if queue.first == "low":
            break
        size = sizes[step % len(sizes)]
        _, origin = serve(queue, size)
        waited[origin.priority] += size
        queue.add(RequestId(f"again {step}"), origin)
    assert queue.first == "low"
    assert waited[Priority.HIGH] <= 15 * HEAD_START_TOKENS + 512
    assert waited[Priority.NORMAL] <= 15 * HEAD_START_TOKENS // 4 + 512


@pytest.mark.parametrize(("higher", "lower"), [(HIGH, NORMAL), (NORMAL, LOW)])
def test_of_two_classes_that_always_wait_the_higher_has_four_times_as_much(higher: Origin, lower: Origin) -> None:
    had = Counter[Origin]()
    for origin, size in always(queue_of(higher, lower), [higher, lower], [100] * 2000):
        had[origin] += size
    assert 3.5 <= had[higher] / had[lower] <= 4.5


@given(st.lists(st.tuples(ORIGINS, st.integers(0, 3), st.integers(1, 1000)), max_size=60))
def test_as_long_as_anybody_waits_somebody_is_first_and_all_are_served_once(
    arrivals: list[tuple[Origin, int, int]],
) -> None:
    queue, served = FairQueue(), list[RequestId]()
    for number, (origin, turns, size) in enumerate(arrivals):
        queue.add(RequestId(str(number)), origin)
        for _ in range(min(turns, len(queue))):
            served.append(serve(queue, size)[0])
    while len(queue):
        served.append(serve(queue, 10)[0])
    assert queue.first is None
    assert sorted(served) == sorted(str(number) for number in range(len(arrivals)))
    by_flow: dict[Origin, list[int]] = {}
    for id in served:
        by_flow.setdefault(arrivals[int(id)][0], []).append(int(id))
    assert all(ids == sorted(ids) for ids in by_flow.values()), "each tenant's class in order of arrival"

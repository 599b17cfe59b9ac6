"""Who goes first of one tenant's requests, and that nobody waits for ever."""

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.fair import FairQueue
from common.engine.policy import LEAST_PATIENCE_TOKENS, Line, Policy, patience, ticket
from common.engine.request import StepPlan
from common.messages import Origin, Priority, RequestId
from tests.unit.common.engine.rig import Rig

A, B = Origin(b"a"), Origin(b"b")
HIGH, NORMAL, LOW = (Origin(b"a", priority) for priority in Priority)
POLICIES: list[Policy] = ["fcfs", "shortest", "priority", "deadline"]


def prompt(num_tokens: int, salt: int = 0) -> list[int]:
    return [salt * 1000 + position for position in range(num_tokens)]


def shares(plan: StepPlan) -> list[tuple[str, int]]:
    return [(chunk.request.id, chunk.num_tokens) for chunk in plan.chunks]


def in_order(line: Line) -> list[str]:
    served = []
    while line:
        served.append(line.first)
        line.serve(line.first)
        line.check_invariants()
    return served


# --- one line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "order"),
    [("fcfs", "abcd"), ("priority", "abcd"), ("shortest", "bdac"), ("deadline", "cbad")],
)
def test_a_policy_orders_a_line_and_equals_go_by_arrival(policy: Policy, order: str) -> None:
    line = Line()
    for id, num_tokens, deadline_s in (("a", 500, inf), ("b", 20, 9.0), ("c", 500, 3.0), ("d", 40, inf)):
        line.add(RequestId(id), ticket(policy, num_tokens=num_tokens, deadline_s=deadline_s))
    assert in_order(line) == list(order)


def test_one_that_hangs_up_passes_nobody() -> None:
    line, first = Line(), ticket("shortest", num_tokens=500, deadline_s=inf)
    line.add(RequestId("long"), first)
    line.add(RequestId("short"), ticket("shortest", num_tokens=100, deadline_s=inf))
    line.remove(RequestId("short"))
    assert first.passed == 0
    line.add(RequestId("short"), ticket("shortest", num_tokens=100, deadline_s=inf))
    line.serve(RequestId("short"))
    assert first.passed == 100


@settings(deadline=None, max_examples=50)
@given(
    st.sampled_from(["shortest", "deadline"]),
    st.integers(100, 4000),
    st.lists(st.integers(1, 4000), max_size=8),
    st.lists(st.tuples(st.integers(90, 2000), st.integers(0, 2)), min_size=1, max_size=20),
)
def test_an_endless_stream_of_preferred_ones_passes_a_request_by_its_patience_and_one_prompt(
    policy: Policy, num_tokens: int, before: list[int], stream: list[tuple[int, int]]
) -> None:
    line = Line()
    for number, size in enumerate(before):
        line.add(RequestId(f"before {number}"), ticket(policy, num_tokens=size, deadline_s=0.0))
    line.add(RequestId("it"), ticket(policy, num_tokens=num_tokens, deadline_s=inf))
    sizes: dict[str, int] = {}
    passed = 0
    for turn in range(1000):
        for copy in range(1 + stream[turn % len(stream)][1]):
            id = f"later {turn}.{copy}"
            sizes[id] = max(1, min(stream[turn % len(stream)][0], num_tokens - 1))
            line.add(RequestId(id), ticket(policy, num_tokens=sizes[id], deadline_s=-1.0))
        first = line.first
        if first == "it":
            break
        passed += sizes.get(first, 0)
        line.serve(first)
    assert first == "it"
    line.check_invariants()
    assert passed < patience(num_tokens) + max(sizes.values())


# --- classes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "share"), [("fcfs", 4), ("priority", 16)])
@pytest.mark.parametrize(("higher", "lower"), [(HIGH, NORMAL), (NORMAL, LOW)])
def test_a_class_that_always_waits_keeps_a_share_however_strict_the_policy(
    policy: Policy, share: int, higher: Origin, lower: Origin
) -> None:
    queue, had = FairQueue(policy), {higher: 0, lower: 0}
    for number, origin in enumerate((higher, lower)):
        queue.add(RequestId(f"first {number}"), origin)
    for turn in range(4000):
        id = queue.first
        assert id is not None
        origin = queue.origin(id)
        queue.add(RequestId(str(turn)), origin)
        queue.charge(origin, 100)
        queue.serve(id)
        had[origin] += 100
    assert 0.8 * share <= had[higher] / had[lower] <= 1.2 * share


# --- seen from the plans -------------------------------------------------------------------------------------


def test_a_short_prompt_is_computed_before_the_rest_of_a_long_one_that_runs() -> None:
    rig = Rig(200, max_step_tokens=64, max_model_len=2048, policy="shortest")
    rig.admit("long", prompt(1000, 1), 1)
    rig.step()
    rig.admit("short", prompt(48, 2), 1)
    rig.step()
    assert shares(rig.plans[-1]) == [("short", 48), ("long", 16)], "the rest of the step is the long one's"
    rig.run()
    assert list(rig.finished) == ["short", "long"]
    rig.assert_right("long", "short")
    rig.assert_empty()


def test_what_is_cached_counts_for_nothing_in_a_prompts_length() -> None:
    rig = Rig(200, max_step_tokens=64, max_model_len=2048, policy="shortest", max_running=1)
    rig.admit("first", prompt(640, 1), 1)
    rig.run()
    rig.admit("new", prompt(60, 2), 1)
    rig.admit("known", prompt(641, 1), 1)
    rig.run()
    assert list(rig.finished) == ["first", "known", "new"]


def test_the_earliest_deadline_goes_first_and_no_deadline_goes_last() -> None:
    rig = Rig(200, max_step_tokens=64, max_model_len=2048, policy="deadline", admit_whole=True)
    rig.admit("runs", prompt(300, 1), prefill=True)
    rig.step()
    rig.admit("none", prompt(30, 2), prefill=True)
    rig.admit("late", prompt(30, 3), prefill=True, deadline_s=50.0)
    rig.admit("early", prompt(30, 4), prefill=True, deadline_s=5.0)
    rig.run()
    assert list(rig.finished) == ["early", "late", "runs", "none"]
    for id in list(rig.requests):
        rig.release(id)
    rig.assert_empty()


def test_reservations_are_granted_by_deadline_too() -> None:
    rig = Rig(4, policy="deadline")
    rig.reserve("holds", prompt(64))
    rig.run()
    rig.reserve("late", prompt(60, 1), deadline_s=50.0)
    rig.reserve("early", prompt(60, 2), deadline_s=5.0)
    rig.release("holds")
    rig.run()
    assert list(rig.reserved) == ["holds", "early"]
    for id in ("early", "late"):
        rig.release(id)
    rig.assert_empty()


def test_a_policy_changes_nothing_between_tenants() -> None:
    rig = Rig(200, max_step_tokens=64, max_model_len=2048, policy="shortest")
    rig.admit("b", prompt(1000, 2), 1, origin=B)
    for index in range(30):
        rig.admit(f"a{index}", prompt(32, 10 + index), 1, origin=A)
    computed = {A: 0, B: 0}
    for _ in range(20):
        rig.step()
        for chunk in rig.plans[-1].chunks:
            computed[chunk.request.origin] += chunk.num_tokens
    assert abs(computed[A] - computed[B]) <= 64
    rig.run()
    rig.assert_empty()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("max_running", [1, 8])
def test_under_an_endless_stream_of_preferred_prompts_a_long_one_is_answered_within_its_patience(
    policy: Policy, max_running: int
) -> None:
    rig = Rig(400, max_step_tokens=256, max_model_len=2048, policy=policy, max_running=max_running)
    slighted, preferred = (LOW, NORMAL) if policy == "priority" else (NORMAL, NORMAL)
    for turn in range(160):
        for copy in range(3):
            tokens = prompt(150 + copy, 3 * turn + copy)
            rig.admit(f"{turn}.{copy}", tokens, 1, origin=preferred, deadline_s=1.0)
        if turn == 3:
            rig.admit("long", prompt(1500, 9999), 1, origin=slighted)
        rig.step()
        if RequestId("long") in rig.finished:
            break
    # What came before it, what may pass it, its own steps, and one prompt.
    tokens_a_step = 150 if max_running == 1 else 256 - 16
    bound = (12 * 152 + patience(1500) + 1500 + 152) / tokens_a_step + 2
    if policy == "priority":  # from class to class: the head start and then a sixteenth
        bound = (15 * 512 + 16 * 1500) / 256 + 10
    assert turn - 3 <= bound
    assert patience(1500) == LEAST_PATIENCE_TOKENS
    rig.assert_right("long")


def test_a_long_prompt_that_runs_already_is_passed_by_its_patience_too() -> None:
    rig = Rig(400, max_step_tokens=256, max_model_len=2048, policy="shortest")
    rig.admit("long", prompt(1500, 9999), 1)
    rig.step()
    for turn in range(120):
        for copy in range(2):
            rig.admit(f"{turn}.{copy}", prompt(128, 2 * turn + copy), 1)
        rig.step()
        if RequestId("long") in rig.finished:
            break
    assert turn <= (patience(1500) + 1500) / 256 + 2
    rig.run()
    rig.assert_empty()


@pytest.mark.parametrize("deadline_s", [7.5, inf])
def test_a_request_without_a_deadline_comes_by_arrival_behind_those_with_one(deadline_s: float) -> None:
    line = Line()
    line.add(RequestId("a"), ticket("deadline", num_tokens=10, deadline_s=deadline_s))
    line.add(RequestId("b"), ticket("deadline", num_tokens=10, deadline_s=inf))
    line.add(RequestId("c"), ticket("deadline", num_tokens=10, deadline_s=8.0))
    assert in_order(line) == (["a", "c", "b"] if deadline_s < inf else ["c", "a", "b"])

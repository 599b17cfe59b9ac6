"""Salted prefixes, and shares of the step between tenants and classes, seen from the plans."""

import pytest

from common.engine.request import StepPlan
from common.messages import Origin, Priority, RequestId
from tests.unit.common.engine.rig import Rig

A, B = Origin(b"a"), Origin(b"b")


def prompt(num_tokens: int, salt: int = 0) -> list[int]:
    return [salt * 1000 + position for position in range(num_tokens)]


def shares(plan: StepPlan) -> list[tuple[str, int]]:
    return [(chunk.request.id, chunk.num_tokens) for chunk in plan.chunks]


def step_of_first_token(rig: Rig, id: str, most_steps: int = 200) -> int:
    for step in range(1, most_steps):
        rig.step()
        if RequestId(id) in rig.tokens:
            return step
    raise AssertionError(f"{id} has no token after {most_steps} steps")


# --- salt ----------------------------------------------------------------------------------------------------


def test_an_equal_prompt_is_found_by_its_own_tenant_and_by_no_other() -> None:
    rig = Rig()
    for id, origin in (("first", A), ("again", A), ("stranger", B), ("nobody", Origin()), ("nobody again", Origin())):
        rig.admit(id, prompt(40), 2, origin=origin)
        rig.run()
    cached = {id: progress[0].num_cached for id, progress in rig.progress.items()}
    assert cached == {"first": 0, "again": 32, "stranger": 0, "nobody": 0, "nobody again": 32}
    rig.assert_right(*cached)
    rig.assert_empty()


def test_the_class_of_a_request_does_not_change_what_it_finds() -> None:
    rig = Rig()
    rig.admit("high", prompt(40), 2, origin=Origin(b"a", Priority.HIGH))
    rig.run()
    rig.admit("low", prompt(40), 2, origin=Origin(b"a", Priority.LOW))
    rig.run()
    assert rig.progress[RequestId("low")][0].num_cached == 32


@pytest.mark.parametrize(("origin", "cached"), [(A, 32), (B, 0)])
def test_a_reservation_finds_what_its_tenant_has_and_offers_its_blocks_to_it(origin: Origin, cached: int) -> None:
    rig = Rig()
    rig.reserve("pulled", prompt(40), A)
    rig.run()
    rig.pull("pulled", prompt(40))
    rig.admit("pulled", [*prompt(40), 7], 3, num_prompt_tokens=40, num_computed=40, origin=A)
    rig.run()
    rig.reserve("next", prompt(40), origin)
    rig.run()
    assert rig.reserved[RequestId("next")].num_cached == cached
    rig.release("next")
    rig.assert_empty()


def test_blocks_that_an_answer_filled_are_its_tenants_too() -> None:
    """Also those of a prompt that had no full block when it came."""
    rig = Rig()
    rig.admit("short", prompt(3), 40, origin=A)
    rig.run()
    conversation = [*prompt(3), *rig.tokens[RequestId("short")], 9]
    for id, origin in (("stranger", B), ("next turn", A)):
        rig.admit(id, conversation, 1, origin=origin)
        rig.run()
    assert rig.progress[RequestId("stranger")][0].num_cached == 0
    assert rig.progress[RequestId("next turn")][0].num_cached == 32


# --- shares --------------------------------------------------------------------------------------------------


def test_a_short_prompt_is_not_behind_another_tenants_long_ones() -> None:
    """Case 61: 20 prompts of 1,000 tokens, then one short chat."""
    rig = Rig(2000, admit_whole=True, max_model_len=2048)
    rig.admit("idle", prompt(30, 99), prefill=True, origin=B)
    assert step_of_first_token(rig, "idle") == 1
    for index in range(20):
        rig.admit(f"long {index}", prompt(1000, index), prefill=True, origin=A)
    rig.step()
    rig.admit("short", prompt(30, 98), prefill=True, origin=B)
    assert step_of_first_token(rig, "short") == 1
    assert shares(rig.plans[-1])[0] == ("short", 30), "and the rest of the step is the other's"
    assert rig.plans[-1].num_tokens >= 512 - 16
    rig.run()
    assert len(rig.finished) == 22
    for id in list(rig.requests):
        rig.release(id)
    rig.assert_empty()


def test_without_other_tenants_the_same_prompts_go_in_order_of_arrival() -> None:
    rig = Rig(2000, admit_whole=True, max_model_len=2048)
    for index in range(20):
        rig.admit(f"long {index}", prompt(1000, index), prefill=True, origin=A)
    rig.step()
    rig.admit("short", prompt(30, 98), prefill=True, origin=A)
    rig.run()
    assert list(rig.finished) == [*(f"long {index}" for index in range(20)), "short"]


def test_a_running_prompt_lets_another_tenants_prompt_pass_and_both_get_half_from_then_on() -> None:
    rig = Rig(200, max_step_tokens=64, max_model_len=2048)
    rig.admit("a", prompt(1000, 1), 1, origin=A)
    for _ in range(5):
        rig.step()
    rig.admit("b", prompt(1000, 2), 1, origin=B)
    computed = {"a": 0, "b": 0}
    for _ in range(10):
        rig.step()
        for id, num_tokens in shares(rig.plans[-1]):
            computed[id] += num_tokens
        assert abs(computed["a"] - computed["b"]) <= 64
    assert sum(computed.values()) == 640, "no step has room left"
    rig.run()
    rig.assert_right("a", "b")
    rig.assert_empty()


def test_a_higher_class_goes_first_and_a_lower_one_is_not_starved() -> None:
    rig = Rig(3000, admit_whole=True, max_step_tokens=64, max_model_len=2048)
    rig.admit("low", prompt(64, 90), prefill=True, origin=Origin(b"a", Priority.LOW))
    rig.admit("normal", prompt(64, 91), prefill=True, origin=A)
    for index in range(40):
        rig.admit(f"high {index}", prompt(1000, index), prefill=True, origin=Origin(b"a", Priority.HIGH))
    rig.step()
    assert shares(rig.plans[-1]) == [("high 0", 64)]
    assert step_of_first_token(rig, "normal") <= (4 * 512) // 64 + 2
    # 16 head starts and steps of the class high, 4 of the class normal.
    assert step_of_first_token(rig, "low") <= 20 * (512 + 64) // 64 + 3
    assert len(rig.finished) < 15, "most of the high ones still wait"


def test_a_tenants_reservations_do_not_keep_anothers_from_their_blocks() -> None:
    rig = Rig(12)
    for index in range(6):
        rig.reserve(f"a{index}", prompt(64, index), A)
    rig.run()
    assert list(rig.reserved) == ["a0", "a1", "a2"]
    rig.reserve("b", prompt(20, 50), B)
    rig.release("a0")
    rig.run()
    assert list(rig.reserved) == ["a0", "a1", "a2", "b"], "had nothing yet"
    for index in range(1, 6):
        rig.release(f"a{index}")
        rig.run()
    rig.release("b")
    rig.assert_empty()


def test_one_that_lost_its_blocks_returns_before_anybody_new() -> None:
    rig = Rig(6, prefix_cache=False)
    rig.admit("old", prompt(30), 30, origin=A)
    rig.admit("new", prompt(30, 1), 30, origin=B)
    while not rig.engine.stats().num_preemptions:
        rig.step()
    rig.admit("later", prompt(1, 2), 2, origin=Origin(b"c", Priority.HIGH))
    rig.run()
    order = [chunk.request.id for plan in rig.plans for chunk in plan.chunks if chunk.start == 0]
    assert order == ["old", "new", "new", "later"]
    rig.assert_right("old", "new", "later")
    rig.assert_empty()

"""Reservations and held blocks, over the engine that serves them."""

import pytest

from common.engine.events import Probe
from common.messages import RequestId
from tests.unit.common.engine.rig import Rig

LENGTHS = (1, 15, 16, 17, 31, 32, 33, 48, 64)


def prompt(num_tokens: int, salt: int = 0) -> list[int]:
    return [salt * 1000 + position for position in range(num_tokens)]


def hand_over(rig: Rig, id: str, tokens: list[int], max_tokens: int = 6, *, first: int | None = None) -> None:
    """What a decode role does when its blocks have landed: the first token is known, the prompt computed."""
    first = rig_first(tokens) if first is None else first
    rig.admit(id, [*tokens, first], max_tokens, num_prompt_tokens=len(tokens), num_computed=len(tokens))


def rig_first(tokens: list[int]) -> int:
    rig = Rig(16)
    rig.admit("x", tokens, 1)
    rig.run()
    return rig.tokens[RequestId("x")][0]


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_a_pulled_prompt_decodes_to_the_same_tokens_as_one_computed_here(num_tokens: int) -> None:
    rig, tokens = Rig(), prompt(num_tokens)
    rig.reserve("a", tokens)
    rig.run()
    lease = rig.reserved[RequestId("a")]
    assert len(lease.blocks) == -(-num_tokens // 16)
    assert rig.engine.stats().leased_blocks == len(lease.blocks)
    rig.pull("a", tokens)
    hand_over(rig, "a", tokens)
    rig.run()
    assert rig.tokens[RequestId("a")] == rig.expected("a", 5)
    assert rig.engine.stats().num_computed_prompt_tokens == 0
    rig.assert_empty()


def test_blocks_that_never_landed_give_wrong_tokens() -> None:
    """The planted fault: the same hand-over without the pull."""
    rig, tokens = Rig(), prompt(33)
    rig.reserve("a", tokens)
    rig.run()
    hand_over(rig, "a", tokens)
    rig.run()
    assert rig.tokens[RequestId("a")] != rig.expected("a", 5)


@pytest.mark.parametrize("num_landed", [0, 16, 32])
def test_what_did_not_land_is_computed_at_home(num_landed: int) -> None:
    rig, tokens = Rig(), prompt(40)
    rig.reserve("a", tokens)
    rig.run()
    rig.write(rig.reserved[RequestId("a")].blocks, tokens[:num_landed])
    rig.admit("a", tokens, 6, num_computed=num_landed)
    rig.run()
    rig.assert_right("a")
    assert rig.engine.stats().num_computed_prompt_tokens == 40 - num_landed
    rig.assert_empty()


def test_a_reservation_shares_the_prefix_that_is_here_and_need_not_be_told_so() -> None:
    rig, tokens = Rig(), prompt(40)
    rig.admit("first", tokens, 1)
    rig.run()
    rig.reserve("a", tokens)
    rig.run()
    lease = rig.reserved[RequestId("a")]
    assert lease.num_cached == 32
    before = rig.memory.generations[list(lease.blocks[:2])].tolist()
    rig.admit("a", tokens, 6, num_computed=0)
    rig.run()
    rig.assert_right("a")
    assert rig.plans[-6].chunks[0].start == 32
    assert rig.memory.generations[list(lease.blocks[:2])].tolist() == before
    rig.assert_empty()


def test_pulled_blocks_are_offered_to_others_only_once_they_have_landed() -> None:
    rig, tokens = Rig(), prompt(40)
    rig.reserve("a", tokens)
    rig.reserve("b", tokens)
    rig.run()
    assert rig.reserved[RequestId("b")].num_cached == 0
    rig.pull("a", tokens)
    hand_over(rig, "a", tokens)
    rig.reserve("c", tokens)
    rig.run()
    assert rig.reserved[RequestId("c")].num_cached == 32
    for id in "bc":
        rig.release(id)
    rig.assert_empty()


def test_reservations_are_granted_in_order_and_a_small_one_does_not_pass_a_large_one() -> None:
    rig = Rig(4)
    rig.reserve("a", prompt(32, 1))
    rig.reserve("large", prompt(64, 2))
    rig.reserve("small", prompt(16, 3))
    rig.run()
    assert list(rig.reserved) == ["a"]
    assert rig.engine.stats().num_waiting == 2
    rig.release("a")
    rig.run()
    assert list(rig.reserved) == ["a", "large"]
    rig.release("large")
    rig.run()
    assert list(rig.reserved) == ["a", "large", "small"]
    rig.release("small")
    rig.assert_empty()


def test_a_queued_reservation_can_be_dropped() -> None:
    rig = Rig(2)
    rig.reserve("a", prompt(32, 1))
    rig.reserve("b", prompt(32, 2))
    rig.release("b")
    rig.release("a")
    rig.run()
    assert not rig.reserved
    rig.assert_empty()


def test_a_grant_leaves_a_block_for_each_running_request() -> None:
    rig = Rig(4)
    rig.admit("run", prompt(16), 20)
    rig.step()
    rig.reserve("a", prompt(48, 1))
    rig.step()
    assert not rig.reserved
    rig.reserve("b", prompt(16, 2))
    rig.release("a")
    rig.step()
    assert list(rig.reserved) == ["b"]
    rig.release("b")
    rig.run()
    rig.assert_right("run")
    rig.assert_empty()


def test_a_reservation_does_not_pass_a_request_that_waits_for_blocks_nor_the_other_way_round() -> None:
    rig = Rig(4)
    rig.reserve("holds", prompt(32, 1))
    rig.admit("large", prompt(50, 2), 2)
    rig.reserve("later", prompt(16, 3))
    rig.run()
    assert list(rig.reserved) == ["holds"], "would have fitted, but came after `large`"
    rig.release("holds")
    rig.step()
    rig.reserve("whole", prompt(64, 4))
    rig.admit("small", prompt(1, 5), 1)
    rig.run()
    assert not rig.tokens.get(RequestId("small")), "came after `whole`, which waits for `later`"
    rig.release("later")
    rig.run()
    assert list(rig.reserved) == ["holds", "later", "whole"]
    rig.release("whole")
    rig.run()
    rig.assert_right("large", "small")
    rig.assert_empty()


def test_a_reservation_does_not_wait_until_prompts_before_it_have_their_turn_in_a_step() -> None:
    rig = Rig(max_step_tokens=16)
    for number in range(3):
        rig.admit(f"home-{number}", prompt(64, number), 2)
    rig.reserve("away", prompt(32, 9))
    rig.step()
    assert list(rig.reserved) == ["away"], "there are blocks for all of them"
    assert [chunk.request.id for chunk in rig.plans[0].chunks] == ["home-0"]
    rig.release("away")
    rig.run()
    rig.assert_right("home-0", "home-1", "home-2")
    assert list(rig.finished) == ["home-0", "home-1", "home-2"]
    rig.assert_empty()


def test_a_step_ends_soon_where_blocks_wait_for_their_bytes() -> None:
    """Whoever brings them would wait for its end."""
    rig = Rig(before_step=lambda plan: rig.clock.advance(0.001 * plan.num_tokens), itl_target_s=0.1, max_step_s=0.3)
    rig.admit("before", prompt(100), 1)
    rig.run()
    rig.reserve("away", prompt(32, 1))
    rig.admit("home", prompt(450, 2), 1)
    rig.step()
    rig.step()
    assert list(rig.reserved) == ["away"]
    assert 90 <= rig.plans[-1].num_tokens <= 110
    rig.release("away")
    rig.step()
    assert 280 <= rig.plans[-1].num_tokens <= 300
    rig.run()
    rig.assert_right("before", "home")
    rig.assert_empty()


def test_prompts_before_a_reservation_have_their_blocks_first() -> None:
    rig = Rig(8, max_step_tokens=16)
    rig.admit("home-0", prompt(48, 0), 2)
    rig.admit("home-1", prompt(48, 1), 2)
    rig.reserve("away", prompt(32, 9))
    rig.step()
    assert not rig.reserved, "two blocks are left, one of which each running one may ask for"
    rig.run()
    assert list(rig.reserved) == ["away"]
    rig.release("away")
    rig.assert_right("home-0", "home-1")
    rig.assert_empty()


def test_leases_that_starve_the_running_are_reported_once_and_again_after_one_was_given_back_in_vain() -> None:
    rig = Rig(4, prefix_cache=False)
    rig.reserve("a", prompt(16, 1))
    rig.reserve("b", prompt(16, 2))
    rig.reserve("c", prompt(16, 3))
    rig.run()
    rig.admit("run", prompt(14), 40)
    rig.run()
    assert rig.num_starved == 1
    assert len(rig.tokens[RequestId("run")]) == 3
    rig.engine.post(Probe())
    rig.run()
    assert rig.num_starved == 1
    rig.release("a")
    rig.run()
    assert rig.num_starved == 2, "it ran on, and starved again"
    rig.release("b")
    rig.release("c")
    rig.run()
    rig.assert_right("run")
    assert rig.num_starved == 2
    rig.assert_empty()


def test_a_lease_that_becomes_a_request_ends_the_starving_by_itself() -> None:
    rig, tokens = Rig(3), prompt(32, 1)
    rig.reserve("a", tokens)
    rig.run()
    rig.admit("run", prompt(14), 30)
    rig.run()
    assert rig.num_starved == 1
    rig.pull("a", tokens)
    hand_over(rig, "a", tokens, 10)
    rig.run()
    rig.assert_right("run")
    assert rig.tokens[RequestId("a")] == rig.expected("a", 9)
    rig.assert_empty()


def test_a_reservation_that_no_pool_can_hold_fails_at_once() -> None:
    rig = Rig(2)
    rig.reserve("a", prompt(33))
    rig.run()
    assert RequestId("a") in rig.failed
    rig.assert_empty()


def test_without_prefix_cache_nothing_is_shared() -> None:
    rig, tokens = Rig(prefix_cache=False), prompt(40)
    rig.admit("first", tokens, 3)
    rig.run()
    rig.reserve("a", tokens)
    rig.admit("b", tokens, 3)
    rig.run()
    assert rig.reserved[RequestId("a")].num_cached == 0
    rig.release("a")
    rig.assert_right("first", "b")
    assert rig.engine.stats().num_cached_tokens == 0
    rig.assert_empty()

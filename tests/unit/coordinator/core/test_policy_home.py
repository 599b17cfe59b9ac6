"""Rule 7: prompts that are computed at home because prefill is the bottleneck."""

from typing import Any

import pytest

from common.messages import Routed
from coordinator.core.policy import Candidate
from tests.unit.coordinator.core.cards import OTHER_LAYOUT, make_candidate
from tests.unit.coordinator.core.test_policy import names, route

AFTER_S = 2.0
HOME = (None, "decode-0")
AWAY = ("prefill-0", "decode-0")


def prefill(num_waiting_tokens: int = 0, *, speed: float = 100.0, **fields: Any) -> Candidate:
    return make_candidate(
        "prefill-0", num_waiting_tokens=num_waiting_tokens, prompt_tokens_per_s=speed, free_blocks=1000, **fields
    )


def decode(num_waiting_tokens: int = 0, *, name: str = "decode-0", speed: float = 100.0, **fields: Any) -> Candidate:
    free = {"free_blocks": 1000, **fields}
    return make_candidate(name, num_waiting_tokens=num_waiting_tokens, prompt_tokens_per_s=speed, **free)


def ask(*nodes: Candidate, num_tokens: int = 100, **how: Any) -> Routed:
    return route(*nodes, **{"num_tokens": num_tokens, "home_after_s": AFTER_S, **how})


def test_a_prompt_that_a_queue_at_prefill_would_hold_up_is_computed_at_home() -> None:
    routed = ask(decode(), prefill(201))
    assert (names(routed), routed.why) == (HOME, "home-faster")


def test_an_idle_prefill_node_gets_the_prompt_however_slow_it_is() -> None:
    for num_tokens in (1, 100, 1000):
        assert names(ask(decode(speed=1e6), prefill(speed=1.0), num_tokens=num_tokens)) == AWAY


def test_only_a_queue_longer_than_the_threshold_sends_prompts_home() -> None:
    assert names(ask(decode(speed=1e6), prefill(200))) == AWAY
    assert names(ask(decode(speed=1e6), prefill(201))) == HOME
    assert names(ask(decode(speed=1e6), prefill(201), home_after_s=2.1)) == AWAY


def test_a_threshold_of_zero_keeps_every_prompt_away() -> None:
    assert names(ask(decode(speed=1e6), prefill(10**6), home_after_s=0.0)) == AWAY


def test_home_has_to_be_sooner_by_the_margin() -> None:
    # 700 tokens take the prefill node 7 s, those at home take 2.8 s or a little more.
    assert names(ask(decode(180), prefill(600))) == HOME
    assert names(ask(decode(181), prefill(600))) == AWAY
    assert names(ask(decode(speed=35.8), prefill(600))) == HOME
    assert names(ask(decode(speed=35.6), prefill(600))) == AWAY


def test_what_was_routed_since_the_last_report_counts_on_either_side() -> None:
    assert names(ask(decode(), prefill(100, routed_tokens=101))) == HOME
    assert names(ask(decode(100, routed_tokens=81), prefill(600))) == AWAY


def test_a_decode_node_whose_speed_is_unknown_is_taken_to_be_as_fast_as_prefill() -> None:
    assert names(ask(decode(180, speed=0.0), prefill(600))) == HOME
    assert names(ask(decode(181, speed=0.0), prefill(600))) == AWAY


def test_without_a_known_speed_of_prefill_nothing_is_predicted() -> None:
    assert names(ask(decode(), prefill(10**6, speed=0.0))) == AWAY


def test_prefill_that_has_the_beginning_in_its_cache_is_sooner_by_that() -> None:
    assert names(ask(decode(), prefill(250, num_cached_blocks=60), num_tokens=1000)) == AWAY
    assert names(ask(decode(speed=300.0), prefill(250), num_tokens=1000)) == HOME


def test_home_that_has_the_beginning_in_its_cache_is_sooner_by_that() -> None:
    assert names(ask(decode(), prefill(201), num_tokens=1000)) == AWAY
    assert names(ask(decode(num_cached_blocks=40), prefill(201), num_tokens=1000)) == HOME
    routed = ask(decode(num_cached_blocks=62), prefill(201), num_tokens=1000)
    assert (names(routed), routed.why) == (HOME, "cached-at-home")


def test_the_decode_node_that_has_it_first_is_home() -> None:
    busy, idle = decode(50), decode(name="decode-1", num_running=9)
    assert names(ask(busy, idle, prefill(1000))) == (None, "decode-1")
    slow = decode(name="decode-1", speed=10.0)
    assert names(ask(decode(50), slow, prefill(1000))) == HOME
    assert names(ask(decode(), decode(name="decode-1"), prefill(1000))) == HOME, "equal ones by rank"


def test_a_decode_node_without_room_is_no_home() -> None:
    assert names(ask(decode(free_blocks=6), prefill(1000))) == AWAY
    assert names(ask(decode(free_blocks=7), prefill(1000))) == HOME


def test_the_better_of_two_prefill_nodes_is_what_home_is_compared_with() -> None:
    idle = make_candidate("prefill-1", prompt_tokens_per_s=100.0)
    assert names(ask(decode(), prefill(1000), idle)) == ("prefill-1", "decode-0")
    misfit = make_candidate("prefill-1", prompt_tokens_per_s=100.0, layout=OTHER_LAYOUT)
    assert names(ask(decode(), prefill(1000), misfit)) == HOME


@pytest.mark.parametrize("policy", ["wait", "fail"])
def test_where_prompts_are_prefills_business_alone_they_stay_there(policy: str) -> None:
    assert names(ask(decode(), prefill(1000), policy=policy)) == AWAY


def test_a_prompt_for_which_prefill_is_too_late_may_be_in_time_at_home() -> None:
    assert names(ask(decode(), prefill(900), first_token_s=1.5)) == HOME
    assert names(ask(decode(301), prefill(900), first_token_s=20.0)) == AWAY


def test_the_order_in_which_nodes_are_known_decides_nothing() -> None:
    nodes = [decode(), decode(name="decode-1"), prefill(600), make_candidate("prefill-1", num_waiting_tokens=600)]
    answers = {names(ask(*nodes[at:], *nodes[:at])) for at in range(len(nodes))}
    assert answers == {HOME}

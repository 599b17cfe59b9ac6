from typing import Any

import pytest

from common.errors import ContextLengthError, NoPrefillError, OverloadedError, UnavailableError
from common.messages import Incarnation, NodeState, Route, Routed
from coordinator.core.policy import Candidate, PrefillUnavailable, choose
from tests.unit.coordinator.core.cards import OTHER_LAYOUT, make_candidate, offers


def route(
    *nodes: Candidate,
    num_tokens: int = 10,
    exclude: tuple[str, ...] = (),
    policy: Any = "local",
    first_token_s: float | None = None,
    home_after_s: float = 0.0,
) -> Routed:
    body = Route("tiny", num_tokens, tuple(Incarnation(name) for name in exclude), first_token_s=first_token_s)
    prefill_unavailable: PrefillUnavailable = policy
    return choose(body, nodes, prefill_unavailable=prefill_unavailable, home_after_s=home_after_s)


def names(routed: Routed) -> tuple[str | None, str]:
    return (routed.prefill.node if routed.prefill else None, routed.decode.node)


def test_the_least_loaded_of_each_role_is_chosen() -> None:
    routed = route(
        make_candidate("decode-0", num_running=3),
        make_candidate("decode-1", num_running=1, num_waiting=1),
        make_candidate("prefill-0", num_waiting_tokens=100),
        make_candidate("prefill-1", num_waiting_tokens=99),
    )
    assert names(routed) == ("prefill-1", "decode-1")
    assert routed.why == "least-loaded"


def test_equal_nodes_are_taken_by_name() -> None:
    nodes = [make_candidate(name) for name in ("decode-1", "decode-0", "prefill-1", "prefill-0")]
    assert names(route(*nodes)) == names(route(*reversed(nodes))) == ("prefill-0", "decode-0")


def test_of_equally_many_requests_the_one_with_more_free_blocks_wins() -> None:
    assert names(route(make_candidate("decode-0", free_blocks=9), make_candidate("decode-1", free_blocks=10)))[1] == (
        "decode-1"
    )


def test_a_node_with_room_for_the_prompt_wins_over_an_idle_one_without() -> None:
    full, busy = make_candidate("decode-0", free_blocks=1), make_candidate("decode-1", num_running=9)
    assert names(route(full, busy, num_tokens=40))[1] == "decode-1"
    assert names(route(full, busy, num_tokens=15))[1] == "decode-0"  # one block holds the prompt and a token
    assert names(route(full, busy, num_tokens=16))[1] == "decode-1"  # the answer's first token needs a second one


def test_what_was_routed_since_the_last_report_counts() -> None:
    assert names(route(make_candidate("decode-0", num_routed=1), make_candidate("decode-1")))[1] == "decode-1"
    decode = make_candidate("decode-0")
    given = make_candidate("prefill-0", routed_tokens=50)
    assert names(route(given, make_candidate("prefill-1", num_waiting_tokens=40), decode))[0] == "prefill-1"
    assert names(route(given, make_candidate("prefill-1", num_waiting_tokens=60), decode))[0] == "prefill-0"


def test_calls_that_wait_for_their_blocks_are_load_too() -> None:
    assert names(route(make_candidate("decode-0", num_calls=2), make_candidate("decode-1", num_running=1)))[1] == (
        "decode-1"
    )


@pytest.mark.parametrize("state", [state for state in NodeState if state is not NodeState.READY])
def test_only_ready_nodes_are_chosen(state: NodeState) -> None:
    routed = route(
        make_candidate("decode-0", state=state),
        make_candidate("decode-1", num_running=50),
        make_candidate("prefill-0", state=state),
        make_candidate("prefill-1", num_waiting_tokens=5000),
    )
    assert names(routed) == ("prefill-1", "decode-1")


def test_nodes_that_failed_the_request_already_are_skipped() -> None:
    nodes = [make_candidate(name) for name in ("decode-0", "decode-1", "prefill-0", "prefill-1")]
    assert names(route(*nodes, exclude=("decode-0/1", "prefill-0/1"))) == ("prefill-1", "decode-1")
    # The same name in a new incarnation has not failed anything yet.
    assert names(route(*nodes, exclude=("decode-0/0",))) == ("prefill-0", "decode-0")


def test_the_prefill_address_says_how_its_blocks_are_read() -> None:
    routed = route(make_candidate("decode-0"), make_candidate("prefill-0", offers=offers("tcp")))
    assert routed.prefill is not None
    assert routed.prefill.offers == offers("tcp")
    assert routed.prefill.incarnation == "prefill-0/1"


def test_a_decode_node_with_a_partner_wins_over_a_less_loaded_one_without() -> None:
    alone = make_candidate("decode-0", offers=offers("ucx"))
    paired = make_candidate("decode-1", num_running=5)
    assert names(route(alone, paired, make_candidate("prefill-0"))) == ("prefill-0", "decode-1")


def test_without_a_prefill_node_the_prompt_is_computed_at_home() -> None:
    routed = route(make_candidate("decode-0"))
    assert (names(routed), routed.why) == ((None, "decode-0"), "no-prefill-node")


def test_without_a_prefill_node_that_fits_the_prompt_is_computed_at_home() -> None:
    routed = route(make_candidate("decode-0"), make_candidate("prefill-0", layout=OTHER_LAYOUT))
    assert (names(routed), routed.why) == ((None, "decode-0"), "no-prefill-fits")


@pytest.mark.parametrize(("policy", "kind"), [("wait", UnavailableError), ("fail", NoPrefillError)])
def test_without_a_prefill_node_the_policy_may_refuse(policy: str, kind: type[Exception]) -> None:
    with pytest.raises(UnavailableError, match=r"no prefill node can take tiny now \(none registered\)") as refusal:
        route(make_candidate("decode-0"), policy=policy)
    assert type(refusal.value) is kind
    assert refusal.value.retry_after_s is not None
    with pytest.raises(UnavailableError, match="1 stalled, 1 tried already"):
        route(
            make_candidate("decode-0"),
            make_candidate("prefill-0", state=NodeState.STALLED),
            make_candidate("prefill-1"),
            exclude=("prefill-1/1",),
            policy="fail",
        )


def test_a_refusing_policy_calls_a_prompt_too_long_when_it_is() -> None:
    nodes = (make_candidate("decode-0"), make_candidate("prefill-0", max_model_len=100))
    assert names(route(*nodes, num_tokens=98, policy="fail"))[0] == "prefill-0"
    with pytest.raises(ContextLengthError, match="takes at most 98"):
        route(*nodes, num_tokens=99, policy="fail")


def test_without_a_decode_node_there_is_nothing_to_do() -> None:
    with pytest.raises(UnavailableError, match="no decode node") as refusal:
        route(make_candidate("prefill-0"))
    assert refusal.value.retry_after_s is not None


def test_a_prompt_that_is_too_long_for_every_node_is_refused_for_good() -> None:
    nodes = (make_candidate("decode-0", max_model_len=100), make_candidate("decode-1", max_model_len=200))
    assert names(route(*nodes, num_tokens=199))[1] == "decode-1"
    with pytest.raises(ContextLengthError, match="the prompt has 200 tokens; tiny takes at most 199 here"):
        route(*nodes, num_tokens=200)


def test_a_prompt_that_only_a_stalled_node_can_take_may_be_tried_again() -> None:
    nodes = (make_candidate("decode-0", max_model_len=100), make_candidate("decode-1", state=NodeState.STALLED))
    with pytest.raises(UnavailableError, match="1 ready, 1 stalled"):
        route(*nodes, num_tokens=200)


# --- cached prefixes ---------------------------------------------------------------------------------------


def test_the_prefill_node_that_has_the_prefix_wins_until_what_waits_there_outweighs_it() -> None:
    decode, cold = make_candidate("decode-0"), make_candidate("prefill-0")
    warm = make_candidate("prefill-1", num_cached_blocks=20, num_waiting_tokens=319)
    routed = route(decode, cold, warm, num_tokens=500)
    assert (names(routed), routed.why) == (("prefill-1", "decode-0"), "cached-prefix")
    busy = make_candidate("prefill-1", num_cached_blocks=20, num_waiting_tokens=321)
    routed = route(decode, cold, busy, num_tokens=500)
    assert (names(routed), routed.why) == (("prefill-0", "decode-0"), "least-loaded")


def test_what_was_routed_to_a_warm_node_counts_against_it_before_any_report() -> None:
    decode, cold = make_candidate("decode-0"), make_candidate("prefill-0")
    warm = make_candidate("prefill-1", num_cached_blocks=20, routed_tokens=321)
    assert names(route(decode, cold, warm, num_tokens=500))[0] == "prefill-0"


def test_the_last_token_of_a_cached_prompt_is_still_to_be_computed() -> None:
    node = make_candidate("prefill-0", num_cached_blocks=2)
    assert [node.uncached_tokens(num_tokens) for num_tokens in (1, 16, 17, 32, 33, 40)] == [1, 16, 1, 16, 1, 8]


def test_a_decode_node_that_has_the_prefix_may_be_a_little_busier() -> None:
    prefill = make_candidate("prefill-0")
    for fewest, most in ((0, 1), (4, 5), (8, 10)):  # half of the prompt is worth half of `2 + a quarter of the fewest`
        cold = make_candidate("decode-0", num_running=fewest)
        warm = make_candidate("decode-1", num_running=most, num_cached_blocks=32)
        assert names(route(prefill, cold, warm, num_tokens=1000))[1] == "decode-1"
        overrun = make_candidate("decode-1", num_running=most + 1, num_cached_blocks=32)
        assert names(route(prefill, cold, overrun, num_tokens=1000))[1] == "decode-0"


def test_a_warm_decode_node_without_room_does_not_win() -> None:
    cold, warm = make_candidate("decode-0"), make_candidate("decode-1", num_cached_blocks=10, free_blocks=3)
    assert names(route(make_candidate("prefill-0"), cold, warm, num_tokens=500))[1] == "decode-0"


@pytest.mark.parametrize("policy", ["local", "wait", "fail"])
def test_a_prompt_that_the_decode_node_holds_but_for_two_blocks_is_computed_there(policy: str) -> None:
    prefill, decode = make_candidate("prefill-0"), make_candidate("decode-0", num_cached_blocks=10)
    routed = route(prefill, decode, num_tokens=192, policy=policy)
    assert (names(routed), routed.why) == ((None, "decode-0"), "cached-at-home")
    assert names(route(prefill, decode, num_tokens=193, policy=policy)) == ("prefill-0", "decode-0")


def test_a_short_prompt_that_nobody_has_is_prefilled() -> None:
    assert names(route(make_candidate("prefill-0"), make_candidate("decode-0"), num_tokens=1))[0] == "prefill-0"


# --- the first token's time ----------------------------------------------------------------------------------


def test_a_request_whose_first_token_would_be_late_is_refused_with_the_time_that_it_takes() -> None:
    decode = make_candidate("decode-0")
    prefill = make_candidate("prefill-0", num_waiting_tokens=700, routed_tokens=200, prompt_tokens_per_s=100.0)
    assert names(route(decode, prefill, num_tokens=100, first_token_s=10.0))[0] == "prefill-0"
    with pytest.raises(OverloadedError, match=r"come in 10.0 s at the earliest, wanted within 5 s") as refusal:
        route(decode, prefill, num_tokens=100, first_token_s=5.0)
    assert refusal.value.retry_after_s == pytest.approx(5.0)
    with pytest.raises(OverloadedError) as refusal:
        route(decode, prefill, num_tokens=100, first_token_s=9.9)
    assert refusal.value.retry_after_s == 1.0


def test_without_a_wish_and_without_a_known_speed_nothing_is_predicted() -> None:
    decode = make_candidate("decode-0")
    busy = make_candidate("prefill-0", num_waiting_tokens=90_000, prompt_tokens_per_s=100.0)
    assert names(route(decode, busy))[0] == "prefill-0"
    unknown = make_candidate("prefill-1", num_waiting_tokens=90_000)
    assert names(route(decode, unknown, first_token_s=0.1))[0] == "prefill-1"


def test_a_node_that_is_in_time_wins_over_a_less_loaded_one_that_is_slow() -> None:
    slow = make_candidate("prefill-0", prompt_tokens_per_s=10.0)
    fast = make_candidate("prefill-1", prompt_tokens_per_s=1000.0, num_waiting_tokens=500)
    decode = make_candidate("decode-0")
    assert names(route(decode, slow, fast, num_tokens=100, first_token_s=2.0))[0] == "prefill-1"
    assert names(route(decode, slow, fast, num_tokens=100))[0] == "prefill-0"


def test_a_cached_prefix_brings_the_first_token_forward() -> None:
    decode = make_candidate("decode-0")
    warm = make_candidate("prefill-0", prompt_tokens_per_s=100.0, num_cached_blocks=25)
    assert names(route(decode, warm, num_tokens=500, first_token_s=1.0))[0] == "prefill-0"


def test_prompts_computed_at_home_are_predicted_too() -> None:
    busy = make_candidate("decode-0", num_waiting_tokens=900, prompt_tokens_per_s=100.0)
    busier = make_candidate("decode-1", num_running=1, num_waiting_tokens=1900, prompt_tokens_per_s=100.0)
    with pytest.raises(OverloadedError) as refusal:
        route(busy, busier, num_tokens=100, first_token_s=5.0)
    assert refusal.value.retry_after_s == pytest.approx(5.0)
    idle = make_candidate("decode-1", num_running=1, prompt_tokens_per_s=100.0)
    assert names(route(busy, idle, num_tokens=100, first_token_s=5.0)) == (None, "decode-1")


def test_late_prefill_nodes_do_not_send_prompts_home() -> None:
    late = make_candidate("prefill-0", num_waiting_tokens=9000, prompt_tokens_per_s=100.0)
    with pytest.raises(OverloadedError):
        route(make_candidate("decode-0"), late, first_token_s=1.0)
    misfit = make_candidate("prefill-1", layout=OTHER_LAYOUT)
    with pytest.raises(OverloadedError):
        route(make_candidate("decode-0"), late, misfit, first_token_s=1.0)

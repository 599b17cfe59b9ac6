"""One request's life: these commands for this event. R1 to R8 are the session module's rules."""

import pytest

from common.errors import (
    BatonError,
    DeadlineError,
    InternalError,
    InvalidTransition,
    MovedError,
    OverloadedError,
    PeerLostError,
    RequestError,
    StaleBlockError,
    TransferError,
    UnavailableError,
)
from common.messages import FinishReason, Route, Routed, Tokens
from coordinator.gateway.session import MAX_MOVES, Outcome, SessionStatus
from coordinator.gateway.session_events import (
    AskRoute,
    AttemptEnded,
    AttemptFailed,
    CancelAttempt,
    ClientGone,
    DeadlinePassed,
    Deliver,
    Fail,
    Finish,
    GatewayStopping,
    OpenAttempt,
    Prepared,
    RouteArrived,
    RouteRefused,
    StopStringFound,
    TokensArrived,
)
from tests.unit.coordinator.gateway.sessions import D1, D2, P1, PROMPT, error_of, new_session, running


def test_a_request_is_routed_attempted_delivered_and_finished() -> None:
    session = new_session()
    assert session.handle(Prepared(101.0)) == [AskRoute(1, Route("m", 3))]
    (opened,) = session.handle(RouteArrived(102.0, 1, Routed(D1, P1), "digest"))
    assert isinstance(opened, OpenAttempt)
    assert (opened.node, opened.body.prefill, opened.body.tokens) == (D1, P1, PROMPT)
    assert session.handle(TokensArrived(103.0, 1, Tokens([5], cached_tokens=2))) == [Deliver([5])]
    assert session.handle(TokensArrived(104.0, 1, Tokens([6, 2], FinishReason.STOP))) == [
        Deliver([6, 2]),
        Finish(FinishReason.STOP),
    ]
    assert (session.outcome, session.cached_tokens, session.choices[0].delivered) == (Outcome.FINISHED, 2, [5, 6, 2])
    session.check_invariants()


def test_r1_a_new_attempt_goes_on_behind_the_delivered_tokens_with_the_same_seed() -> None:
    session = running()
    session.handle(TokensArrived(103.0, 1, Tokens([5, 6], cached_tokens=3)))
    assert session.handle(AttemptFailed(104.0, 1, PeerLostError("gone"))) == [
        AskRoute(2, Route("m", 5, (D1.incarnation,)))
    ]
    (opened,) = session.handle(RouteArrived(105.0, 2, Routed(D2), "digest"))
    assert isinstance(opened, OpenAttempt)
    assert opened.body.tokens == [*PROMPT, 5, 6]
    assert opened.body.num_prompt_tokens == 3
    assert (opened.body.attempt, opened.body.sampling) == (2, session.sampling)
    assert session.handle(TokensArrived(106.0, 2, Tokens([7], cached_tokens=1))) == [Deliver([7])]
    assert session.cached_tokens == 3, "what the first attempt found is what the client is told"
    assert session.num_failovers == 1


def test_r1_a_node_of_another_model_version_cannot_go_on() -> None:
    session = running()
    session.handle(TokensArrived(103.0, 1, Tokens([5])))
    session.handle(AttemptFailed(104.0, 1, PeerLostError("gone")))
    (ask,) = session.handle(RouteArrived(105.0, 2, Routed(D2), "another digest"))
    assert isinstance(ask, AskRoute)
    assert ask.body.exclude == (D1.incarnation, D2.incarnation)


def test_a_request_with_nothing_delivered_may_start_again_on_another_version() -> None:
    session = running()
    session.handle(AttemptFailed(104.0, 1, PeerLostError("gone")))
    (opened,) = session.handle(RouteArrived(105.0, 2, Routed(D2), "another digest"))
    assert isinstance(opened, OpenAttempt)
    assert opened.body.model_digest == "another digest"


def test_r2_late_news_of_an_old_attempt_is_dropped() -> None:
    session = running()
    session.handle(AttemptFailed(103.0, 1, PeerLostError("gone")))
    session.handle(RouteArrived(104.0, 2, Routed(D2), "digest"))
    assert session.handle(TokensArrived(105.0, 1, Tokens([9], FinishReason.LENGTH))) == []
    assert session.handle(AttemptEnded(105.0, 1)) == []
    assert session.handle(RouteRefused(105.0, 1, UnavailableError("no"))) == []
    assert (session.choices[0].delivered, session.num_late) == ([], 3)


def test_r2_nothing_happens_after_the_end() -> None:
    session = running()
    session.handle(TokensArrived(103.0, 1, Tokens([5], FinishReason.STOP)))
    for event in (ClientGone(104.0), DeadlinePassed(104.0), StopStringFound(104.0), AttemptEnded(104.0, 1)):
        assert session.handle(event) == []
    assert session.outcome is Outcome.FINISHED


def test_r6_a_failed_transfer_condemns_the_prefill_node() -> None:
    for error in (TransferError("broke"), StaleBlockError("reused")):
        session = running()
        assert session.handle(AttemptFailed(103.0, 1, error)) == [AskRoute(2, Route("m", 3, (P1.incarnation,)))]


def test_r6_a_failed_transfer_without_a_prefill_node_condemns_the_decode_node() -> None:
    session = running(prefill=None)
    session.handle(AttemptFailed(103.0, 1, TransferError("broke")))
    assert list(session.excluded) == [D1.incarnation]


@pytest.mark.parametrize("error", [RequestError("bad"), InternalError("bug")])
def test_r3_an_error_that_no_other_node_would_mend_ends_the_request(error: BatonError) -> None:
    session = running()
    assert session.handle(AttemptFailed(103.0, 1, error)) == [Fail(error)]
    assert session.outcome is Outcome.FAILED


def test_r3_attempts_have_a_budget() -> None:
    session = running(max_attempts=2)
    session.handle(AttemptFailed(103.0, 1, PeerLostError("first")))
    session.handle(RouteArrived(104.0, 2, Routed(D2), "digest"))
    last = PeerLostError("second")
    assert session.handle(AttemptFailed(105.0, 2, last)) == [Fail(last)]


def test_r3_past_the_deadline_nothing_is_tried_again() -> None:
    session = running()
    assert isinstance(error_of([*session.handle(AttemptFailed(200.0, 1, PeerLostError("gone")))]), DeadlineError)


def test_r3_a_move_costs_no_attempt_but_there_are_not_endlessly_many() -> None:
    session = running(max_attempts=1)
    moved = MovedError("drained")
    for number in range(1, MAX_MOVES + 1):
        (ask,) = session.handle(AttemptFailed(103.0, number, moved))
        assert isinstance(ask, AskRoute)
        assert D1.incarnation in ask.body.exclude
        session.handle(RouteArrived(103.0, number + 1, Routed(D1), "digest"))
    assert (session.num_moves, session.num_failed, session.num_failovers) == (MAX_MOVES, 0, 0)
    assert session.handle(AttemptFailed(103.0, MAX_MOVES + 1, moved)) == [Fail(moved)]
    session.check_invariants()


def test_r3_a_node_that_refuses_a_begun_stream_costs_no_attempt_but_patience() -> None:
    session = running(max_attempts=2)
    session.handle(TokensArrived(103.0, 1, Tokens([5])))
    session.handle(AttemptFailed(104.0, 1, PeerLostError("gone")))
    full = OverloadedError("full")
    for at_s in (105.0, 120.0, 164.9):
        session.handle(RouteArrived(at_s, session.attempt, Routed(D2), "digest"))
        (ask,) = session.handle(AttemptFailed(at_s, session.attempt, full))
        assert isinstance(ask, AskRoute)
    session.handle(RouteArrived(165.0, session.attempt, Routed(D2), "digest"))
    assert session.handle(AttemptFailed(165.0, session.attempt, full)) == [Fail(full)]
    assert session.num_failed == 1


def test_paths_tell_how_each_attempt_came_by_its_prompt() -> None:
    session = running()
    assert session.path == "prefill", "as planned"
    session.handle(TokensArrived(103.0, 1, Tokens([5], path="prefill")))
    session.handle(TokensArrived(104.0, 1, Tokens([6], path="fallback")))
    assert session.path == "fallback"
    session.handle(AttemptFailed(105.0, 1, PeerLostError("gone")))
    session.handle(RouteArrived(106.0, 2, Routed(D2), "digest"))
    session.handle(TokensArrived(107.0, 2, Tokens([7])))
    assert session.paths == ["fallback", "home"]


def test_r7_an_attempt_that_died_after_its_last_token_has_finished() -> None:
    session = running(max_tokens=2)
    session.handle(TokensArrived(103.0, 1, Tokens([5, 6])))
    assert session.handle(AttemptFailed(104.0, 1, PeerLostError("gone"))) == [Finish(FinishReason.LENGTH)]
    session = running()
    session.handle(TokensArrived(103.0, 1, Tokens([5, 2])))
    assert session.handle(AttemptEnded(104.0, 1)) == [Finish(FinishReason.STOP)]


def test_an_attempt_that_ends_without_a_finish_is_made_again() -> None:
    session = running()
    session.handle(TokensArrived(103.0, 1, Tokens([5])))
    assert session.handle(AttemptEnded(104.0, 1)) == [AskRoute(2, Route("m", 4, (D1.incarnation,)))]


def test_a_node_that_sends_too_much_is_cut_off() -> None:
    session = running(max_tokens=2)
    assert session.handle(TokensArrived(103.0, 1, Tokens([5, 6, 7]))) == [
        Deliver([5, 6]),
        CancelAttempt(1),
        Finish(FinishReason.LENGTH),
    ]


def test_r8_a_stop_string_ends_the_attempt_and_the_request() -> None:
    session = running()
    session.handle(TokensArrived(103.0, 1, Tokens([5])))
    assert session.handle(StopStringFound(104.0)) == [CancelAttempt(1), Finish(FinishReason.STOP)]


def test_r8_a_client_that_left_gets_no_answer_and_all_is_cancelled() -> None:
    session = running()
    assert session.handle(ClientGone(103.0)) == [CancelAttempt(1)]
    assert session.outcome is Outcome.CANCELLED
    waiting = new_session()
    assert waiting.handle(ClientGone(101.0)) == []


def test_r8_a_deadline_cancels_and_fails() -> None:
    session = running()
    commands = session.handle(DeadlinePassed(200.0))
    assert commands[0] == CancelAttempt(1)
    assert isinstance(error_of([*commands]), DeadlineError)


def test_r8_a_gateway_that_stops_cancels_and_fails() -> None:
    session = running()
    commands = session.handle(GatewayStopping(110.0))
    assert commands[0] == CancelAttempt(1)
    assert isinstance(error_of([*commands]), UnavailableError)


def test_an_item_may_finish_without_tokens() -> None:
    session = running()
    assert session.handle(TokensArrived(103.0, 1, Tokens([], FinishReason.STOP))) == [Finish(FinishReason.STOP)]


def test_phases_add_up_to_the_whole_life() -> None:
    session = running()
    session.handle(TokensArrived(104.0, 1, Tokens([5])))
    session.handle(AttemptFailed(107.0, 1, PeerLostError("gone")))
    session.handle(RouteArrived(107.5, 2, Routed(D2), "digest"))
    session.handle(TokensArrived(109.0, 2, Tokens([6])))
    session.handle(TokensArrived(112.0, 2, Tokens([7], FinishReason.STOP, phases={"decode": 4.5})))
    assert session.phases() == {"preparing": 1.0, "routing": 1.5, "waiting": 3.5, "streaming": 6.0}
    assert sum(session.phases().values()) == 112.0 - session.created_s
    assert session.node_phases == {"decode": 4.5}


def test_a_forbidden_move_tells_the_story_so_far() -> None:
    session = new_session()
    session.handle(Prepared(101.0))
    with pytest.raises(InvalidTransition, match=r"routing -> streaming after preparing \(request\) -> routing"):
        session.handle(TokensArrived(102.0, 1, Tokens([5])))
    assert session.status is SessionStatus.ROUTING

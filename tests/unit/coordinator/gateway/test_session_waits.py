"""When a route is refused: who waits for how long, and whom to avoid afterwards. R4 to R6 of the session module."""

import pytest

from common.errors import (
    BatonError,
    ContextLengthError,
    DeadlineError,
    ModelNotFoundError,
    NoPrefillError,
    OverloadedError,
    PeerLostError,
    UnavailableError,
)
from common.messages import Route, Routed, Tokens
from coordinator.gateway.session import Session, SessionStatus
from coordinator.gateway.session_events import (
    AskRoute,
    AttemptFailed,
    Fail,
    OpenAttempt,
    Prepared,
    RouteArrived,
    RouteRefused,
    SessionCommand,
    TokensArrived,
    WaitEnded,
    WaitForCluster,
)
from tests.unit.coordinator.gateway.sessions import D1, D2, error_of, new_session, running

NO_NODE = UnavailableError("no decode node", retry_after_s=1.0)


def refused_route(session: Session, at_s: float, error: BatonError = NO_NODE) -> list[SessionCommand]:
    return session.handle(RouteRefused(at_s, session.attempt, error))


def waited(session: Session, at_s: float) -> list[SessionCommand]:
    return session.handle(WaitEnded(at_s, session.attempt))


def test_r4_a_request_without_a_node_waits_and_asks_again_under_the_same_attempt() -> None:
    session = new_session()
    session.handle(Prepared(101.0))
    assert refused_route(session, 102.0) == [WaitForCluster(1, 1.0)], "as long as the refusal says"
    assert session.status is SessionStatus.PARKED
    assert waited(session, 102.4) == [AskRoute(1, Route("m", 3))]
    (opened,) = session.handle(RouteArrived(102.5, 1, Routed(D1), "digest"))
    assert isinstance(opened, OpenAttempt)
    assert (session.attempt, session.num_failed, session.num_failovers) == (1, 0, 0)


def test_r4_patience_counts_from_where_the_waiting_began() -> None:
    session = new_session()
    session.handle(Prepared(101.0))
    refused_route(session, 110.0)
    waited(session, 111.0)
    assert refused_route(session, 114.5) == [WaitForCluster(1, 0.5)]
    assert waited(session, 115.0) == [AskRoute(1, Route("m", 3))], "the last word is the coordinator's"
    assert refused_route(session, 115.1) == [Fail(NO_NODE)]


def test_r4_a_pause_of_ours_is_followed_by_one_more_try() -> None:
    session = new_session()
    session.handle(Prepared(101.0))
    refused_route(session, 102.0)
    assert waited(session, 150.0) == [AskRoute(1, Route("m", 3))]
    (opened,) = session.handle(RouteArrived(150.5, 1, Routed(D1), "digest"))
    assert isinstance(opened, OpenAttempt)


def test_r4_a_stream_that_has_begun_is_more_patient_and_with_more() -> None:
    for refusal in (NO_NODE, OverloadedError("full", retry_after_s=1.0), NoPrefillError("none", retry_after_s=1.0)):
        session = running()
        session.handle(TokensArrived(103.0, 1, Tokens([5])))
        lost = PeerLostError("gone")
        session.handle(AttemptFailed(104.0, 1, lost))
        assert refused_route(session, 105.0, refusal) == [WaitForCluster(2, 1.0)]
        waited(session, 106.0)
        assert refused_route(session, 164.5, refusal) == [WaitForCluster(2, 0.5)]
        waited(session, 165.0)
        shown = lost if isinstance(refusal, UnavailableError) else refusal
        assert refused_route(session, 165.0, refusal) == [Fail(shown)]


def test_r4_a_token_renews_patience() -> None:
    session = running()
    session.handle(TokensArrived(103.0, 1, Tokens([5])))
    session.handle(AttemptFailed(104.0, 1, PeerLostError("gone")))
    refused_route(session, 104.0)
    waited(session, 150.0)
    session.handle(RouteArrived(150.0, 2, Routed(D2), "digest"))
    session.handle(TokensArrived(151.0, 2, Tokens([6])))
    session.handle(AttemptFailed(152.0, 2, PeerLostError("gone")))
    assert refused_route(session, 180.0) == [WaitForCluster(3, 0.05)], "the exclusion is over: ask at once"
    waited(session, 180.1)
    assert refused_route(session, 180.1) == [WaitForCluster(3, 1.0)]


@pytest.mark.parametrize(
    "refusal",
    [ContextLengthError("too long"), NoPrefillError("the policy"), OverloadedError("busy"), ModelNotFoundError("what")],
)
def test_r4_before_the_first_token_only_a_missing_node_is_waited_for(refusal: BatonError) -> None:
    session = new_session()
    session.handle(Prepared(101.0))
    assert refused_route(session, 102.0, refusal) == [Fail(refusal)]


def test_r4_when_all_nodes_are_full_that_is_the_answer_at_once() -> None:
    session = running()
    full = OverloadedError("queue full", retry_after_s=3.0)
    session.handle(AttemptFailed(103.0, 1, full))
    assert refused_route(session, 104.0) == [Fail(full)]


def test_r4_no_wait_goes_past_the_deadline() -> None:
    session = running()
    session.handle(TokensArrived(103.0, 1, Tokens([5])))
    session.handle(AttemptFailed(199.0, 1, PeerLostError("gone")))
    assert refused_route(session, 199.5) == [WaitForCluster(2, 0.5)]
    assert isinstance(error_of([*waited(session, 200.0)]), DeadlineError)


def test_r5_when_patience_ends_the_failure_that_came_first_is_shown() -> None:
    session = running()
    lost = PeerLostError("gone")
    session.handle(AttemptFailed(103.0, 1, lost))
    refused_route(session, 104.0)
    waited(session, 109.0)
    assert refused_route(session, 109.0) == [Fail(lost)]


def test_r5_another_refusal_speaks_for_itself() -> None:
    session = running()
    session.handle(AttemptFailed(103.0, 1, PeerLostError("gone")))
    busy = OverloadedError("predicted to be late", retry_after_s=2.0)
    assert refused_route(session, 104.0, busy) == [Fail(busy)]


def test_r6_an_exclusion_lasts_until_the_request_has_waited_and_some_seconds_are_over() -> None:
    session = running()
    session.handle(AttemptFailed(103.0, 1, PeerLostError("gone")))
    assert refused_route(session, 103.5) == [WaitForCluster(2, 1.0)]
    assert waited(session, 104.5) == [AskRoute(2, Route("m", 3, (D1.incarnation,)))]
    assert refused_route(session, 104.5) == [WaitForCluster(2, 0.5)], "until the exclusion ends"
    assert waited(session, 105.0) == [AskRoute(2, Route("m", 3))]


def test_r6_without_a_wait_a_node_stays_excluded() -> None:
    session = running(max_attempts=4)
    session.handle(AttemptFailed(103.0, 1, PeerLostError("gone")))
    session.handle(RouteArrived(104.0, 2, Routed(D2), "digest"))
    (ask,) = session.handle(AttemptFailed(150.0, 2, PeerLostError("gone")))
    assert isinstance(ask, AskRoute)
    assert ask.body.exclude == (D1.incarnation, D2.incarnation)

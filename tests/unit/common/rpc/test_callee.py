"""The callee's side of a link, rule by rule (numbers from `common/rpc/call.py`)."""

from math import inf, nan

import pytest

from common.errors import ErrorCode
from common.messages import (
    WIRE_VERSION,
    Accept,
    Beat,
    CallerFrame,
    CallId,
    Cancel,
    End,
    Hello,
    Incarnation,
    ItemFrame,
    NodeId,
    NodeLoad,
    Open,
    Refuse,
    Report,
    Route,
    Send,
    View,
    Watch,
    Welcome,
    WireError,
)
from common.rpc.call import CallStatus, Closing, Drop, Finish, LinkBroke, LinkStatus, LinkTimes, Ticked
from common.rpc.callee import (
    CalleeCommand,
    CalleeEvent,
    CalleeLink,
    DeliverBody,
    FromCaller,
    HandlerEnded,
    ItemYielded,
    Start,
    Stop,
)

ME, OTHER = Incarnation("me"), Incarnation("other")
ONE, TWO = CallId(1), CallId(2)
HELLO = Hello(WIRE_VERSION, NodeId("caller"), OTHER)
BODY = Report(NodeLoad())


class Callee:
    """A callee's link whose invariants are checked after every step."""

    def __init__(self) -> None:
        self.link = CalleeLink(node=NodeId("callee"), incarnation=ME, times=LinkTimes(), methods={Watch})

    def do(self, event: CalleeEvent) -> list[CalleeCommand]:
        commands = self.link.handle(event)
        self.link.check_invariants()
        return commands

    def hears(self, *frames: CallerFrame, at: float = 0.0) -> list[CalleeCommand]:
        return self.do(FromCaller(at, list(frames)))

    def ticks(self, until: float) -> list[CalleeCommand]:
        """Tick at every due time up to `until`; all commands but Beats."""
        commands: list[CalleeCommand] = []
        while self.link.due_s <= until:
            commands += self.do(Ticked(self.link.due_s))
        return [command for command in commands if not isinstance(command, Beat)]

    def handler_ends(
        self, call: CallId = ONE, *, error: WireError | None = None, at: float = 0.0
    ) -> list[CalleeCommand]:
        return self.do(HandlerEnded(at, call, error))


def greeted() -> Callee:
    callee = Callee()
    callee.hears(HELLO)
    return callee


def in_call(*, timeout_s: float | None = None) -> Callee:
    callee = greeted()
    callee.hears(Open(ONE, Watch(), timeout_s))
    return callee


def ends(commands: list[CalleeCommand]) -> list[tuple[CallId, CallStatus, ErrorCode | None]]:
    return [(c.call, c.status, c.error and c.error.code) for c in commands if isinstance(c, Finish)]


def end_frames(commands: list[CalleeCommand]) -> list[tuple[CallId, int, ErrorCode | None]]:
    return [(c.call, c.seq, c.error and c.error.code) for c in commands if isinstance(c, End)]


def test_rule_1_a_hello_is_welcomed_once() -> None:
    callee = Callee()
    assert callee.hears(HELLO) == [Welcome(NodeId("callee"), ME)]
    assert callee.hears(HELLO) == []
    assert callee.link.caller == "caller"


@pytest.mark.parametrize(
    ("hello", "code"),
    [
        (Hello(WIRE_VERSION + 1, NodeId("caller"), OTHER), ErrorCode.INCOMPATIBLE),
        (Hello(WIRE_VERSION, NodeId("caller"), OTHER, Incarnation("gone")), ErrorCode.PEER_LOST),
    ],
    ids=["another wire version", "meant for another incarnation"],
)
def test_rule_1_a_hello_that_does_not_fit_is_refused(hello: Hello, code: ErrorCode) -> None:
    callee = Callee()
    refuse, drop = callee.hears(hello, Open(ONE, Watch()))
    assert isinstance(refuse, Refuse)
    assert refuse.error.code is code
    assert isinstance(drop, Drop)


def test_rule_1_a_link_that_does_not_start_with_hello_is_dropped() -> None:
    assert isinstance(Callee().hears(Open(ONE, Watch()))[-1], Drop)


def test_rule_2_a_cancel_that_comes_first_leaves_a_tombstone() -> None:
    callee = greeted()
    assert callee.hears(Cancel(ONE)) == []
    assert callee.hears(Open(ONE, Watch())) == []
    assert callee.hears(Open(TWO, Watch()))[0] == Accept(TWO)


def test_rule_2_an_open_that_comes_twice_starts_one_handler() -> None:
    callee = in_call()
    assert callee.hears(Open(ONE, Watch())) == []
    callee.handler_ends()
    assert callee.hears(Open(ONE, Watch())) == []


def test_rule_3_an_open_is_accepted_and_starts_its_handler() -> None:
    callee = greeted()
    assert callee.hears(Open(ONE, Watch())) == [Accept(ONE), Start(ONE, Watch(), inf)]


def test_a_request_without_a_handler_is_refused_alone() -> None:
    callee = in_call()
    assert end_frames(callee.hears(Open(TWO, Route("model", 1)))) == [(TWO, 0, ErrorCode.INCOMPATIBLE)]
    assert list(callee.link.calls) == [ONE]


def test_rule_4_items_are_numbered_from_zero() -> None:
    callee = in_call()
    assert callee.do(ItemYielded(ONE, View())) == [ItemFrame(ONE, 0, View())]
    assert callee.do(ItemYielded(ONE, View())) == [ItemFrame(ONE, 1, View())]
    assert callee.do(ItemYielded(TWO, View())) == []


def test_rule_4_bodies_are_delivered_in_order_and_repeats_are_dropped() -> None:
    callee = in_call()
    commands = callee.hears(Send(ONE, 0, BODY), Send(ONE, 0, BODY), Send(ONE, 1, BODY))
    assert commands == [DeliverBody(ONE, BODY), DeliverBody(ONE, BODY)]


def test_rule_4_a_hole_in_the_bodies_stops_the_handler_and_fails_the_call() -> None:
    callee = in_call()
    assert callee.hears(Send(ONE, 1, BODY)) == [Stop(ONE)]
    commands = callee.handler_ends()
    assert ends(commands) == [(ONE, CallStatus.FAILED, ErrorCode.PEER_LOST)]
    assert end_frames(commands) == [(ONE, 0, ErrorCode.PEER_LOST)]


def test_rule_5_end_carries_the_number_of_items() -> None:
    callee = in_call()
    callee.do(ItemYielded(ONE, View()))
    commands = callee.handler_ends()
    assert ends(commands) == [(ONE, CallStatus.FINISHED, None)]
    assert end_frames(commands) == [(ONE, 1, None)]


def test_rule_5_the_handlers_error_travels_in_the_end() -> None:
    callee = in_call()
    commands = callee.handler_ends(error=WireError(ErrorCode.OVERLOADED, "full", 1.0))
    assert ends(commands) == [(ONE, CallStatus.FAILED, ErrorCode.OVERLOADED)]
    assert commands[-1] == End(ONE, 0, WireError(ErrorCode.OVERLOADED, "full", 1.0))


def test_rule_6_a_cancelled_call_ends_when_its_handler_has_ended() -> None:
    callee = in_call()
    assert callee.hears(Cancel(ONE)) == [Stop(ONE)]
    assert callee.hears(Cancel(ONE)) == []
    assert callee.do(ItemYielded(ONE, View())) == []
    assert list(callee.link.calls) == [ONE]
    assert ends(callee.handler_ends()) == [(ONE, CallStatus.CANCELLED, ErrorCode.CANCELLED)]


def test_rule_7_a_deadline_is_a_due_time_and_stops_the_handler() -> None:
    callee = in_call(timeout_s=0.3)
    assert callee.link.due_s == 0.3
    assert callee.ticks(0.3) == [Stop(ONE)]
    commands = callee.handler_ends(at=0.4)
    assert ends(commands) == [(ONE, CallStatus.EXPIRED, ErrorCode.DEADLINE)]
    assert end_frames(commands) == [(ONE, 0, ErrorCode.DEADLINE)]


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, nan])
def test_rule_7_an_open_that_comes_after_its_deadline_starts_nothing(timeout_s: float) -> None:
    callee = greeted()
    assert end_frames(callee.hears(Open(ONE, Watch(), timeout_s))) == [(ONE, 0, ErrorCode.DEADLINE)]
    assert not callee.link.calls


def test_rule_8_beats_list_open_calls_with_the_number_of_items() -> None:
    callee = in_call()
    callee.hears(Open(TWO, Watch()))
    callee.do(ItemYielded(TWO, View()))
    assert callee.do(Ticked(0.5)) == [Beat({ONE: 0, TWO: 1})]
    callee.hears(Cancel(ONE))
    assert callee.do(Ticked(1.0)) == [Beat({TWO: 1})]


def test_rule_8_a_call_stopped_on_this_side_is_listed_until_its_end_was_sent() -> None:
    callee = in_call(timeout_s=0.2)
    callee.ticks(0.2)
    assert callee.do(Ticked(0.5)) == [Beat({ONE: 0})]


def test_rule_8_a_call_that_the_caller_no_longer_lists_is_stopped() -> None:
    callee = in_call()
    assert callee.hears(Beat()) == [Stop(ONE)]
    assert ends(callee.handler_ends()) == [(ONE, CallStatus.CANCELLED, ErrorCode.CANCELLED)]


def test_rule_8_a_missing_tail_of_bodies_fails_the_call() -> None:
    callee = in_call()
    assert callee.hears(Beat({ONE: 1})) == [Stop(ONE)]
    assert ends(callee.handler_ends()) == [(ONE, CallStatus.FAILED, ErrorCode.PEER_LOST)]


def test_rule_8_a_listed_call_whose_open_never_came_is_ended_at_once() -> None:
    callee = greeted()
    assert end_frames(callee.hears(Beat({ONE: 0}))) == [(ONE, 0, ErrorCode.PEER_LOST)]
    assert callee.hears(Open(ONE, Watch())) == []


def test_rule_8_a_listed_call_that_has_just_ended_is_no_news() -> None:
    callee = in_call()
    callee.handler_ends()
    assert callee.hears(Beat({ONE: 0})) == []


def test_rule_9_a_silent_caller_is_lost_and_told_so() -> None:
    callee = in_call()
    assert callee.ticks(3.5) == []
    stop, refuse, drop = callee.ticks(4.0)
    assert stop == Stop(ONE)
    assert isinstance(refuse, Refuse)
    assert isinstance(drop, Drop)


def test_rule_10_after_a_pause_of_our_own_the_caller_gets_a_fresh_interval() -> None:
    callee = in_call()
    assert callee.ticks(0.5) == []
    assert [c for c in callee.do(Ticked(60.0)) if not isinstance(c, Beat)] == []
    assert callee.ticks(63.9) == []
    assert callee.ticks(64.0)[0] == Stop(ONE)


def test_rule_11_a_lost_call_counts_until_its_handler_has_ended_and_sends_nothing() -> None:
    callee = in_call()
    callee.do(LinkBroke(1.0, "connection lost"))
    assert list(callee.link.calls) == [ONE]
    assert callee.do(ItemYielded(ONE, View())) == []
    commands = callee.handler_ends(at=2.0)
    assert ends(commands) == [(ONE, CallStatus.LOST, ErrorCode.PEER_LOST)]
    assert end_frames(commands) == []
    assert callee.hears(HELLO, Open(TWO, Watch())) == []


def test_rule_12_closing_stops_handlers_refuses_opens_and_drops_after_the_last_end() -> None:
    callee = in_call()
    assert callee.do(Closing(1.0)) == [Stop(ONE)]
    assert end_frames(callee.hears(Open(TWO, Watch()))) == [(TWO, 0, ErrorCode.UNAVAILABLE)]
    finish, end, refuse, drop = callee.handler_ends()
    assert ends([finish]) == [(ONE, CallStatus.CANCELLED, ErrorCode.UNAVAILABLE)]
    assert end_frames([end]) == [(ONE, 0, ErrorCode.UNAVAILABLE)]
    assert isinstance(refuse, Refuse)
    assert isinstance(drop, Drop)


def test_rule_12_closing_an_idle_link_drops_it_at_once() -> None:
    callee = greeted()
    assert isinstance(callee.do(Closing(1.0))[-1], Drop)
    assert callee.link.status is LinkStatus.CLOSED


def test_rule_13_the_first_cause_wins() -> None:
    callee = in_call(timeout_s=0.2)
    callee.hears(Cancel(ONE))
    assert callee.ticks(0.4) == []
    callee.do(LinkBroke(0.4, "connection lost"))
    assert ends(callee.handler_ends(error=WireError(ErrorCode.INTERNAL, "while stopping"))) == [
        (ONE, CallStatus.CANCELLED, ErrorCode.CANCELLED)
    ]

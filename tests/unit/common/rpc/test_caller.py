"""The caller's side of a link, rule by rule (numbers from `common/rpc/call.py`)."""

import pytest

from common.errors import ErrorCode, InvalidTransition
from common.messages import (
    WIRE_VERSION,
    Accept,
    Beat,
    CalleeFrame,
    CallId,
    Cancel,
    End,
    Hello,
    Incarnation,
    ItemFrame,
    NodeId,
    Open,
    Refuse,
    Report,
    Send,
    View,
    Watch,
    Welcome,
    WireError,
)
from common.messages import NodeLoad as Load
from common.rpc.call import CallStatus, Closing, Drop, Finish, LinkBroke, LinkStatus, LinkTimes, Ticked
from common.rpc.caller import (
    BodySent,
    CallerCommand,
    CallerEvent,
    CallerLink,
    CallLeft,
    CallOpened,
    DeliverItem,
    Dialled,
    Enter,
    FromCallee,
)

ME, PEER, OTHER = Incarnation("me"), Incarnation("peer"), Incarnation("other")
ONE, TWO = CallId(1), CallId(2)
ITEM = View()
WELCOME = Welcome(NodeId("callee"), PEER)


class Caller:
    """A caller's link whose invariants are checked after every step."""

    def __init__(self, *, to: Incarnation | None = None) -> None:
        self.link = CallerLink(node=NodeId("caller"), incarnation=ME, to=to, times=LinkTimes())
        self.hello = self.do(Dialled(0.0))

    def do(self, event: CallerEvent) -> list[CallerCommand]:
        commands = self.link.handle(event)
        self.link.check_invariants()
        return commands

    def hears(self, *frames: CalleeFrame, at: float = 0.0) -> list[CallerCommand]:
        return self.do(FromCallee(at, list(frames)))

    def opens(self, call: CallId = ONE, *, at: float = 0.0, timeout_s: float | None = None) -> list[CallerCommand]:
        return self.do(CallOpened(at, call, Watch(), timeout_s))

    def ticks(self, until: float) -> list[CallerCommand]:
        """Tick at every due time up to `until`; all commands but Beats."""
        commands: list[CallerCommand] = []
        while self.link.due_s <= until:
            commands += self.do(Ticked(self.link.due_s))
        return [command for command in commands if not isinstance(command, Beat)]


def welcomed() -> Caller:
    caller = Caller()
    caller.hears(WELCOME)
    return caller


def in_call(*, timeout_s: float | None = None) -> Caller:
    caller = welcomed()
    caller.opens(timeout_s=timeout_s)
    caller.hears(Accept(ONE))
    return caller


def ends(commands: list[CallerCommand]) -> list[tuple[CallId, CallStatus, ErrorCode | None]]:
    return [(c.call, c.status, c.error and c.error.code) for c in commands if isinstance(c, Finish)]


def test_rule_1_hello_is_first_and_opens_wait_for_the_welcome() -> None:
    caller = Caller(to=PEER)
    assert caller.hello == [Hello(WIRE_VERSION, NodeId("caller"), ME, PEER)]
    assert caller.opens() == []
    assert caller.hears(WELCOME) == [Open(ONE, Watch(), None)]
    assert caller.link.peer == PEER


def test_rule_1_another_incarnation_than_the_one_meant_loses_the_link() -> None:
    caller = Caller(to=OTHER)
    caller.opens()
    commands = caller.hears(WELCOME)
    assert ends(commands) == [(ONE, CallStatus.LOST, ErrorCode.PEER_LOST)]
    assert isinstance(commands[-1], Drop)


def test_rule_1_a_refusal_reaches_every_call_with_its_reason() -> None:
    caller = Caller()
    caller.opens(ONE)
    caller.opens(TWO)
    error = WireError(ErrorCode.INCOMPATIBLE, "speaks version 7")
    commands = caller.hears(Refuse(error))
    assert ends(commands) == [(call, CallStatus.LOST, ErrorCode.INCOMPATIBLE) for call in (ONE, TWO)]
    assert commands[-1] == Drop(error)


def test_rule_1_no_welcome_in_time_loses_the_link() -> None:
    caller = Caller()
    caller.opens()
    assert caller.ticks(2.9) == []
    assert ends(caller.ticks(3.0)) == [(ONE, CallStatus.LOST, ErrorCode.PEER_LOST)]
    assert caller.link.status is LinkStatus.CLOSED


def test_rule_3_an_accepted_call_lets_its_owner_in_once() -> None:
    caller = welcomed()
    caller.opens()
    assert caller.hears(Accept(ONE)) == [Enter(ONE)]
    assert caller.hears(Accept(ONE)) == []


def test_rule_3_an_open_that_is_never_accepted_fails_and_is_cancelled() -> None:
    caller = welcomed()
    caller.opens()
    for at in range(1, 5):
        caller.hears(Beat(), at=float(at))
        assert caller.ticks(float(at)) == []
    commands = caller.ticks(5.0)
    assert ends(commands) == [(ONE, CallStatus.FAILED, ErrorCode.PEER_LOST)]
    assert commands[-1] == Cancel(ONE)


@pytest.mark.parametrize("frame", [ItemFrame(ONE, 0, ITEM), End(ONE, 0), Beat({ONE: 0})])
def test_rule_3_what_follows_an_accept_that_never_came_fails_the_call(frame: CalleeFrame) -> None:
    caller = welcomed()
    caller.opens()
    assert ends(caller.hears(frame)) == [(ONE, CallStatus.FAILED, ErrorCode.PEER_LOST)]


def test_rule_3_a_call_can_be_refused_without_an_accept() -> None:
    caller = welcomed()
    caller.opens()
    error = WireError(ErrorCode.INCOMPATIBLE, "serves no Watch")
    assert ends(caller.hears(End(ONE, 0, error))) == [(ONE, CallStatus.FAILED, ErrorCode.INCOMPATIBLE)]


def test_rule_4_items_are_delivered_in_order_and_repeats_are_dropped() -> None:
    caller = in_call()
    assert caller.hears(ItemFrame(ONE, 0, ITEM), ItemFrame(ONE, 0, ITEM), ItemFrame(ONE, 1, ITEM)) == [
        DeliverItem(ONE, ITEM),
        DeliverItem(ONE, ITEM),
    ]


def test_rule_4_a_hole_fails_the_call_and_tells_the_callee() -> None:
    caller = in_call()
    commands = caller.hears(ItemFrame(ONE, 1, ITEM))
    assert ends(commands) == [(ONE, CallStatus.FAILED, ErrorCode.PEER_LOST)]
    assert commands[-1] == Cancel(ONE)


def test_rule_4_sends_are_numbered_from_zero() -> None:
    caller = in_call()
    body = Report(Load())
    assert caller.do(BodySent(ONE, body)) == [Send(ONE, 0, body)]
    assert caller.do(BodySent(ONE, body)) == [Send(ONE, 1, body)]


def test_rule_5_an_end_with_the_right_count_finishes_the_call() -> None:
    caller = in_call()
    commands = caller.hears(ItemFrame(ONE, 0, ITEM), End(ONE, 1))
    assert ends(commands) == [(ONE, CallStatus.FINISHED, None)]


def test_rule_5_a_short_count_fails_the_call() -> None:
    caller = in_call()
    commands = caller.hears(ItemFrame(ONE, 0, ITEM), End(ONE, 2))
    assert ends(commands) == [(ONE, CallStatus.FAILED, ErrorCode.PEER_LOST)]


def test_rule_5_the_error_of_the_far_side_arrives_as_it_is() -> None:
    caller = in_call()
    error = WireError(ErrorCode.OVERLOADED, "full", 0.5)
    [finish] = [c for c in caller.hears(End(ONE, 0, error)) if isinstance(c, Finish)]
    assert (finish.status, finish.error) == (CallStatus.FAILED, error)


def test_rule_6_leaving_ends_the_call_at_once_and_late_frames_are_dropped() -> None:
    caller = in_call()
    commands = caller.do(CallLeft(1.0, ONE))
    assert ends(commands) == [(ONE, CallStatus.CANCELLED, ErrorCode.CANCELLED)]
    assert commands[-1] == Cancel(ONE)
    assert caller.hears(ItemFrame(ONE, 0, ITEM), Accept(ONE), End(ONE, 1)) == []
    assert caller.do(CallLeft(1.0, ONE)) == []
    assert caller.do(BodySent(ONE, Report(Load()))) == []


def test_rule_6_a_call_left_before_the_welcome_is_never_opened() -> None:
    caller = Caller()
    caller.opens()
    assert Cancel(ONE) not in caller.do(CallLeft(0.0, ONE))
    assert caller.hears(WELCOME) == []


def test_rule_7_the_open_carries_what_is_left_of_the_deadline() -> None:
    caller = Caller()
    caller.opens(timeout_s=2.0)
    assert caller.hears(WELCOME, at=0.5) == [Open(ONE, Watch(), 1.5)]


def test_rule_7_a_deadline_is_a_due_time_and_ends_the_call() -> None:
    caller = in_call(timeout_s=0.3)
    assert caller.link.due_s == 0.3
    commands = caller.ticks(0.3)
    assert ends(commands) == [(ONE, CallStatus.EXPIRED, ErrorCode.DEADLINE)]
    assert commands[-1] == Cancel(ONE)


def test_rule_7_a_deadline_found_by_the_callee_is_the_same_end() -> None:
    caller = in_call(timeout_s=1.0)
    late = WireError(ErrorCode.DEADLINE, "the deadline passed")
    assert ends(caller.hears(End(ONE, 0, late))) == [(ONE, CallStatus.EXPIRED, ErrorCode.DEADLINE)]


def test_rule_8_beats_list_open_calls_with_the_number_of_sends() -> None:
    caller = in_call()
    caller.opens(TWO)
    caller.do(BodySent(ONE, Report(Load())))
    assert caller.link.due_s == 0.5
    assert caller.do(Ticked(0.5)) == [Beat({ONE: 1, TWO: 0})]
    assert caller.do(Ticked(0.6)) == []
    assert caller.do(Ticked(1.0)) == [Beat({ONE: 1, TWO: 0})]


@pytest.mark.parametrize("listed", [{}, {ONE: 1}], ids=["the callee lost the call", "a tail is missing"])
def test_rule_8_a_beat_that_disagrees_ends_the_call(listed: dict[CallId, int]) -> None:
    caller = in_call()
    assert ends(caller.hears(Beat(listed))) == [(ONE, CallStatus.FAILED, ErrorCode.PEER_LOST)]


def test_rule_8_a_beat_from_before_the_open_arrived_harms_no_call() -> None:
    caller = welcomed()
    caller.opens()
    assert caller.hears(Beat()) == []
    assert caller.hears(Accept(ONE), Beat({ONE: 0})) == [Enter(ONE)]


def test_rule_8_a_call_that_only_the_callee_knows_is_cancelled_again() -> None:
    caller = in_call()
    caller.do(CallLeft(0.0, ONE))
    assert caller.hears(Beat({ONE: 3})) == [Cancel(ONE)]
    assert caller.hears(Beat({CallId(99): 0})) == []  # never ours: a Cancel would bury ids to come


def test_rule_9_a_silent_peer_is_lost_with_every_call() -> None:
    caller = in_call()
    caller.opens(TWO)
    caller.hears(Beat({ONE: 0}), at=1.0)
    assert caller.ticks(4.5) == []
    commands = caller.ticks(5.0)
    assert ends(commands) == [(call, CallStatus.LOST, ErrorCode.PEER_LOST) for call in (ONE, TWO)]
    assert Cancel(ONE) not in commands


def test_rule_9_a_lost_link_stays_lost() -> None:
    caller = in_call()
    caller.do(LinkBroke(0.0, "connection lost"))
    assert caller.hears(WELCOME, Accept(ONE), ItemFrame(ONE, 0, ITEM)) == []
    assert caller.do(LinkBroke(0.0, "again")) == []
    assert caller.do(Ticked(9.0)) == []
    assert caller.link.due_s == float("inf")


def test_rule_10_after_a_pause_of_our_own_the_peer_gets_a_fresh_interval() -> None:
    caller = in_call()
    caller.opens(TWO)
    assert ends(caller.do(Ticked(60.0))) == []
    assert ends(caller.ticks(63.9)) == []
    assert ends(caller.ticks(64.0)) == [(call, CallStatus.LOST, ErrorCode.PEER_LOST) for call in (ONE, TWO)]


def test_rule_10_a_pause_while_connecting_restarts_the_wait_for_the_welcome() -> None:
    caller = Caller()
    caller.opens()
    assert caller.do(Ticked(60.0)) == []
    assert caller.hears(WELCOME, at=60.1) == [Open(ONE, Watch(), None)]


def test_rule_10_deadlines_go_on_through_a_pause() -> None:
    caller = in_call(timeout_s=10.0)
    assert ends(caller.do(Ticked(60.0))) == [(ONE, CallStatus.EXPIRED, ErrorCode.DEADLINE)]


def test_rule_12_closing_leaves_every_call_and_drops_the_link() -> None:
    caller = in_call()
    commands = caller.do(Closing(1.0))
    assert ends(commands) == [(ONE, CallStatus.CANCELLED, ErrorCode.CANCELLED)]
    assert Cancel(ONE) in commands
    assert isinstance(commands[-1], Drop)


def test_rule_13_the_history_names_every_status_once_and_a_second_end_is_a_bug() -> None:
    caller = in_call()
    call = caller.link.calls[ONE]
    [finish] = [c for c in caller.hears(End(ONE, 0), at=2.0) if isinstance(c, Finish)]
    assert [(moved.at_s, moved.status) for moved in finish.history] == [
        (0.0, CallStatus.OPENING),
        (0.0, CallStatus.OPEN),
        (2.0, CallStatus.FINISHED),
    ]
    with pytest.raises(InvalidTransition, match="finished -> lost"):
        caller.link._move(call, CallStatus.LOST, now_s=3.0)


def test_items_leave_no_history() -> None:
    caller = in_call()
    caller.hears(*(ItemFrame(ONE, seq, ITEM) for seq in range(100)))
    assert len(caller.link.calls[ONE].history) == 2

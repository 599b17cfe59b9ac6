"""The callee's side of one link (rules in `call`)."""

from collections.abc import Container
from dataclasses import dataclass
from math import inf
from typing import ClassVar, NamedTuple, assert_never

from common.errors import ErrorCode
from common.messages import (
    WIRE_VERSION,
    Accept,
    Beat,
    CalleeFrame,
    CallerFrame,
    CallId,
    Cancel,
    End,
    Hello,
    Incarnation,
    ItemBody,
    ItemFrame,
    NodeId,
    Open,
    Refuse,
    RequestBody,
    Send,
    SentBody,
    Welcome,
    WireError,
)
from common.rpc.call import (
    CALLEE_MOVES,
    Call,
    CallStatus,
    Closing,
    Command,
    Drop,
    Event,
    Finish,
    Link,
    LinkBroke,
    LinkStatus,
    Moved,
    Moves,
    Ticked,
    lost_frames,
)

_OPEN, _STOPPING = CallStatus.OPEN, CallStatus.STOPPING  # an enum's attribute costs more than a global
_NO_CALL, _NOBODY, _NO_PROCESS = CallId(0), NodeId(""), Incarnation("")


class ItemYielded(Event, frozen=True):
    """The handler has an item for its caller."""

    call: CallId
    item: ItemBody


class HandlerEnded(Event, frozen=True):
    """The handler has returned or raised (`error`), and what it held is free."""

    now_s: float
    call: CallId
    error: WireError | None = None


class FromCaller(Event, frozen=True):
    """One wire message came."""

    now_s: float
    frames: list[CallerFrame]


CalleeEvent = ItemYielded | HandlerEnded | FromCaller | Ticked | LinkBroke | Closing


class Start(Command, frozen=True):
    """Run the handler of this request; `HandlerEnded` must follow, once. `deadline_s` is infinite for none."""

    call: CallId
    body: RequestBody
    deadline_s: float


class Stop(Command, frozen=True):
    """Cancel the handler."""

    call: CallId


class DeliverBody(Command, frozen=True, gc=False):
    call: CallId
    body: SentBody


CalleeCommand = CalleeFrame | Start | Stop | DeliverBody | Finish | Drop


class Cause(NamedTuple):
    """Why a handler is being stopped: how its call will end."""

    status: CallStatus
    error: WireError


@dataclass(slots=True, eq=False, kw_only=True)
class CalleeCall(Call):
    """`cause` is set while STOPPING. `left`: the caller no longer knows the call, so Beats do not list it."""

    cause: Cause | None = None
    left: bool = False


@dataclass(eq=False, kw_only=True)
class CalleeLink(Link[CalleeCall]):
    """`methods` are the request types that have a handler; `caller` and `peer` are who calls, once it said Hello."""

    MOVES: ClassVar[Moves] = CALLEE_MOVES

    node: NodeId
    incarnation: Incarnation
    methods: Container[type]
    caller: NodeId = _NOBODY
    peer: Incarnation = _NO_PROCESS
    closing: bool = False
    highest_id: CallId = _NO_CALL

    def handle(self, event: CalleeEvent) -> list[CalleeCommand]:
        out: list[CalleeCommand] = []
        match event:
            case ItemYielded():
                call = self.calls.get(event.call)
                if call is not None and call.status is _OPEN:
                    out.append(ItemFrame(event.call, call.num_sent, event.item))
                    call.num_sent += 1
            case FromCaller():
                self._came(event, out)
            case HandlerEnded():
                self._handler_ended(event, out)
            case Ticked():
                self._tick(event.now_s, out)
            case LinkBroke():
                self._lose(lost_frames(event.why), event.now_s, out)
            case Closing():
                self.closing = True
                for call in self.calls.values():
                    self._stop(call, CallStatus.CANCELLED, self._closing_error, event.now_s, out)
                self._drop_if_closed(out)
            case _:
                assert_never(event)
        return out

    # --- what the caller says -----------------------------------------------------------------------------

    def _came(self, event: FromCaller, out: list[CalleeCommand]) -> None:
        now_s = event.now_s
        self._heard_s = now_s
        for frame in event.frames:
            if self.status is LinkStatus.CLOSED:
                return
            if isinstance(frame, Hello):
                self._greeted(frame, now_s, out)
                continue
            if self.status is LinkStatus.NEW:
                self._lose(lost_frames("the first frame was not Hello"), now_s, out)
                return
            match frame:
                case Send():
                    call = self.calls.get(frame.call)
                    if call is None or call.status is not _OPEN or frame.seq < call.num_received:
                        continue  # late news of a call that has ended, or a repeat (rules 4 and 6)
                    if frame.seq == call.num_received:
                        call.num_received += 1
                        out.append(DeliverBody(frame.call, frame.body))
                    else:
                        why = lost_frames(f"send {frame.seq} came, {call.num_received} were expected")
                        self._stop(call, CallStatus.FAILED, why, now_s, out)
                case Open():
                    self._open(frame, now_s, out)
                case Cancel():
                    call = self.calls.get(frame.call)
                    if call is None:
                        self.highest_id = max(self.highest_id, frame.call)  # the tombstone (rule 2)
                    else:
                        self._left(call, "cancelled by the caller", now_s, out)
                case Beat():
                    self._compare(frame, now_s, out)
                case _:
                    assert_never(frame)

    def _greeted(self, hello: Hello, now_s: float, out: list[CalleeCommand]) -> None:
        if self.status is not LinkStatus.NEW:
            return
        if hello.version != WIRE_VERSION:
            why = f"{self.node} speaks wire version {WIRE_VERSION}, {hello.node} speaks {hello.version}"
            self._lose(WireError(ErrorCode.INCOMPATIBLE, why), now_s, out)
        elif hello.to is not None and hello.to != self.incarnation:
            self._lose(lost_frames(f"{self.node} is another incarnation than the one meant"), now_s, out)
        else:
            self.caller, self.peer = hello.node, hello.incarnation
            self._started(now_s)
            self._opened(now_s)
            out.append(Welcome(self.node, self.incarnation))

    def _open(self, frame: Open, now_s: float, out: list[CalleeCommand]) -> None:
        if frame.call <= self.highest_id:
            return  # a repeat, or its tombstone was here first (rule 2)
        self.highest_id = frame.call
        if self.closing:
            out.append(End(frame.call, 0, self._closing_error))
        elif type(frame.body) not in self.methods:
            self._refuse(frame.call, ErrorCode.INCOMPATIBLE, f"{self.node} serves no {type(frame.body).__name__}", out)
        elif frame.timeout_s is not None and not frame.timeout_s > 0.0:  # catches NaN too
            self._refuse(frame.call, ErrorCode.DEADLINE, "the deadline passed before the call arrived", out)
        else:
            call = CalleeCall(id=frame.call, status=_OPEN, history=[Moved(now_s, _OPEN, "")])
            if frame.timeout_s is not None:
                call.deadline_s = now_s + frame.timeout_s
                self._call_due_s = min(self._call_due_s, call.deadline_s)
            self.calls[call.id] = call
            out += (Accept(call.id), Start(call.id, frame.body, call.deadline_s))

    def _refuse(self, call_id: CallId, code: ErrorCode, why: str, out: list[CalleeCommand]) -> None:
        """End a call that never was one here."""
        out.append(End(call_id, 0, WireError(code, why)))

    def _compare(self, beat: Beat, now_s: float, out: list[CalleeCommand]) -> None:
        for call in self.calls.values():
            num_sent = beat.calls.get(call.id)
            if num_sent is None:
                self._left(call, "the caller no longer knows the call", now_s, out)
            elif num_sent > call.num_received:
                why = lost_frames(f"{num_sent} bodies were sent, {call.num_received} came")
                self._stop(call, CallStatus.FAILED, why, now_s, out)
        for call_id in beat.calls:
            if call_id > self.highest_id:  # links keep order: its Open can only come too late
                self.highest_id = call_id
                self._refuse(call_id, ErrorCode.PEER_LOST, "the Open never came", out)

    # --- ends ---------------------------------------------------------------------------------------------

    def _left(self, call: CalleeCall, why: str, now_s: float, out: list[CalleeCommand]) -> None:
        call.left = True
        self._stop(call, CallStatus.CANCELLED, WireError(ErrorCode.CANCELLED, why), now_s, out)

    def _stop(
        self, call: CalleeCall, status: CallStatus, error: WireError, now_s: float, out: list[CalleeCommand]
    ) -> None:
        if call.status is _STOPPING:
            return  # the first cause wins (rule 13)
        self._move(call, _STOPPING, now_s=now_s, why=error.message)
        call.cause = Cause(status, error)
        out.append(Stop(call.id))

    def _handler_ended(self, event: HandlerEnded, out: list[CalleeCommand]) -> None:
        call = self.calls[event.call]
        status, error = (CallStatus.FINISHED if event.error is None else CallStatus.FAILED), event.error
        if call.cause is not None:
            status, error = call.cause
        out.append(self._finish(call, status, error, now_s=event.now_s))
        if self.status is not LinkStatus.CLOSED:
            out.append(End(call.id, call.num_sent, error))
        self._drop_if_closed(out)

    def _drop_if_closed(self, out: list[CalleeCommand]) -> None:
        if self.closing and not self.calls and self.status is not LinkStatus.CLOSED:
            self.status = LinkStatus.CLOSED
            out += (Refuse(self._closing_error), Drop(self._closing_error))

    @property
    def _closing_error(self) -> WireError:
        return WireError(ErrorCode.UNAVAILABLE, f"{self.node} is closing")

    def _lose(self, error: WireError, now_s: float, out: list[CalleeCommand]) -> None:
        if self.status is LinkStatus.CLOSED:
            return
        self.status = LinkStatus.CLOSED
        for call in self.calls.values():
            self._stop(call, CallStatus.LOST, error, now_s, out)
        out.append(Refuse(error))  # a peer that only slept learns that its link is gone
        out.append(Drop(error))

    # --- time ---------------------------------------------------------------------------------------------

    def _tick(self, now_s: float, out: list[CalleeCommand]) -> None:
        if self.status is LinkStatus.CLOSED:
            return
        self._was_stalled(now_s)
        if now_s - self._heard_s >= self.times.lost_after_s:
            self._lose(lost_frames(f"nothing heard for {self.times.lost_after_s} s"), now_s, out)
            return
        self._call_due_s = inf
        for call in self.calls.values():
            if call.status is _STOPPING:
                continue
            if now_s >= call.deadline_s:
                why = WireError(ErrorCode.DEADLINE, "the deadline passed")
                self._stop(call, CallStatus.EXPIRED, why, now_s, out)
            else:
                self._call_due_s = min(self._call_due_s, call.deadline_s)
        if self._beat_is_due(now_s):
            out.append(Beat({call.id: call.num_sent for call in self.calls.values() if not call.left}))

    def check_invariants(self) -> None:
        super().check_invariants()
        for call in self.calls.values():
            assert call.id <= self.highest_id
            assert (call.status is _STOPPING) == (call.cause is not None), "STOPPING has a cause"
            assert not call.left or call.status is _STOPPING
            if self.status is LinkStatus.CLOSED or self.closing:
                assert call.status is _STOPPING, "a lost link runs handlers"

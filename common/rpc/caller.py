"""The caller's side of one link (rules in `call`)."""

from dataclasses import dataclass
from math import inf
from typing import ClassVar, assert_never

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
    CALLER_MOVES,
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

_OPENING, _OPEN = CallStatus.OPENING, CallStatus.OPEN  # an enum's attribute costs more than a global
_NO_CALL = CallId(0)


class Dialled(Event, frozen=True):
    """The connection was asked for; what is sent waits until it stands."""

    now_s: float


class CallOpened(Event, frozen=True):
    """The owner wants a call. Ids are counted upwards by whoever makes this event."""

    now_s: float
    call: CallId
    body: RequestBody
    timeout_s: float | None = None


class BodySent(Event, frozen=True):
    call: CallId
    body: SentBody


class CallLeft(Event, frozen=True):
    """The owner is done with the call, however far it got."""

    now_s: float
    call: CallId


class FromCallee(Event, frozen=True):
    """One wire message came."""

    now_s: float
    frames: list[CalleeFrame]


CallerEvent = Dialled | CallOpened | BodySent | CallLeft | FromCallee | Ticked | LinkBroke | Closing


class Enter(Command, frozen=True):
    """The call was accepted: let its owner in."""

    call: CallId


class DeliverItem(Command, frozen=True, gc=False):
    call: CallId
    item: ItemBody


CallerCommand = CallerFrame | Enter | DeliverItem | Finish | Drop


@dataclass(slots=True, eq=False, kw_only=True)
class CallerCall(Call):
    """`asked_s` is when the Open was sent; infinite while it waits for the Welcome."""

    body: RequestBody
    asked_s: float = inf


@dataclass(eq=False, kw_only=True)
class CallerLink(Link[CallerCall]):
    """`to` pins the incarnation meant; `peer` is the one that answered."""

    MOVES: ClassVar[Moves] = CALLER_MOVES

    node: NodeId
    incarnation: Incarnation
    to: Incarnation | None = None
    peer: Incarnation | None = None
    last_id: CallId = _NO_CALL
    _dialled_s: float = 0.0

    def handle(self, event: CallerEvent) -> list[CallerCommand]:
        out: list[CallerCommand] = []
        match event:
            case FromCallee():
                self._came(event, out)
            case BodySent():
                self._sent(event, out)
            case CallOpened():
                self._asked(event, out)
            case CallLeft():
                call = self.calls.get(event.call)
                if call is not None:
                    why = WireError(ErrorCode.CANCELLED, "left by its owner")
                    self._give_up(call, CallStatus.CANCELLED, why, event.now_s, out)
            case Ticked():
                self._tick(event.now_s, out)
            case Dialled():
                self._started(event.now_s)
                self._dialled_s = event.now_s
                out.append(Hello(WIRE_VERSION, self.node, self.incarnation, self.to))
            case LinkBroke():
                self._lose(lost_frames(event.why), event.now_s, out)
            case Closing():
                self._close(event.now_s, out)
            case _:
                assert_never(event)
        return out

    # --- what the owner does ---------------------------------------------------------------------------

    def _asked(self, event: CallOpened, out: list[CallerCommand]) -> None:
        assert event.call > self.last_id, "ids only grow"
        assert self.status is not LinkStatus.CLOSED, "a closed link takes no calls"
        self.last_id = event.call
        call = CallerCall(id=event.call, status=_OPENING, history=[Moved(event.now_s, _OPENING, "")], body=event.body)
        if event.timeout_s is not None:
            call.deadline_s = event.now_s + event.timeout_s
            self._call_due_s = min(self._call_due_s, call.deadline_s)
        self.calls[call.id] = call
        if self.status is LinkStatus.OPEN:
            self._ask(call, event.now_s, out)

    def _ask(self, call: CallerCall, now_s: float, out: list[CallerCommand]) -> None:
        call.asked_s = now_s
        self._call_due_s = min(self._call_due_s, now_s + self.times.accept_timeout_s)
        timeout_s = None if call.deadline_s == inf else max(call.deadline_s - now_s, 0.0)
        out.append(Open(call.id, call.body, timeout_s))

    def _sent(self, event: BodySent, out: list[CallerCommand]) -> None:
        call = self.calls.get(event.call)
        if call is not None and call.status is _OPEN:
            out.append(Send(call.id, call.num_sent, event.body))
            call.num_sent += 1

    # --- what the callee says -----------------------------------------------------------------------------

    def _came(self, event: FromCallee, out: list[CallerCommand]) -> None:
        now_s = event.now_s
        self._heard_s = now_s
        for frame in event.frames:
            if self.status is LinkStatus.CLOSED:
                return
            match frame:
                case ItemFrame():
                    call = self.calls.get(frame.call)
                    if call is None:  # late news of a call that has ended (rule 6)
                        continue
                    if call.status is _OPEN and frame.seq == call.num_received:
                        call.num_received += 1
                        out.append(DeliverItem(frame.call, frame.body))
                    elif frame.seq >= call.num_received:
                        self._hole(call, f"item {frame.seq} came, {call.num_received} were expected", now_s, out)
                case Accept():
                    call = self.calls.get(frame.call)
                    if call is not None and call.status is _OPENING:
                        self._move(call, _OPEN, now_s=now_s)
                        out.append(Enter(call.id))
                case End():
                    self._ended(frame, now_s, out)
                case Beat():
                    self._compare(frame, now_s, out)
                case Welcome():
                    self._welcomed(frame, now_s, out)
                case Refuse():
                    self._lose(frame.error, now_s, out)
                case _:
                    assert_never(frame)

    def _welcomed(self, frame: Welcome, now_s: float, out: list[CallerCommand]) -> None:
        if self.status is not LinkStatus.NEW:
            return
        if self.to is not None and frame.incarnation != self.to:
            self._lose(lost_frames(f"{frame.node} is another incarnation than the one meant"), now_s, out)
            return
        self.peer = frame.incarnation
        self._opened(now_s)
        for call in self.calls.values():
            self._ask(call, now_s, out)

    def _ended(self, frame: End, now_s: float, out: list[CallerCommand]) -> None:
        call = self.calls.get(frame.call)
        if call is None:
            return
        if frame.error is not None:
            expired = frame.error.code is ErrorCode.DEADLINE
            out.append(
                self._finish(call, CallStatus.EXPIRED if expired else CallStatus.FAILED, frame.error, now_s=now_s)
            )
        elif call.status is _OPENING or frame.seq != call.num_received:
            why = f"{frame.seq} items were sent, {call.num_received} came"
            out.append(self._finish(call, CallStatus.FAILED, lost_frames(why), now_s=now_s))
        else:
            out.append(self._finish(call, CallStatus.FINISHED, None, now_s=now_s))

    def _compare(self, beat: Beat, now_s: float, out: list[CallerCommand]) -> None:
        for call in list(self.calls.values()):
            num_sent = beat.calls.get(call.id)
            if num_sent is None:
                if call.status is _OPEN:
                    self._hole(call, "the callee no longer knows the call", now_s, out)
            elif call.status is _OPENING:
                self._hole(call, "the callee has the call, its Accept never came", now_s, out)
            elif num_sent > call.num_received:
                self._hole(call, f"{num_sent} items were sent, {call.num_received} came", now_s, out)
        # The first Cancel was lost, or its handler takes long to end.
        out.extend(Cancel(call_id) for call_id in beat.calls if call_id not in self.calls and call_id <= self.last_id)

    # --- ends ---------------------------------------------------------------------------------------------

    def _hole(self, call: CallerCall, why: str, now_s: float, out: list[CallerCommand]) -> None:
        self._give_up(call, CallStatus.FAILED, lost_frames(why), now_s, out)

    def _give_up(
        self, call: CallerCall, status: CallStatus, why: WireError, now_s: float, out: list[CallerCommand]
    ) -> None:
        """End a call that the callee may still hold."""
        out.append(self._finish(call, status, why, now_s=now_s))
        if call.asked_s != inf:
            out.append(Cancel(call.id))

    def _lose(self, error: WireError, now_s: float, out: list[CallerCommand]) -> None:
        if self.status is LinkStatus.CLOSED:
            return
        self.status = LinkStatus.CLOSED
        out.extend(self._finish(call, CallStatus.LOST, error, now_s=now_s) for call in list(self.calls.values()))
        out.append(Drop(error))

    def _close(self, now_s: float, out: list[CallerCommand]) -> None:
        if self.status is LinkStatus.CLOSED:
            return
        why = WireError(ErrorCode.CANCELLED, "the client was closed")
        for call in list(self.calls.values()):
            self._give_up(call, CallStatus.CANCELLED, why, now_s, out)
        self.status = LinkStatus.CLOSED
        out.append(Drop(why))

    # --- time ---------------------------------------------------------------------------------------------

    def _tick(self, now_s: float, out: list[CallerCommand]) -> None:
        if self.status is LinkStatus.CLOSED:
            return
        if self._was_stalled(now_s):
            self._dialled_s = now_s
            for call in self.calls.values():
                call.asked_s = inf if call.asked_s == inf else now_s
        if self.status is LinkStatus.NEW:
            if now_s - self._dialled_s >= self.times.connect_timeout_s:
                self._lose(lost_frames(f"no Welcome within {self.times.connect_timeout_s} s"), now_s, out)
                return
        elif now_s - self._heard_s >= self.times.lost_after_s:
            self._lose(lost_frames(f"nothing heard for {self.times.lost_after_s} s"), now_s, out)
            return
        self._call_due_s = inf
        for call in list(self.calls.values()):
            accept_due_s = call.asked_s + self.times.accept_timeout_s if call.status is _OPENING else inf
            if now_s >= call.deadline_s:
                self._give_up(
                    call, CallStatus.EXPIRED, WireError(ErrorCode.DEADLINE, "the deadline passed"), now_s, out
                )
            elif now_s >= accept_due_s:
                self._hole(call, f"not accepted within {self.times.accept_timeout_s} s", now_s, out)
            else:
                self._call_due_s = min(self._call_due_s, call.deadline_s, accept_due_s)
        if self._beat_is_due(now_s):
            out.append(Beat({call.id: call.num_sent for call in self.calls.values()}))

    def check_invariants(self) -> None:
        super().check_invariants()
        for call in self.calls.values():
            assert call.id <= self.last_id
            if self.status is LinkStatus.NEW:
                assert call.asked_s == inf, "an Open went out before the Welcome"
            else:
                assert call.asked_s != inf, "an Open was forgotten"
        if self.status is LinkStatus.CLOSED:
            assert not self.calls, "a lost link keeps calls"

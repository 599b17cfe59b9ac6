"""Lifecycles of the calls on one link: theory of operation, and what both sides share.

One link is one connection. The end that dialled it is the *caller* (`caller.CallerLink`), the end that
listens is the *callee* (`callee.CalleeLink`). Both are pure: `handle(event) -> list[command]` is the only
mutator, time arrives in events, a frame in the returned list means "send this".

      caller                                       callee
        Hello ──────────────────────────────────────>
             <────────────────────────────────────── Welcome | Refuse
        Open(call) ─────────────────────────────────>  a handler starts
             <────────────────────────────────────── Accept
             <────────────────────────────────────── Item 0, Item 1, ...
        Send 0, Send 1, ... ────────────────────────>
        Cancel ─────────────────────────────────────>  the handler is cancelled
             <────────────────────────────────────── End(number of items, error)   the handler has ended
        Beat <─────── open calls, frames sent ──────> Beat

      caller   OPENING ──Accept──> OPEN ──End──> FINISHED
                  └────────┬────────┘
                  FAILED, CANCELLED, EXPIRED, LOST

      callee   OPEN ──handler ended──> FINISHED | FAILED
                └──Cancel, deadline, hole, loss──> STOPPING ──handler ended──> FAILED, CANCELLED, EXPIRED, LOST

Rules (tests name them):

 1. Hello comes first. The callee refuses another wire version (INCOMPATIBLE) and a Hello meant for another
    incarnation (PEER_LOST); the caller drops a link whose Welcome names another incarnation than it meant.
    No Welcome within `connect_timeout_s` loses the link. Opens wait for the Welcome.
 2. Ids only grow on a link, and a link keeps order. So one number, the highest id seen in an Open, a Cancel
    or a Beat, is the tombstone of every call below it: an Open that comes late or twice starts nothing.
 3. An Open is accepted once and never resent. Not accepted within `accept_timeout_s`, or followed by an item
    or a clean End without an Accept, the call fails.
 4. Items are numbered per call from 0, and so are Sends. A number seen before is dropped, a hole fails the call.
 5. End is the last frame of a call, sent once, when its handler has ended. It carries the number of items; a
    short count fails the call.
 6. The owner may leave at any time: the call ends at once on its side and Cancel tells the other. Frames of a
    call that has ended are dropped here and nowhere else.
 7. A deadline travels as remaining seconds and both sides enforce it.
 8. Each side beats every `beat_s` and lists its open calls with the number of frames it sent in each. A number
    above what was received (a missing tail) or a call that only one side knows ends that call. An idle link
    sends one empty Beat and keeps nothing else.
 9. A peer silent for `lost_after_s` is lost. A lost link never comes back, whatever arrives.
10. A tick that comes two beats late or more means that this process itself was stopped: peers get a fresh
    interval before anything is held against their silence. Deadlines go on, for they are the user's time.
11. When a link is lost every call on it ends as LOST and nothing more is sent in it. On the callee's side the
    handlers are stopped and a call counts until its handler has ended.
12. A closing callee refuses Opens (UNAVAILABLE), stops its handlers and drops the link after the last End; a
    closing caller leaves its calls and drops the link at once.
13. A call has exactly one terminal status; the first cause wins.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from math import inf
from typing import ClassVar, Generic, NamedTuple, TypeVar

import msgspec

from common.errors import ErrorCode, InvalidTransition
from common.messages import CallId, WireError


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTimes:
    """Intervals of every link of a network, in seconds."""

    beat_s: float = 0.5
    lost_after_s: float = 4.0
    connect_timeout_s: float = 3.0
    accept_timeout_s: float = 5.0

    @property
    def stall_s(self) -> float:
        """A gap between two ticks that only a pause of this process explains (rule 10)."""
        return 2 * self.beat_s


class LinkStatus(StrEnum):
    NEW = "new"
    """No Welcome came yet (caller), no Hello came yet (callee)."""
    OPEN = "open"
    CLOSED = "closed"


class CallStatus(StrEnum):
    OPENING = "opening"
    OPEN = "open"
    STOPPING = "stopping"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    LOST = "lost"


Moves = Mapping[CallStatus, frozenset[CallStatus]]

_S = CallStatus
_BROKEN = frozenset({_S.FAILED, _S.CANCELLED, _S.EXPIRED, _S.LOST})
_ENDED: Moves = {status: frozenset() for status in (_S.FINISHED, *sorted(_BROKEN))}
TERMINAL = frozenset(_ENDED)

CALLER_MOVES: Moves = {
    _S.OPENING: _BROKEN | {_S.OPEN},
    _S.OPEN: _BROKEN | {_S.FINISHED},
    **_ENDED,
}
CALLEE_MOVES: Moves = {
    _S.OPEN: frozenset({_S.STOPPING, _S.FINISHED, _S.FAILED}),
    _S.STOPPING: _BROKEN,
    **_ENDED,
}


class Moved(NamedTuple):
    """One line of a call's history."""

    at_s: float
    status: CallStatus
    why: str


@dataclass(slots=True, eq=False, kw_only=True)
class Call:
    """What either side knows of a call. `num_sent` and `num_received` count items or Sends, its own and the peer's."""

    id: CallId
    status: CallStatus
    history: list[Moved]
    deadline_s: float = inf
    num_sent: int = 0
    num_received: int = 0


# --- events that both sides have (frames come as `FromCallee` and `FromCaller`) ------------------------------


class Event(msgspec.Struct, frozen=True, gc=False):
    """Something happened."""


class Ticked(Event, frozen=True):
    """Time passed. Wanted at `Link.due_s` or earlier."""

    now_s: float


class LinkBroke(Event, frozen=True):
    """The connection is gone, or the peer said something that cannot be understood."""

    now_s: float
    why: str


class Closing(Event, frozen=True):
    """This process gives the link up (rule 12)."""

    now_s: float


# --- commands that both sides have (every frame is one too: send it) ------------------------------------------


class Command(msgspec.Struct, frozen=True):
    """Something to do."""


class Finish(Command, frozen=True):
    """The call has ended on this side, for good. `error` None means it finished well."""

    call: CallId
    status: CallStatus
    error: WireError | None
    history: tuple[Moved, ...]


class Drop(Command, frozen=True):
    """Send what is queued and close the connection; nothing else follows on this link."""

    error: WireError


def lost_frames(why: str) -> WireError:
    """The peer, or what it must have said, did not arrive; another attempt may fare better."""
    return WireError(ErrorCode.PEER_LOST, why)


C = TypeVar("C", bound=Call)


@dataclass(eq=False, kw_only=True)
class Link(Generic[C]):
    """What both ends of a link keep: its calls, and when the peer was last heard."""

    MOVES: ClassVar[Moves]

    times: LinkTimes
    status: LinkStatus = LinkStatus.NEW
    calls: dict[CallId, C] = field(default_factory=dict)
    """Calls that have not ended here, in the order of their ids."""
    _heard_s: float = 0.0
    _ticked_s: float = 0.0
    _beat_due_s: float = inf
    _call_due_s: float = inf

    @property
    def due_s(self) -> float:
        """When to tick next at the latest; never more than one beat ahead, so that rule 10 can tell."""
        if self.status is LinkStatus.CLOSED:
            return inf
        return min(self._ticked_s + self.times.beat_s, self._beat_due_s, self._call_due_s)

    def _started(self, now_s: float) -> None:
        self._heard_s = self._ticked_s = now_s

    def _opened(self, now_s: float) -> None:
        self.status = LinkStatus.OPEN
        self._beat_due_s = now_s + self.times.beat_s

    def _was_stalled(self, now_s: float) -> bool:
        """Notes the tick; True gives the peer a fresh interval (rule 10)."""
        stalled = now_s - self._ticked_s >= self.times.stall_s
        self._ticked_s = now_s
        if stalled:
            self._heard_s = now_s
        return stalled

    def _beat_is_due(self, now_s: float) -> bool:
        if self.status is not LinkStatus.OPEN or now_s < self._beat_due_s:
            return False
        self._beat_due_s = now_s + self.times.beat_s
        return True

    def _move(self, call: C, to: CallStatus, *, now_s: float, why: str = "") -> None:
        if to not in self.MOVES[call.status]:
            raise InvalidTransition(f"call {call.id}: {call.status} -> {to} ({why}); so far: {call.history}")
        call.status = to
        call.history.append(Moved(now_s, to, why))

    def _finish(self, call: C, status: CallStatus, error: WireError | None, *, now_s: float) -> Finish:
        """The only way out of `calls` (rule 13)."""
        self._move(call, status, now_s=now_s, why="" if error is None else error.message)
        del self.calls[call.id]
        return Finish(call.id, status, error, tuple(call.history))

    def check_invariants(self) -> None:
        """AssertionError if the state contradicts the rules."""
        assert list(self.calls) == sorted(self.calls), "ids only grow"
        for call_id, call in self.calls.items():
            assert call.id == call_id
            assert call.status not in TERMINAL, "an ended call is kept"
            assert call.history[-1].status is call.status, "the history is behind"
            path = [moved.status for moved in call.history]
            for before, after in pairwise(path):
                assert after in self.MOVES[before], f"{before} -> {after} is not a move"
            assert call.num_sent >= 0
            assert call.num_received >= 0

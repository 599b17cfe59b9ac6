"""What a client and a server need of a wire, and what they share: an outbox per link, an inbox per call.

The shells over the pure lifecycles (`client`, `server`) know no sockets: a network (`link`, `memory`) hands
them wires, tells them what came, and ticks them when they are due.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from math import inf
from typing import Generic, Protocol, TypeVar

import msgspec

from common import telemetry
from common.clock import Clock
from common.errors import BatonError
from common.messages import Audit, CalleeFrame, CallerFrame, HeldCall, Incarnation, RequestBody, WireError, encode

MAX_MESSAGE_BYTES = 16 << 20
"""Larger wire messages are neither sent nor taken. Three million tokens; decoded, it may take ten times as much."""

log = telemetry.logger(__name__)
_sparing = telemetry.Sparing(log)


class Wire(Protocol):
    """One connection's sending end. Messages arrive whole and in order, or the connection is gone."""

    def send(self, payload: bytes) -> None:
        """Queue a message; never blocks. PeerLostError if the connection is gone."""
        ...

    def close(self) -> None:
        """Give the connection up. Idempotent."""
        ...


class WireEvents(Protocol):
    """What a network tells the owner of a wire."""

    def received(self, payload: bytes) -> None: ...

    def disconnected(self, why: str) -> None:
        """The connection is gone, or carried something that is no message of ours."""
        ...


class Listener(Protocol):
    """The server's end of all its connections. `peer` names a connection and is never used again."""

    @property
    def address(self) -> str: ...

    def send(self, peer: bytes, payload: bytes) -> None:
        """Queue a message; never blocks. PeerLostError if the peer's connection is gone."""
        ...

    def close(self) -> None: ...


Dial = Callable[[str, WireEvents], Wire]
"""Start connecting to an address. PeerLostError if the address cannot even be dialled."""
Arm = Callable[[float], None]
"""Ask the network for a tick at this time at the latest (seconds of its clock)."""

F = TypeVar("F", CallerFrame, CalleeFrame)
B = TypeVar("B")


class Outbox(Generic[F]):
    """All frames of one turn of the loop leave as one wire message."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._frames: list[F] = []
        self._flush_is_due = False

    def put(self, frame: F) -> None:
        self._frames.append(frame)
        if not self._flush_is_due:
            self._flush_is_due = True
            asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        self._flush_is_due = False
        frames, self._frames = self._frames, []
        if not frames:
            return
        try:
            payload = encode(frames)
        except Exception:
            self._send_what_fits(frames)
            return
        if len(payload) <= MAX_MESSAGE_BYTES:
            self._send(payload)
        else:
            self._send_what_fits(frames)

    def _send_what_fits(self, frames: list[F]) -> None:
        """One by one. A frame that cannot travel leaves a hole, which ends its call and no other."""
        for frame in frames:
            try:
                payload = encode([frame])
            except Exception:
                log.exception("frame cannot be encoded", frame=type(frame).__name__)
                continue
            if len(payload) <= MAX_MESSAGE_BYTES:
                self._send(payload)
            else:
                log.error("frame too large to send", frame=type(frame).__name__, size_bytes=len(payload))


class Inbox(Generic[B]):
    """Bodies waiting for the one task that iterates a call."""

    def __init__(self) -> None:
        self._bodies: deque[B] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.is_ended = False
        self._error: WireError | None = None

    def put(self, body: B) -> None:
        self._bodies.append(body)
        self._wake()

    def end(self, error: WireError | None) -> None:
        """Nothing more comes; what is here already is still handed out first."""
        self.is_ended = True
        self._error = error
        self._wake()

    def clear(self) -> None:
        self._bodies.clear()

    def error(self) -> BatonError | None:
        """A fresh exception each time, for a raised one collects its traceback."""
        return None if self._error is None else self._error.exception()

    async def get(self) -> B:
        """StopAsyncIteration after a good end, the call's error after a bad one."""
        while not self._bodies:
            if self.is_ended:
                raise self.error() or StopAsyncIteration
            if self._waiter is not None:
                raise RuntimeError("two tasks iterate one call")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._bodies.popleft()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Ticker:
    """One timer on the running loop that calls `tick` when it is due."""

    def __init__(self, clock: Clock, tick: Callable[[float], None], due_s: Callable[[], float]) -> None:
        self._clock = clock
        self._tick = tick
        self._next_due_s = due_s
        self._armed_s = inf
        self._timer: asyncio.TimerHandle | None = None

    def arm(self, due_s: float) -> None:
        if due_s >= self._armed_s:
            return
        self.stop()
        self._armed_s = due_s
        wait_s = max(due_s - self._clock.now_s(), 0.0)
        self._timer = asyncio.get_running_loop().call_later(wait_s, self._fire)

    def _fire(self) -> None:
        self.stop()
        try:
            self._tick(self._clock.now_s())
        finally:
            self.arm(self._next_due_s())

    def stop(self) -> None:
        self._armed_s = inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def held(peer: Incarnation, body: RequestBody, *, age_s: float) -> Iterator[HeldCall]:
    """An open call as an audit lists it; the audit's own question is no holding."""
    if not isinstance(body, Audit):
        yield HeldCall(
            type(body).__name__,
            peer,
            getattr(body, "request", None),
            getattr(body, "attempt", 0),
            age_s,
        )


def dropped(error: Exception, **peer: str) -> str:
    """Log why a message costs its sender the link; returns the same in a line."""
    if isinstance(error, msgspec.DecodeError):
        _sparing.warning("malformed message", why=str(error), **peer)
        return f"malformed message: {error}"
    log.exception("message could not be handled", **peer)
    return f"{type(error).__name__} while handling a message"

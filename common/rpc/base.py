"""Calls as the rest of Baton sees them. `endpoint` implements these over any wire.

A call is one request body, a stream of items back, bodies sent in while it is open, and exactly one
end. Whoever opened a call owns it: leaving its context ends it. A handler's task is the call on the
callee's side: it is cancelled when the caller cancels, is lost or the deadline passes, and what it
holds it frees in `finally`.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from types import TracebackType
from typing import Protocol, Self

from common.messages import HeldCall, Incarnation, ItemBody, NodeId, RequestBody, SentBody


class OutgoingCall(Protocol):
    """The caller's side, an async context manager. Use: `async with client.open(...) as call: async for item in call`.

    Entering waits for the callee's Accept. Iterating ends when the call is done and raises the far side's
    error (or PeerLostError, DeadlineError) when it failed. Leaving the context cancels a call still open.
    """

    @property
    def peer(self) -> Incarnation: ...

    def send(self, body: SentBody) -> None:
        """Queue a body for the callee; never blocks. Dropped if the call has ended."""
        ...

    def __aiter__(self) -> AsyncIterator[ItemBody]: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Client(Protocol):
    """Opens calls. Keeps one link per (address, incarnation), made on first use, dropped when lost."""

    on_lost: Callable[[Incarnation], None]
    """Told whenever a link to a process is lost, with or without calls on it."""

    def open(
        self,
        address: str,
        body: RequestBody,
        *,
        incarnation: Incarnation | None = None,
        timeout_s: float | None = None,
    ) -> OutgoingCall:
        """A call to the process at `address`; PeerLostError if it cannot be reached or is another incarnation."""
        ...

    def held_calls(self) -> list[HeldCall]:
        """Its open calls, an Audit's apart. `peer` is empty while nobody in particular has answered."""
        ...

    async def close(self) -> None:
        """Cancel every open call and close every link; leaves no task or socket."""
        ...


class IncomingCall(Protocol):
    """The callee's side, handed to a handler. Iterating yields what the caller sends in."""

    @property
    def body(self) -> RequestBody: ...

    @property
    def caller(self) -> NodeId: ...

    @property
    def remaining_s(self) -> float | None: ...

    def send(self, item: ItemBody) -> None:
        """Queue an item; never blocks. All items queued in one turn of the loop travel in one message."""
        ...

    def __aiter__(self) -> AsyncIterator[SentBody]: ...


Handler = Callable[[IncomingCall], Awaitable[None]]
"""Returning ends the call well; raising a BatonError ends it with that error."""


class Server(Protocol):
    """Listens on one address and runs a handler task per call, chosen by the type of the request body."""

    @property
    def address(self) -> str:
        """Where callers reach it (the bound port filled in)."""
        ...

    @property
    def num_calls(self) -> int: ...

    def held_calls(self) -> list[HeldCall]:
        """Its open calls, an Audit's apart; one counts until its handler has ended."""
        ...

    async def close(self) -> None:
        """End every call (their handlers are cancelled and awaited) and leave nothing behind."""
        ...


class Network(Protocol):
    """Makes clients and servers: ZeroMQ in production (`link`), in-process with faults in tests (`memory`)."""

    def client(self, *, node: NodeId, incarnation: Incarnation) -> Client: ...

    async def serve(
        self,
        address: str,
        handlers: Mapping[type[RequestBody], Handler],
        *,
        node: NodeId,
        incarnation: Incarnation,
    ) -> Server:
        """Bind (port 0 means any free one). ConfigError if the address is in use or malformed."""
        ...

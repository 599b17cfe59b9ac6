"""Serving calls: a thin shell over `callee.CalleeLink`, one per connection, and a task per call."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any, assert_never

from common.clock import Clock
from common.errors import BatonError, ErrorCode, InternalError, PeerLostError
from common.messages import (
    Accept,
    Beat,
    CalleeFrame,
    CallerFrame,
    CallId,
    End,
    HeldCall,
    Hello,
    Incarnation,
    ItemBody,
    ItemFrame,
    NodeId,
    Refuse,
    RequestBody,
    SentBody,
    Welcome,
    WireError,
    decode_from_caller,
    encode,
)
from common.rpc.base import Handler
from common.rpc.call import Closing, Drop, Finish, LinkBroke, LinkTimes, Ticked, lost_frames
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
from common.rpc.endpoint import Arm, Inbox, Listener, Outbox, dropped, held, log


class ServedCall:
    """`base.IncomingCall`."""

    def __init__(self, link: "ServerLink", start: Start) -> None:
        self._link = link
        self._id = start.call
        self._body = start.body
        self._deadline_s = start.deadline_s
        self._inbox: Inbox[SentBody] = Inbox()
        self.task: asyncio.Task[None] | None = None

    @property
    def body(self) -> RequestBody:
        return self._body

    @property
    def caller(self) -> NodeId:
        return self._link.core.caller

    @property
    def remaining_s(self) -> float | None:
        return None if self._deadline_s == inf else max(self._deadline_s - self._link.now_s(), 0.0)

    def send(self, item: ItemBody) -> None:
        self._link.handle(ItemYielded(self._id, item))

    def __aiter__(self) -> AsyncIterator[SentBody]:
        return self

    def __anext__(self) -> Coroutine[Any, Any, SentBody]:
        return self._inbox.get()

    def deliver(self, body: SentBody) -> None:
        self._inbox.put(body)


class ServerLink:
    """One connection from one process, with the handlers that run for it."""

    def __init__(self, server: "ServerEndpoint", peer: bytes) -> None:
        self._server = server
        self._peer = peer
        self.core = CalleeLink(
            node=server.node, incarnation=server.incarnation, times=server.times, methods=server.handlers.keys()
        )
        self._calls: dict[CallId, ServedCall] = {}
        self._outbox: Outbox[CalleeFrame] = Outbox(self._send)

    def now_s(self) -> float:
        return self._server.clock.now_s()

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        return [call.task for call in self._calls.values() if call.task is not None]

    def held(self) -> Iterator[HeldCall]:
        for id, call in self._calls.items():
            yield from held(self.core.peer, call.body, age_s=self.now_s() - self.core.calls[id].history[0].at_s)

    def came(self, frames: list[CallerFrame]) -> None:
        self.handle(FromCaller(self.now_s(), frames))

    def broke(self, why: str) -> None:
        self.handle(LinkBroke(self.now_s(), why))

    # --- commands -----------------------------------------------------------------------------------------

    def handle(self, event: CalleeEvent) -> None:
        for command in self.core.handle(event):
            self._apply(command)

    def _apply(self, command: CalleeCommand) -> None:
        match command:
            case ItemFrame() | End() | Accept() | Beat() | Welcome() | Refuse():
                self._outbox.put(command)
            case DeliverBody():
                self._calls[command.call].deliver(command.body)
            case Start():
                self._start(command)
            case Stop():
                task = self._calls[command.call].task
                assert task is not None
                task.cancel()
            case Finish():
                # Its error's traceback holds the call: let go of the task, or the request stays until a collection.
                self._calls.pop(command.call).task = None
                log.debug("call ended", call=command.call, peer=self.core.caller, history=command.history)
            case Drop():
                log.debug("link ended", peer=self.core.caller, why=command.error.message)
                self._outbox.flush()
                self._server.forget(self._peer, self)
            case _:
                assert_never(command)

    def _start(self, start: Start) -> None:
        call = ServedCall(self, start)
        self._calls[start.call] = call
        name = f"{type(start.body).__name__} for {self.core.caller}"
        call.task = asyncio.get_running_loop().create_task(self._run(call), name=name)
        call.task.add_done_callback(partial(self._handler_ended, start))
        self._server.arm(self.core.due_s)

    async def _run(self, call: ServedCall) -> None:
        method = type(call.body).__name__
        try:
            await self._server.handlers[type(call.body)](call)
        except BatonError:
            raise
        except Exception as error:
            log.exception("handler failed", method=method, caller=call.caller)
            raise InternalError(f"{type(error).__name__} in the {method} handler") from error

    def _handler_ended(self, start: Start, task: asyncio.Task[None]) -> None:
        """Called once the task is done, so also for one that was cancelled before its first step."""
        self.handle(HandlerEnded(self.now_s(), start.call, self._outcome(start, task)))
        self._server.call_ended(self)

    def _outcome(self, start: Start, task: asyncio.Task[None]) -> WireError | None:
        if task.cancelled():  # the core knows if somebody asked for it
            return WireError(ErrorCode.INTERNAL, f"the {type(start.body).__name__} handler was cancelled")
        match task.exception():
            case None:
                return None
            case BatonError() as error:
                return WireError.of(error)
            case error:
                return WireError(ErrorCode.INTERNAL, f"{type(error).__name__} in a handler")

    def _send(self, payload: bytes) -> None:
        try:
            self._server.listener.send(self._peer, payload)
        except PeerLostError as error:
            self.broke(error.message)


class ServerEndpoint:
    """`base.Server` over any network. The network binds first, then hands its listener over."""

    def __init__(
        self,
        handlers: Mapping[type[RequestBody], Handler],
        *,
        node: NodeId,
        incarnation: Incarnation,
        clock: Clock,
        times: LinkTimes,
        arm: Arm,
    ) -> None:
        self.handlers = dict(handlers)
        self.node = node
        self.incarnation = incarnation
        self.clock = clock
        self.times = times
        self.arm = arm
        self._listener: Listener | None = None
        self._links: dict[bytes, ServerLink] = {}
        self._ending: dict[ServerLink, None] = {}
        """Links that are gone while handlers of theirs still clean up."""

    def attach(self, listener: Listener) -> None:
        self._listener = listener

    @property
    def listener(self) -> Listener:
        assert self._listener is not None, "the network attaches a listener first"
        return self._listener

    @property
    def address(self) -> str:
        return self.listener.address

    @property
    def num_calls(self) -> int:
        return sum(link.num_calls for link in (*self._links.values(), *self._ending))

    @property
    def num_links(self) -> int:
        return len(self._links)

    def held_calls(self) -> list[HeldCall]:
        return [call for link in (*self._links.values(), *self._ending) for call in link.held()]

    # --- what the network tells it --------------------------------------------------------------------------

    def received(self, peer: bytes, payload: bytes) -> None:
        """One bad message costs its sender the link, and nobody else anything."""
        link = self._links.get(peer)
        try:
            frames = decode_from_caller(payload)
            if link is None:
                link = self._greet(peer, frames)
            if link is not None:
                link.came(frames)
        except Exception as error:
            self.disconnected(peer, dropped(error, caller=link.core.caller if link else "unknown"))

    def disconnected(self, peer: bytes, why: str) -> None:
        link = self._links.get(peer)
        if link is not None:
            link.broke(why)

    def _greet(self, peer: bytes, frames: list[CallerFrame]) -> ServerLink | None:
        if frames and isinstance(frames[0], Hello):
            link = self._links[peer] = ServerLink(self, peer)
            return link
        # Its link was lost here while it slept: say so, for it may still believe in it.
        with suppress(PeerLostError):
            self.listener.send(peer, encode([Refuse(lost_frames(f"{self.node} has given this link up"))]))
        return None

    @property
    def due_s(self) -> float:
        return min((link.core.due_s for link in self._links.values()), default=inf)

    def tick(self, now_s: float) -> None:
        for link in list(self._links.values()):
            link.handle(Ticked(now_s))

    # --- ends ---------------------------------------------------------------------------------------------

    def forget(self, peer: bytes, link: ServerLink) -> None:
        if self._links.get(peer) is link:
            del self._links[peer]
        if link.num_calls:
            self._ending[link] = None

    def call_ended(self, link: ServerLink) -> None:
        if link.num_calls == 0:
            self._ending.pop(link, None)

    def abort(self, why: str) -> None:
        """Lose every link at once, as if this process had died. Handlers are cancelled, not awaited."""
        for link in list(self._links.values()):
            link.broke(why)

    async def close(self) -> None:
        for link in list(self._links.values()):
            link.handle(Closing(self.clock.now_s()))
        while tasks := [task for link in (*self._links.values(), *self._ending) for task in link.tasks]:
            await asyncio.wait(tasks)
            await asyncio.sleep(0)  # their done-callbacks have their turn
        for link in list(self._links.values()):
            link.broke("the server was closed")
        self.listener.close()

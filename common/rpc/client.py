"""Opening calls: a thin shell over `caller.CallerLink`, one per connection."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, Self, assert_never

from common.clock import Clock
from common.errors import CallCancelledError, PeerLostError
from common.messages import (
    Beat,
    CallerFrame,
    CallId,
    Cancel,
    HeldCall,
    Hello,
    Incarnation,
    ItemBody,
    NodeId,
    Open,
    RequestBody,
    Send,
    SentBody,
    WireError,
    decode_from_callee,
)
from common.rpc.call import Closing, Drop, Finish, LinkBroke, LinkTimes, Ticked
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
from common.rpc.endpoint import Arm, Dial, Inbox, Outbox, Wire, dropped, held, log


class OpenedCall:
    """`base.OutgoingCall`."""

    def __init__(
        self,
        client: "ClientEndpoint",
        address: str,
        body: RequestBody,
        *,
        incarnation: Incarnation | None,
        timeout_s: float | None,
    ) -> None:
        self._client = client
        self._target = address, incarnation
        self._body = body
        self._timeout_s = timeout_s
        self._link: ClientLink | None = None
        self._id = CallId(0)
        self._entered: asyncio.Future[None] | None = None
        self._inbox: Inbox[ItemBody] = Inbox()

    @property
    def peer(self) -> Incarnation:
        """The incarnation that answered. Known once the call was entered."""
        assert self._link is not None and self._link.core.peer is not None, "the call was not entered"
        return self._link.core.peer

    async def __aenter__(self) -> Self:
        assert self._link is None, "a call is entered once"
        self._entered = asyncio.get_running_loop().create_future()
        self._link = self._client.link(*self._target)
        self._id = self._link.open(self, self._body, timeout_s=self._timeout_s)
        try:
            await self._entered
        except BaseException:
            self._link.leave(self._id)
            if self._entered.done() and not self._entered.cancelled():
                self._entered.exception()  # seen, though this wait was cancelled in the same turn
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._link is not None:
            self._link.leave(self._id)
        self._inbox.clear()

    def send(self, body: SentBody) -> None:
        if self._link is not None:
            self._link.handle(BodySent(self._id, body))

    def __aiter__(self) -> AsyncIterator[ItemBody]:
        return self

    def __anext__(self) -> Coroutine[Any, Any, ItemBody]:
        return self._inbox.get()

    # --- what its link tells it ---------------------------------------------------------------------------

    def enter(self) -> None:
        if self._entered is not None and not self._entered.done():
            self._entered.set_result(None)

    def deliver(self, item: ItemBody) -> None:
        self._inbox.put(item)

    def finish(self, error: WireError | None) -> None:
        self._inbox.end(error)
        if error is not None and self._entered is not None and not self._entered.done():
            self._entered.set_exception(error.exception())


class ClientLink:
    """One connection to one process, with the calls that travel on it."""

    def __init__(self, client: "ClientEndpoint", address: str, to: Incarnation | None) -> None:
        self._client = client
        self.address = address
        self.core = CallerLink(node=client.node, incarnation=client.incarnation, to=to, times=client.times)
        self._calls: dict[CallId, OpenedCall] = {}
        self._outbox: Outbox[CallerFrame] = Outbox(self._send)
        self._last_id = 0
        self._wire: Wire | None = None

    def dial(self, dial: Dial) -> None:
        self._wire = dial(self.address, self)
        self.handle(Dialled(self._client.clock.now_s()))
        self._client.arm(self.core.due_s)

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    @property
    def peer(self) -> Incarnation:
        """Who answers here or, while nobody has, who is meant."""
        return self.core.peer or self.core.to or Incarnation("")

    def held(self) -> Iterator[HeldCall]:
        now_s = self._client.clock.now_s()
        for call in self.core.calls.values():
            yield from held(self.peer, call.body, age_s=now_s - call.history[0].at_s)

    def open(self, call: OpenedCall, body: RequestBody, *, timeout_s: float | None) -> CallId:
        self._last_id += 1
        call_id = CallId(self._last_id)
        self._calls[call_id] = call
        self.handle(CallOpened(self._client.clock.now_s(), call_id, body, timeout_s))
        self._client.arm(self.core.due_s)
        return call_id

    def leave(self, call_id: CallId) -> None:
        if call_id in self._calls:
            self.handle(CallLeft(self._client.clock.now_s(), call_id))

    def tick(self, now_s: float) -> None:
        self.handle(Ticked(now_s))

    def close(self) -> None:
        self.handle(Closing(self._client.clock.now_s()))

    # --- what the network tells it (endpoint.WireEvents) -----------------------------------------------------

    def received(self, payload: bytes) -> None:
        try:
            self.handle(FromCallee(self._client.clock.now_s(), decode_from_callee(payload)))
        except Exception as error:
            self.disconnected(dropped(error, peer=self.address))

    def disconnected(self, why: str) -> None:
        self.handle(LinkBroke(self._client.clock.now_s(), f"{self.address}: {why}"))

    # --- commands -----------------------------------------------------------------------------------------

    def handle(self, event: CallerEvent) -> None:
        for command in self.core.handle(event):
            self._apply(command)

    def _apply(self, command: CallerCommand) -> None:
        match command:
            case DeliverItem():
                self._calls[command.call].deliver(command.item)
            case Send() | Open() | Cancel() | Beat() | Hello():
                self._outbox.put(command)
            case Enter():
                self._calls[command.call].enter()
            case Finish():
                self._calls.pop(command.call).finish(command.error)
                log.debug("call ended", call=command.call, peer=self.address, history=command.history)
            case Drop():
                log.debug("link ended", peer=self.address, why=command.error.message)
                self._outbox.flush()
                if self._wire is not None:
                    self._wire.close()
                self._client.forget(self)
                self._client.on_lost(self.peer)
            case _:
                assert_never(command)

    def _send(self, payload: bytes) -> None:
        if self._wire is None:
            return
        try:
            self._wire.send(payload)
        except PeerLostError as error:
            self.disconnected(error.message)


class ClientEndpoint:
    """`base.Client` over any network. `num_calls` and `num_links` are what it holds now."""

    def __init__(
        self,
        *,
        node: NodeId,
        incarnation: Incarnation,
        dial: Dial,
        clock: Clock,
        times: LinkTimes,
        arm: Arm,
        on_closed: Callable[[], None],
    ) -> None:
        self.node = node
        self.incarnation = incarnation
        self.clock = clock
        self.times = times
        self.arm = arm
        self._dial = dial
        self.on_lost: Callable[[Incarnation], None] = lambda peer: None
        self._on_closed = on_closed
        self._links: dict[tuple[str, Incarnation | None], ClientLink] = {}
        self._is_closed = False

    def open(
        self,
        address: str,
        body: RequestBody,
        *,
        incarnation: Incarnation | None = None,
        timeout_s: float | None = None,
    ) -> OpenedCall:
        return OpenedCall(self, address, body, incarnation=incarnation, timeout_s=timeout_s)

    def link(self, address: str, incarnation: Incarnation | None) -> ClientLink:
        """The link that stands, or a new one. PeerLostError if the address cannot be dialled."""
        if self._is_closed:
            raise CallCancelledError("the client was closed")
        link = self._links.get((address, incarnation))
        if link is None:
            link = ClientLink(self, address, incarnation)
            link.dial(self._dial)
            self._links[address, incarnation] = link
        return link

    def forget(self, link: ClientLink) -> None:
        key = link.address, link.core.to
        if self._links.get(key) is link:
            del self._links[key]

    @property
    def num_calls(self) -> int:
        return sum(link.num_calls for link in self._links.values())

    @property
    def num_links(self) -> int:
        return len(self._links)

    def held_calls(self) -> list[HeldCall]:
        return [call for link in self._links.values() for call in link.held()]

    @property
    def due_s(self) -> float:
        return min((link.core.due_s for link in self._links.values()), default=float("inf"))

    def tick(self, now_s: float) -> None:
        for link in list(self._links.values()):
            link.tick(now_s)

    def abort(self, why: str) -> None:
        """Lose every link at once, as if this process had died."""
        for link in list(self._links.values()):
            link.disconnected(why)

    async def close(self) -> None:
        self._is_closed = True
        for link in list(self._links.values()):
            link.close()
        self._on_closed()

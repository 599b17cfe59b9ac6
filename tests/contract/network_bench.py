"""A network under test and what drives it, shared by the contract of all networks and what only ZeroMQ promises."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from common.clock import new_id
from common.keys import Trust, create, load
from common.messages import (
    Incarnation,
    NodeId,
    RequestBody,
    Route,
    Tokens,
    Watch,
)
from common.rpc.base import Handler, IncomingCall, OutgoingCall
from common.rpc.call import LinkTimes
from common.rpc.client import ClientEndpoint
from common.rpc.link import ZmqNetwork
from common.rpc.memory import MemoryNetwork
from common.rpc.server import ServerEndpoint

QUICK = LinkTimes(beat_s=0.1, lost_after_s=2.0, connect_timeout_s=1.0, accept_timeout_s=2.0)
ROUTE = Route("model", 1)
T = TypeVar("T")


def new_trust(folder: Path) -> Trust:
    """Keys that nobody else has."""
    create(folder)
    return Trust(keys=load(folder))


class Bench:
    """A network under test, and what a test needs to drive it."""

    def __init__(self, kind: str, folder: Path) -> None:
        """`kind`: memory, tcp, ipc, or one of the last two with " and keys"."""
        transport, _, with_keys = kind.partition(" and ")
        self.trust = new_trust(folder / "keys") if with_keys else Trust()
        self.network: ZmqNetwork | MemoryNetwork = (
            MemoryNetwork(times=QUICK) if transport == "memory" else ZmqNetwork(times=QUICK, trust=self.trust)
        )
        self.address = f"ipc://{folder}/calls" if transport == "ipc" else "tcp://127.0.0.1:0"
        self.client = self.new_client()

    def new_client(self) -> ClientEndpoint:
        return self.network.client(node=NodeId("caller"), incarnation=Incarnation(new_id()))

    async def serve(self, watch: Handler, route: Handler | None = None, *, address: str = "") -> ServerEndpoint:
        handlers: dict[type, Handler] = {Watch: watch} if route is None else {Watch: watch, Route: route}
        return await self.network.serve(
            address or self.address, handlers, node=NodeId("callee"), incarnation=Incarnation(new_id())
        )

    async def until(self, condition: Callable[[], bool], within_s: float = 60.0) -> None:
        """Wait for what no event tells: the other side's books. In memory this is what moves the clock."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + within_s
        while not condition():
            if isinstance(self.network, MemoryNetwork):
                await self.network.advance(0.05)
            else:
                turn = loop.create_future()
                loop.call_later(0.002, turn.set_result, None)
                await turn
            assert loop.time() < end_s, "it never came true"

    async def result(self, work: Awaitable[T]) -> T:
        task = asyncio.ensure_future(work)
        await self.until(task.done)
        return task.result()

    async def enter(
        self, address: str, body: RequestBody | None = None, *, incarnation: Incarnation | None = None
    ) -> OutgoingCall:
        """A call that the test holds open until it `leave`s it."""
        return await self.result(self.client.open(address, body or Watch(), incarnation=incarnation).__aenter__())

    def kill(self, server: ServerEndpoint) -> None:
        """Its connections break without a word, as when its process is killed."""
        if isinstance(self.network, MemoryNetwork):
            self.network.kill(server.address)
        else:
            server.listener.close()
            server.abort("killed")


def descriptors_and_threads() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


class Held:
    """A handler that waits until it is cancelled, and tells when it has cleaned up."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.ended = asyncio.Event()

    async def __call__(self, call: IncomingCall) -> None:
        self.started.set()
        call.send(Tokens([0]))
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.set()


async def count_to_five(call: IncomingCall) -> None:
    for number in range(5):
        call.send(Tokens([number]))
        if number % 2:
            await asyncio.sleep(0)


async def leave(call: OutgoingCall) -> None:
    await call.__aexit__(None, None, None)


async def drain(call: OutgoingCall) -> list[int]:
    return [token async for item in call if isinstance(item, Tokens) for token in item.tokens]


async def ask(client: ClientEndpoint, address: str) -> list[int]:
    async with client.open(address, Watch()) as call:
        return await drain(call)

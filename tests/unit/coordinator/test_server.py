"""The coordinator's shell over an in-process network."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from common.config import CoordinatorConfig
from common.errors import ModelNotFoundError, UnavailableError
from common.messages import (
    GatewayCard,
    Incarnation,
    NodeId,
    NodeLoad,
    Register,
    Registered,
    Report,
    Route,
    Routed,
    View,
    Watch,
)
from common.rpc.base import Client, OutgoingCall
from common.rpc.memory import MemoryNetwork
from coordinator.server import Coordinator
from tests.unit.coordinator.core.cards import OTHER_LAYOUT, make_card

ADDRESS = CoordinatorConfig().listen


class Room:
    """A coordinator that answers at ADDRESS, and clients to call it."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.coordinator = Coordinator(clock=self.network.clock)

    def client(self, name: str) -> Client:
        return self.network.client(node=NodeId(name), incarnation=Incarnation(f"{name}/1"))

    async def wait(self, seconds: float = 0.0) -> None:
        """Let time pass, ticks included, and everything settle."""
        await self.network.advance(seconds)
        self.coordinator.tick()
        await self.network.settle()


@pytest.fixture
async def room() -> AsyncIterator[Room]:
    room = Room()
    server = await room.coordinator.listen(ADDRESS, room.network)
    yield room
    await room.wait()
    assert server.num_calls == 0
    assert room.coordinator.state.view() == View()
    await room.network.close()


@asynccontextmanager
async def registered(room: Room, name: str, **fields: object) -> AsyncIterator[tuple[OutgoingCall, Registered]]:
    client = room.client(name)
    async with client.open(ADDRESS, Register(make_card(name, **fields))) as call:
        item = await anext(aiter(call))
        assert isinstance(item, Registered)
        yield call, item
    await client.close()


async def ask(room: Room, body: Route) -> Routed:
    client = room.client("gateway")
    try:
        async with client.open(ADDRESS, body) as call:
            [item] = [item async for item in call]
            assert isinstance(item, Routed)
            return item
    finally:
        await client.close()


async def test_a_pair_of_registered_nodes_is_routed_to(room: Room) -> None:
    async with registered(room, "decode-0") as (_, told), registered(room, "prefill-0"):
        assert told == Registered()
        routed = await ask(room, Route("tiny", 10))
        assert routed.prefill is not None
        assert (routed.prefill.address, routed.decode.address) == ("tcp://prefill-0", "tcp://decode-0")


async def test_a_node_is_forgotten_when_its_call_ends(room: Room) -> None:
    async with registered(room, "decode-0"):
        await ask(room, Route("tiny", 10))
    await room.wait()
    with pytest.raises(UnavailableError) as refusal:
        await ask(room, Route("tiny", 10))
    assert refusal.value.retry_after_s == 1.0


async def test_a_refusal_reaches_the_asker_as_its_own_error(room: Room) -> None:
    async with registered(room, "decode-0"):
        with pytest.raises(ModelNotFoundError, match="there is tiny"):
            await ask(room, Route("huge", 10))


async def test_a_node_that_does_not_fit_is_told(room: Room) -> None:
    async with registered(room, "decode-0"), registered(room, "decode-1", layout=OTHER_LAYOUT) as (_, told):
        assert "block_size 32 here, 16 there" in told.reason


async def test_a_watcher_sees_reports_and_losses(room: Room) -> None:
    watcher = room.client("status")
    async with watcher.open(ADDRESS, Watch()) as watch:
        views = aiter(watch)
        assert await anext(views) == View()
        async with registered(room, "decode-0") as (call, _):
            await room.wait(1)
            seen = await anext(views)
            assert isinstance(seen, View)
            assert [node.card.node for node in seen.nodes] == ["decode-0"]
            call.send(Report(NodeLoad(num_running=3)))
            await room.wait(1)
            seen = await anext(views)
            assert isinstance(seen, View)
            assert seen.nodes[0].load.num_running == 3
        await room.wait(1)
        assert await anext(views) == View()
    await watcher.close()


async def test_a_node_that_falls_silent_is_not_routed_to(room: Room) -> None:
    async with registered(room, "decode-0"):
        for _ in range(7):
            await room.wait(0.5)
        with pytest.raises(UnavailableError, match="1 stalled"):
            await ask(room, Route("tiny", 10))


async def test_a_gateway_is_in_view_while_its_watch_is_open(room: Room) -> None:
    card = GatewayCard(NodeId("gateway"), Incarnation("gateway/1"), "tcp://gateway", "http://gateway")
    gateway = room.client("gateway")
    async with gateway.open(ADDRESS, Watch(card)) as watch:
        await anext(aiter(watch))
        assert room.coordinator.state.view() == View(gateways=(card,))
    await gateway.close()
    await room.wait()
    assert room.coordinator.state.view() == View()


async def test_a_node_that_says_it_drains_is_not_routed_to(room: Room) -> None:
    async with registered(room, "decode-0") as (call, _):
        call.send(Report(NodeLoad(free_blocks=100, is_draining=True)))
        await room.wait()
        with pytest.raises(UnavailableError, match="1 draining"):
            await ask(room, Route("tiny", 10))

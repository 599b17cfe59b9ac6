"""A node's standing with a coordinator ends when it is told to, whatever happens at that moment."""

import asyncio

import pytest

from common.clock import ManualClock
from common.kv_cache.cache_news import OfferedNames
from common.messages import Incarnation, NodeId, NodeLoad, Register
from common.rpc.base import IncomingCall
from common.rpc.memory import MemoryNetwork
from common.rpc.registration import stay_registered
from tests.unit.coordinator.core.cards import make_card


async def served(call: IncomingCall) -> None:
    async for _ in call:
        pass


@pytest.mark.parametrize("turns", range(8))
async def test_it_can_be_cancelled_at_any_turn_after_the_coordinator_died(turns: int) -> None:
    network = MemoryNetwork(clock=ManualClock())
    coordinator = Incarnation("c" * 32)
    server = await network.serve("tcp://c:1", {Register: served}, node=NodeId("c"), incarnation=coordinator)
    client = network.client(node=NodeId("n"), incarnation=Incarnation("n" * 32))
    standing = asyncio.create_task(
        stay_registered(client, "tcp://c:1", make_card("decode-0"), NodeLoad, OfferedNames(), report_s=100.0)
    )
    await network.settle()
    assert server.num_calls == 1
    network.kill(coordinator)
    for _ in range(turns):
        await asyncio.sleep(0)
    standing.cancel()
    done, _ = await asyncio.wait([standing], timeout=1.0)
    assert done, "the cancellation was lost"
    await client.close()
    await network.close()

import pytest

from common.errors import PeerLostError
from common.messages import Incarnation, NodeId, Register, View
from common.rpc.memory import MemoryNetwork
from coordinator.cli.status import DEFAULT_COORDINATOR, each_view
from coordinator.server import Coordinator
from tests.unit.coordinator.core.cards import make_card


async def test_views_are_shown_until_enough_is_seen() -> None:
    network = MemoryNetwork()
    coordinator = Coordinator(clock=network.clock)
    await coordinator.listen(DEFAULT_COORDINATOR, network)
    node = network.client(node=NodeId("decode-0"), incarnation=Incarnation("i"))
    shown: list[View] = []
    async with node.open(DEFAULT_COORDINATOR, Register(make_card("decode-0"))):
        await each_view(network, DEFAULT_COORDINATOR, lambda view: shown.append(view) or False, timeout_s=9)  # type: ignore[func-returns-value]
    assert [[node.card.node for node in view.nodes] for view in shown] == [["decode-0"]]
    await network.close()


async def test_without_a_coordinator_the_peer_is_lost() -> None:
    network = MemoryNetwork()
    with pytest.raises(PeerLostError):
        await each_view(network, DEFAULT_COORDINATOR, lambda _: False, timeout_s=9)
    await network.close()

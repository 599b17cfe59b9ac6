"""The coordinator is on no token's path and holds nothing that a restart could lose."""

import asyncio

from common.errors import OverloadedError
from common.messages import NodeState
from tests.caller import Answer, Caller
from tests.cluster.cluster import TIMES, Cluster
from tests.cluster.test_one_request import prompt
from tests.cluster.test_warm_prefixes import ask, is_known_to_be_warm, names_of, pair_of, warm


async def test_a_restarted_coordinator_knows_every_node_again_without_their_help(cluster: Cluster) -> None:
    await cluster.start_pools(prefill=2, decode=2)
    for salt in range(3):
        await cluster.restart_coordinator()
        await cluster.until(lambda: len(cluster.coordinator.state.view().nodes) == 4)
        answer = await cluster.asks_rightly(prompt(40, salt))
        assert answer.routed is not None
        assert answer.routed.prefill is not None


async def test_streams_in_flight_do_not_notice_a_coordinator_that_dies(cluster: Cluster) -> None:
    await cluster.start_pools()
    cluster.faults.hold()
    asking = asyncio.create_task(cluster.asks_rightly(prompt(40), 60))
    await cluster.faults.held.wait()
    await cluster.restart_coordinator()
    cluster.faults.release()
    await asking
    await cluster.until(lambda: len(cluster.coordinator.state.view().nodes) == 2)


async def test_a_restarted_coordinator_sends_a_prefix_where_it_is_warm(cluster: Cluster) -> None:
    await cluster.start_pools(prefill=2, decode=2)
    await warm(cluster, prompt(500))
    await cluster.restart_coordinator()
    await is_known_to_be_warm(cluster, names_of(cluster, prompt(500)))
    answer = await ask(cluster, prompt(500) + prompt(100, 1))
    assert pair_of(answer) == ("prefill-1", "decode-1")
    assert cluster.nodes["prefill-1"].brake.num_tokens == 500 + 600 - 496
    assert answer.last is not None
    assert answer.last.cached_tokens >= 496


async def test_after_a_frozen_coordinator_thaws_it_lists_all_nodes_again_without_their_help(cluster: Cluster) -> None:
    await cluster.start_pools(prefill=1, decode=1)
    await cluster.asks_rightly(prompt(40))
    before = connections(cluster)
    cluster.network.freeze(cluster.coordinator_incarnation)
    # Long enough for the nodes to give it up, and to have tried in vain to come back.
    thaws_s = cluster.clock.now_s() + 2 * (TIMES.lost_after_s + TIMES.connect_timeout_s)
    await cluster.until(lambda: cluster.clock.now_s() > thaws_s)
    cluster.network.unfreeze(cluster.coordinator_incarnation)
    await cluster.until(lambda: all_ready(cluster, 2) and connections(cluster).isdisjoint(before), within_s=2.0)
    await cluster.asks_rightly(prompt(40, 1))


async def test_a_node_that_was_killed_is_not_routed_to_any_more(cluster: Cluster) -> None:
    await cluster.start_pools(prefill=1, decode=2)
    await cluster.kill("decode-0")
    await cluster.until(lambda: all_ready(cluster, 2), within_s=1.0)
    for salt in range(10):
        answer = await cluster.asks_rightly(prompt(20, salt))
        assert pair_of(answer) == ("prefill-0", "decode-1")


async def test_two_coordinators_share_a_burst_evenly_and_the_nodes_own_bounds_hold(cluster: Cluster) -> None:
    second = await cluster.second_coordinator()
    await cluster.start_pools(prefill=0, decode=2, max_running=1, max_waiting=6)
    await cluster.until(lambda: len(second.state.view().nodes) == 2)
    for node in cluster.nodes.values():
        node.brake.hold_after(0)
    callers = [Caller(cluster.caller.client, address) for address in cluster.coordinators]
    routed = [await callers[turn % 2].route("fake", 40) for turn in range(40)]
    asks = [asyncio.create_task(callers[turn % 2].ask(prompt(40, turn), 20, routed=routed[turn])) for turn in range(40)]
    shares = [sum(pair.decode.node == name for pair in routed) for name in cluster.nodes]
    assert max(shares) - min(shares) <= 4
    # Each node takes what its engine holds and what may queue, and refuses the rest at once.
    await cluster.until(lambda: sum(ask.done() for ask in asks) >= 40 - 2 * 8)
    for node in cluster.nodes.values():
        assert 6 <= node.load.num_calls <= 8
        node.brake.release()
    results = await asyncio.gather(*asks, return_exceptions=True)
    served = [turn for turn, result in enumerate(results) if isinstance(result, Answer)]
    assert all(isinstance(result, Answer | OverloadedError) for result in results)
    assert 12 <= len(served) <= 16
    for turn in served:
        answer = results[turn]
        assert isinstance(answer, Answer)
        assert answer.tokens == cluster.expected(prompt(40, turn), 20)
    for state in (cluster.coordinator.state, second.state):
        await cluster.until(lambda state=state: all(node.load.num_calls == 0 for node in state.view().nodes))


def connections(cluster: Cluster) -> set[int]:
    """On which the coordinator hears its nodes."""
    return {node.connection for node in cluster.coordinator.state._nodes.values()}


def all_ready(cluster: Cluster, num_nodes: int) -> bool:
    nodes = cluster.coordinator.state.view().nodes
    return len(nodes) == num_nodes and all(node.state is NodeState.READY for node in nodes)

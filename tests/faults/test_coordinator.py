"""The coordinator is on no token's path and holds nothing that a restart could lose."""

import asyncio

from tests.cluster.cluster import Cluster
from tests.cluster.test_one_request import prompt


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

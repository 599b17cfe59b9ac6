"""Prompts that the decode node computes because they would wait too long for prefill."""

import asyncio
from collections import Counter

from common.messages import NodeId
from coordinator.core.policy import Candidate
from tests.caller import Answer
from tests.cluster.cluster import Cluster
from tests.cluster.test_one_request import prompt


def known(cluster: Cluster, name: str) -> Candidate:
    """A node as the coordinator knows it."""
    return cluster.coordinator.state._nodes[NodeId(name)].candidate()


async def pair_with_known_speed(cluster: Cluster) -> None:
    """One prefill and one decode node; a prompt goes home if it would wait at all, and be sooner there."""
    cluster.home_after_s = 1e-9
    await cluster.restart_coordinator()
    await cluster.start_pools(num_blocks=512)
    await cluster.asks_rightly(prompt(100))
    await is_idle(cluster)


async def is_idle(cluster: Cluster) -> None:
    """And known to be: nothing waits at prefill, whose speed has been seen."""

    def idle() -> bool:
        prefill = known(cluster, "prefill-0")
        return prefill.load.prompt_tokens_per_s > 0 and prefill.waiting_tokens == 0

    await cluster.until(idle)


def why(answer: Answer) -> str:
    assert answer.routed is not None
    return answer.routed.why


async def test_a_prompt_behind_a_queue_at_prefill_is_answered_at_home_meanwhile(cluster: Cluster) -> None:
    await pair_with_known_speed(cluster)
    prefill = cluster.nodes["prefill-0"].brake
    prefill.hold_after(0)
    long = asyncio.create_task(cluster.asks_rightly(prompt(400, 1)))
    await cluster.until(lambda: known(cluster, "prefill-0").load.num_waiting_tokens >= 400)
    short = await cluster.asks_rightly(prompt(40, 2))
    assert why(short) == "home-faster"
    assert short.last is not None
    assert short.last.path == "home"
    assert not long.done()
    prefill.release()
    assert why(await long) == "least-loaded"
    await is_idle(cluster)
    assert why(await cluster.asks_rightly(prompt(40, 3))) == "least-loaded", "prefill is idle again"


async def test_a_burst_is_split_and_every_answer_is_that_of_one_engine(cluster: Cluster) -> None:
    await pair_with_known_speed(cluster)
    brakes = [node.brake for node in cluster.nodes.values()]
    for brake in brakes:
        brake.hold_after(0)  # nobody's speed changes while the burst is routed
    asking = [asyncio.create_task(cluster.asks_rightly(prompt(100, salt))) for salt in range(1, 33)]
    await cluster.until(lambda: cluster.nodes["decode-0"].load.num_calls == len(asking))
    for brake in brakes:
        brake.release()
    split = Counter(map(why, await asyncio.gather(*asking)))
    assert set(split) == {"least-loaded", "home-faster"}
    assert 6 <= split["home-faster"] <= 12

"""Pools too small for what is asked of them, and requests that are wrong: everybody else is served rightly."""

import asyncio
import random

import pytest

from common.errors import ContextLengthError, InternalError, OverloadedError, RequestError
from common.messages import Role
from tests.caller import Answer
from tests.cluster.cluster import Cluster
from tests.cluster.test_one_request import LENGTHS, prompt


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize(("num_prefill", "num_decode"), [(1, 1), (2, 2), (0, 1), (0, 2)])
async def test_all_at_once_in_pools_that_force_pre_emption(
    cluster: Cluster, num_prefill: int, num_decode: int, prefix_cache: bool
) -> None:
    await cluster.start_pools(prefill=num_prefill, decode=num_decode, num_blocks=16, prefix_cache=prefix_cache)
    asks = [cluster.asks_rightly(prompt(length, salt), 40) for salt in range(3) for length in LENGTHS]
    await asyncio.gather(*asks)
    stats = [node.host.engine.stats() for node in cluster.nodes.values()]
    assert sum(stat.num_preemptions for stat in stats) > 0


async def test_a_decode_pool_of_one_request_serves_ten(cluster: Cluster) -> None:
    await cluster.start(Role.PREFILL, "prefill-0")
    await cluster.start(Role.DECODE, "decode-0", num_blocks=9)
    await asyncio.gather(*[cluster.asks_rightly(prompt(90, salt), 40) for salt in range(10)])


async def test_a_prefill_pool_of_one_prompt_serves_ten(cluster: Cluster) -> None:
    await cluster.start(Role.PREFILL, "prefill-0", num_blocks=7)
    await cluster.start(Role.DECODE, "decode-0")
    await asyncio.gather(*[cluster.asks_rightly(prompt(90, salt)) for salt in range(10)])


async def test_callers_that_leave_at_any_moment_leave_nothing(cluster: Cluster) -> None:
    await cluster.start_pools(num_blocks=24, max_step_tokens=32)
    chance = random.Random(0)

    async def asks_for_a_while(salt: int) -> None:
        try:
            async with asyncio.timeout(chance.random() * 0.15):
                await cluster.asks_rightly(prompt(chance.choice(LENGTHS), salt), 60)
        except TimeoutError:
            pass

    for round in range(4):
        await asyncio.gather(*[asks_for_a_while(round * 25 + salt) for salt in range(25)])
        await cluster.is_empty()
    await cluster.asks_rightly(prompt(64))


async def test_a_request_that_could_never_fit_is_refused_and_harms_nobody(cluster: Cluster) -> None:
    await cluster.start_pools(num_blocks=8)
    running = asyncio.create_task(cluster.asks_rightly(prompt(40), 60))
    with pytest.raises(ContextLengthError, match="holds 128"):
        await cluster.ask(prompt(100), 60)
    await running


@pytest.mark.parametrize("wrong", [[], [5, -1], [5, 10**9], [10**6]])
async def test_a_wrong_prompt_fails_alone(cluster: Cluster, wrong: list[int]) -> None:
    await cluster.start_pools()
    running = asyncio.create_task(cluster.asks_rightly(prompt(40), 60))
    with pytest.raises(RequestError):
        await cluster.ask(wrong)
    await running


async def test_an_engine_that_fails_says_so_and_recovers(cluster: Cluster) -> None:
    await cluster.start_pools(prefill=0)
    brake = cluster.nodes["decode-0"].brake
    brake.fail = "a bad step"
    with pytest.raises(InternalError, match="a bad step"):
        await cluster.ask(prompt(40))
    brake.fail = ""
    await cluster.asks_rightly(prompt(40))


async def test_a_prefill_engine_that_fails_is_made_up_for_at_home(cluster: Cluster) -> None:
    await cluster.start_pools()
    cluster.nodes["prefill-0"].brake.fail = "a bad step"
    await cluster.asks_rightly(prompt(40))


async def test_a_prefill_pool_smaller_than_prompt_and_answer_serves_the_prompt(cluster: Cluster) -> None:
    await cluster.start(Role.PREFILL, "prefill-0", num_blocks=4)
    await cluster.start(Role.DECODE, "decode-0", num_blocks=16)
    await cluster.asks_rightly(prompt(60), 100)
    assert cluster.nodes["prefill-0"].brake.num_tokens == 60


async def test_beyond_the_queue_a_node_refuses_at_once_and_the_queue_is_served(cluster: Cluster) -> None:
    await cluster.start_pools(prefill=0, num_blocks=6, max_running=1, max_waiting=3)
    asks = [asyncio.create_task(cluster.asks_rightly(prompt(40, salt), 40)) for salt in range(12)]
    results = await asyncio.gather(*asks, return_exceptions=True)
    refused = [result for result in results if isinstance(result, OverloadedError)]
    served = [result for result in results if isinstance(result, Answer)]
    assert len(refused) + len(served) == 12
    assert all(error.retry_after_s for error in refused)
    assert len(served) >= 3, "they came in one turn of the loop, before the engine could take any"


async def test_a_pool_smaller_than_the_models_context_is_what_a_node_promises(cluster: Cluster) -> None:
    await cluster.start_pools(prefill=0, num_blocks=8)
    [view] = (await cluster.caller.view()).nodes
    assert view.card.max_model_len == 128
    await cluster.asks_rightly(prompt(100), 28)

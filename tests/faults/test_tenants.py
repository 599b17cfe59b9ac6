"""Tenants in one cluster: no one's prefix helps another, no one's prompts keep another waiting, queues end."""

import asyncio

from common.errors import OverloadedError
from common.messages import Origin, Priority, Role, Sampling
from tests.caller import Answer
from tests.cluster.cluster import Cluster, Node
from tests.cluster.test_one_request import prompt

A, B = Origin(b"tenant a"), Origin(b"tenant b")


async def ask(cluster: Cluster, tokens: list[int], origin: Origin, max_tokens: int = 4) -> Answer:
    sampling = Sampling(max_tokens=max_tokens, seed=7, temperature=0.0)
    answer = await cluster.caller.ask(tokens, max_tokens, sampling=sampling, origin=origin)
    assert answer.tokens == cluster.expected(tokens, max_tokens)
    return answer


async def cached(cluster: Cluster, tokens: list[int], origin: Origin) -> int:
    answer = await ask(cluster, tokens, origin)
    assert answer.last is not None
    return answer.last.cached_tokens


async def test_another_tenants_equal_prompt_finds_nothing_in_either_pool(cluster: Cluster) -> None:
    """Case 60."""
    await cluster.start_pools()
    prefill = cluster.nodes["prefill-0"].brake
    assert await cached(cluster, prompt(64), A) == 0
    assert await cached(cluster, prompt(64), A) == 48, "at the decode node"
    assert await cached(cluster, prompt(64), B) == 0
    assert prefill.num_tokens == 128, "computed again, from its first token on: as slow as cold"
    await cluster.stop("decode-0")
    await cluster.start(Role.DECODE, "decode-1")
    assert await cached(cluster, prompt(64), A) == 48, "at the prefill node"
    assert await cached(cluster, prompt(64), Origin()) == 0
    assert await cached(cluster, prompt(64), B) == 48, "its own, by now"


async def test_a_decode_node_that_computes_prompts_itself_keeps_tenants_apart_too(cluster: Cluster) -> None:
    await cluster.start_pools(prefill=0)
    found = [await cached(cluster, prompt(64), origin) for origin in (A, A, B, B)]
    assert found == [0, 48, 0, 48]


async def test_a_short_chat_does_not_wait_behind_another_tenants_long_prompts(cluster: Cluster) -> None:
    """Case 61: B's first token comes within three steps, where an idle cluster needs one."""
    await cluster.start_pools(num_blocks=1500)
    prefill = cluster.nodes["prefill-0"]
    prefill.brake.hold_after(1)
    longs = [asyncio.create_task(ask(cluster, prompt(1000, salt), A)) for salt in range(20)]
    await cluster.until(lambda: prefill.host.engine.num_waiting()[1] > 19_000)
    short = asyncio.create_task(ask(cluster, prompt(30), B))
    await cluster.until(lambda: prefill.load.num_calls == 21)
    num_steps = len(prefill.brake.plans)
    prefill.brake.release()
    await short
    [first] = [
        index
        for index, plan in enumerate(prefill.brake.plans)
        if any(chunk.request.origin == B and chunk.samples for chunk in plan.chunks)
    ]
    assert first - num_steps + 1 < 3
    assert not all(task.done() for task in longs), "or it was no contest"
    await asyncio.gather(*longs)


async def test_beyond_the_bound_requests_are_refused_at_once_and_the_others_finish(cluster: Cluster) -> None:
    """Case 68: a queue of 10, 50 requests, and an engine that takes its time."""
    await cluster.start_pools(prefill=0, num_blocks=200, max_waiting=10)
    brake = cluster.nodes["decode-0"].brake
    brake.hold_after(0)
    tasks = [asyncio.create_task(ask(cluster, prompt(40, salt), A)) for salt in range(50)]
    # Nine of class normal, and those of them that had joined the held step before the others came.
    await cluster.until(lambda: sum(task.done() for task in tasks) >= 50 - 2 * 9)
    refused = [task.exception() for task in tasks if task.done()]
    assert all(isinstance(error, OverloadedError) and (error.retry_after_s or 0) >= 1 for error in refused)
    brake.release()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    answers = [result for result in results if isinstance(result, Answer)]
    assert len(answers) + sum(isinstance(result, OverloadedError) for result in results) == 50
    assert len(answers) >= 9


async def is_refused(cluster: Cluster, node: Node, task: "asyncio.Task[Answer]") -> bool:
    known = node.host.engine.num_waiting()
    await cluster.until(lambda: task.done() or node.host.engine.num_waiting() != known)
    return task.done()


async def test_tokens_bound_a_queue_as_requests_do_and_high_ones_may_fill_it_further(cluster: Cluster) -> None:
    await cluster.start_pools(prefill=0, num_blocks=200, max_waiting_tokens=500)
    node = cluster.nodes["decode-0"]
    node.brake.hold_after(0)
    taken: dict[Priority, int] = {}
    tasks: list[asyncio.Task[Answer]] = []
    for priority in reversed(Priority):
        for salt in range(30):
            tasks.append(asyncio.create_task(ask(cluster, prompt(50, salt), Origin(b"a", priority))))
            if await is_refused(cluster, node, tasks[-1]):
                break
        taken[priority] = sum(not task.done() for task in tasks)
    assert taken == {Priority.LOW: 5, Priority.NORMAL: 9, Priority.HIGH: 10}
    node.brake.release()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results].count(OverloadedError) == 3

"""One trial at a rate: requests come by chance (Poisson), whether earlier ones were answered or not."""

import asyncio
import random
import time
from dataclasses import dataclass
from itertools import accumulate

import aiohttp

from tests.benchmarks.client import Client, Stream
from tests.benchmarks.peers.objective import Objective
from tests.benchmarks.workloads import Prompts

_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Mix:
    """A trial lasts about `lasts_s`, but has `fewest` to `most` requests."""

    prompt_tokens: int
    max_tokens: int
    lasts_s: float
    fewest: int
    most: int
    objective: Objective

    def num_requests(self, rate: float) -> int:
        return max(self.fewest, min(self.most, round(rate * self.lasts_s)))


async def one_at_a_time(client: Client, mix: Mix, count: int, seed: int) -> bool:
    """Whether requests that meet no other are good: more than half of them."""
    good = 0
    for prompt in Prompts(seed).many(count, mix.prompt_tokens):
        good += mix.objective.is_good(await client.run(prompt, mix.max_tokens))
    return 2 * good > count


async def holds(client: Client, mix: Mix, rate: float, seed: int) -> bool:
    """Whether enough requests are good at so many a second. Ends, and hangs up, as soon as too many are not.

    The same seed brings the same pattern of arrivals at every rate, drawn closer or wider.
    """
    count = mix.num_requests(rate)
    chance = random.Random(seed)
    offsets_s = accumulate(chance.expovariate(rate) for _ in range(count))
    begun_s = time.perf_counter()
    streams = [Stream(0.0) for _ in range(count)]

    async def request(stream: Stream, prompt: list[int], offset_s: float) -> None:
        await asyncio.sleep(max(0.0, begun_s + offset_s - time.perf_counter()))
        try:
            await client.run(prompt, mix.max_tokens, stream)
        except (AssertionError, aiohttp.ClientError):
            stream.arrivals_s.clear()  # refused or broken off: whatever came of it is no answer
            stream.ended_s = time.perf_counter()

    prompts = Prompts(seed).many(count, mix.prompt_tokens)
    tasks = [
        asyncio.create_task(request(stream, prompt, offset_s))
        for stream, prompt, offset_s in zip(streams, prompts, offsets_s, strict=True)
    ]
    try:
        while (running := [task for task in tasks if not task.done()]) and not _is_hopeless(mix, streams):
            await asyncio.wait(running, timeout=_LOOK_S)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return not _is_hopeless(mix, streams)


def _is_hopeless(mix: Mix, streams: list[Stream]) -> bool:
    now_s, objective = time.perf_counter(), mix.objective
    missed = sum(
        not objective.is_good(stream) if stream.ended_s else objective.is_lost(stream, now_s, mix.max_tokens)
        for stream in streams
        if stream.sent_s
    )
    return missed > objective.may_miss(len(streams))

"""What is asked of a cluster. Prompts are token ids drawn at random, never twice the same: nothing is cached that
was not meant to be."""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tests.benchmarks.client import Client, Stream

_FIRST_ID, _LAST_ID = 1_000, 45_000


class Prompts:
    """The same ones for the same `seed`."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def one(self, num_tokens: int) -> list[int]:
        return [self._random.randrange(_FIRST_ID, _LAST_ID) for _ in range(num_tokens)]

    def many(self, count: int, num_tokens: int) -> list[list[int]]:
        return [self.one(num_tokens) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Interruption:
    """Streams that decode, at first among themselves, then with long prompts arriving. Times are the client's."""

    streams: list[Stream]
    longs: list[Stream]
    calm_from_s: float
    longs_from_s: float
    ended_s: float


async def at_once(client: Client, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Stream]:
    return list(await asyncio.gather(*(client.run(prompt, max_tokens) for prompt in prompts)))


async def in_turn(client: Client, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Stream]:
    return [await client.run(prompt, max_tokens) for prompt in prompts]


async def interrupted(
    client: Client,
    prompts: Sequence[Sequence[int]],
    long_prompts: Sequence[Sequence[int]],
    *,
    calm_s: float,
    every_s: float,
    long_max_tokens: int,
) -> Interruption:
    """One stream for each of `prompts`, none of which ends by itself; a long prompt every `every_s` seconds whether
    the last one was answered or not. Ends, and hangs up, when all long ones are answered and the last interval is over.
    """
    streams = [Stream(0.0) for _ in prompts]
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(client.run(prompt, 4_000, stream))
            for prompt, stream in zip(prompts, streams, strict=True)
        ]
        await asyncio.gather(*(stream.first.wait() for stream in streams))
        calm_from_s = time.perf_counter()
        await asyncio.sleep(calm_s)
        longs_from_s = time.perf_counter()
        asking = []
        for number, prompt in enumerate(long_prompts, 1):
            asking.append(group.create_task(client.run(prompt, long_max_tokens)))
            await asyncio.sleep(longs_from_s + number * every_s - time.perf_counter())
        longs = list(await asyncio.gather(*asking))
        ended_s = time.perf_counter()
        for task in tasks:
            task.cancel()
    return Interruption(streams, longs, calm_from_s, longs_from_s, ended_s)

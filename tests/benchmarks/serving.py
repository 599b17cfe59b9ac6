"""Whole clusters under load: disaggregated (one prefill, one decode node, a core each) beside colocated (one node
that does both, with all cores), both of `baton up`, with the demo model, taking turns in one run.

Workloads, all greedy with ignore_eos, prompts as token ids over /v1/completions, streamed:

    W1   1, 8 and 32 requests at once, 256 tokens in, 64 out
    W2   one stream, 128 in, 128 out
    W3L  8 streams decode while a prompt of 1,500 tokens (8 out) arrives every 5 s
    W4   16 requests in turn that share their first 1,000 tokens

Output tokens/s are those between the first request's start and the last one's end. TTFT is what the client waits
for the first text, ITL the time between one piece of text and the next. CPU is in cores; the client's is beside
the others', so that one can see that it limits nobody. What else the machine did meanwhile counts as `others`:
figures taken beside much of it are no good.
"""

import asyncio
import gc
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import uvloop

from common.model.store import Progress
from tests.benchmarks.client import Stream
from tests.benchmarks.deployment import Account, Deployment
from tests.benchmarks.report import median, run_part
from tests.benchmarks.serving_rows import BurstRow, ClusterRow, InterruptedRow, Latency, Result, SharedRow
from tests.benchmarks.serving_tables import tables
from tests.benchmarks.workloads import Prompts, at_once, in_turn, interrupted

KV_CACHE = ("--kv-cache-memory", "512MiB")
CLUSTERS = (
    ("1P1D", ("--prefill", "1", "--decode", "1", *KV_CACHE)),
    ("colocated", ("--prefill", "0", "--decode", "1", *KV_CACHE)),
)


@dataclass(frozen=True, slots=True)
class Burst:
    """A workload of requests that start together."""

    name: str
    streams: int
    prompt_tokens: int
    max_tokens: int
    rounds: int


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of everything. `longs` long prompts come `every_s`, after `calm_s` without."""

    bursts: tuple[Burst, ...]
    calm_s: float
    every_s: float
    longs: int
    sharing: int


FULL = Scale(
    bursts=(
        Burst("W1", 1, 256, 64, 2),
        Burst("W1", 8, 256, 64, 2),
        Burst("W1", 32, 256, 64, 1),
        Burst("W2", 1, 128, 128, 1),
    ),
    calm_s=4.0,
    every_s=5.0,
    longs=4,
    sharing=16,
)
QUICK = Scale(
    bursts=(Burst("W1", 8, 128, 16, 1), Burst("W2", 1, 128, 32, 1)), calm_s=1.5, every_s=3.0, longs=1, sharing=3
)


def measure(quick: bool, progress: Progress) -> Result:
    # Collections would stop the clock of every stream at once.
    gc.freeze()
    gc.disable()
    return uvloop.run(_measure(QUICK if quick else FULL, progress))


async def _measure(scale: Scale, progress: Progress) -> Result:
    async with AsyncExitStack() as resources:
        folder = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="baton-bench-")))
        clusters = []
        for number, (name, flags) in enumerate(CLUSTERS):
            progress("starting the clusters", number, len(CLUSTERS))
            deployment = Deployment(name, *flags, log_dir=folder / name)
            clusters.append(await resources.enter_async_context(deployment))
        for cluster in _each(clusters, "warming up", progress):
            await at_once(cluster.client, Prompts(0).many(8, 128), 8)
        rows = []
        for number, burst in enumerate(scale.bursts, 1):
            rows += await _burst(burst, clusters, progress, seed=1000 * number)
        interruptions = [await _interrupted(scale, cluster) for cluster in _each(clusters, "W3L", progress)]
        shared = [await _shared(scale, cluster) for cluster in _each(clusters, "W4", progress)]
        idle = [await _idle(cluster) for cluster in _each(clusters, "idle", progress)]
        progress("stopping the clusters", None, None)
    return Result(tuple(idle), tuple(rows), tuple(interruptions), tuple(shared))


def _each(clusters: Sequence[Deployment], stage: str, progress: Progress) -> Iterator[Deployment]:
    for number, cluster in enumerate(clusters):
        progress(stage, number, len(clusters))
        yield cluster


async def _burst(burst: Burst, clusters: Sequence[Deployment], progress: Progress, *, seed: int) -> list[BurstRow]:
    """Round by round, the clusters taking turns, each time another one first."""
    done: dict[str, list[tuple[list[Stream], Account]]] = {cluster.name: [] for cluster in clusters}
    for number in range(burst.rounds):
        stage = f"{burst.name}, {burst.streams} at once, round {number + 1} of {burst.rounds}"
        for cluster in _each(clusters if number % 2 == 0 else clusters[::-1], stage, progress):
            prompts = Prompts(seed + number).many(burst.streams, burst.prompt_tokens)
            done[cluster.name].append(await cluster.account(at_once(cluster.client, prompts, burst.max_tokens)))
    return [_burst_row(burst, name, rounds) for name, rounds in done.items()]


def _burst_row(burst: Burst, cluster: str, rounds: list[tuple[list[Stream], Account]]) -> BurstRow:
    streams = [stream for one, _ in rounds for stream in one]
    assert all(stream.num_tokens == burst.max_tokens for stream in streams)
    return BurstRow(
        workload=burst.name,
        cluster=cluster,
        streams=burst.streams,
        prompt_tokens=burst.prompt_tokens,
        max_tokens=burst.max_tokens,
        rounds=burst.rounds,
        output_tokens_per_s=median(
            [
                sum(stream.num_tokens for stream in one)
                / (max(stream.ended_s for stream in one) - min(stream.sent_s for stream in one))
                for one, _ in rounds
            ]
        ),
        ttft=Latency.of([stream.ttft_s for stream in streams]),
        itl=Latency.of([gap_s for stream in streams for gap_s in stream.gaps_s]),
        tokens_per_event=sum(stream.num_tokens for stream in streams)
        / sum(len(stream.arrivals_s) for stream in streams),
        client_request_ms=1e3 * sum(stream.ended_s - stream.sent_s for stream in streams) / len(streams),
        accounts=tuple(account for _, account in rounds),
    )


async def _interrupted(scale: Scale, cluster: Deployment) -> InterruptedRow:
    prompts = Prompts(77)
    long_tokens = 1500
    run, account = await cluster.account(
        interrupted(
            cluster.client,
            prompts.many(8, 128),
            prompts.many(scale.longs, long_tokens),
            calm_s=scale.calm_s,
            every_s=scale.every_s,
            long_max_tokens=8,
        )
    )
    windows = ((run.calm_from_s, run.longs_from_s), (run.longs_from_s, run.ended_s))
    gaps = [[gap for stream in run.streams for gap in stream.gaps_ending_within(*window)] for window in windows]
    rates = [sum(stream.num_within(*window) for stream in run.streams) / (window[1] - window[0]) for window in windows]
    return InterruptedRow(
        cluster=cluster.name,
        streams=len(run.streams),
        long_tokens=long_tokens,
        calm_tokens_per_s=rates[0],
        calm_itl=Latency.of(gaps[0]),
        tokens_per_s=rates[1],
        itl=Latency.of(gaps[1]),
        long_ttft_ms=tuple(1e3 * stream.ttft_s for stream in run.longs),
        account=account,
    )


async def _shared(scale: Scale, cluster: Deployment) -> SharedRow:
    prompts = Prompts(78)
    prefix = prompts.one(1000)
    streams, account = await cluster.account(
        in_turn(cluster.client, [prefix + prompts.one(24) for _ in range(scale.sharing)], 8)
    )
    return SharedRow(
        cluster=cluster.name,
        requests=len(streams),
        shared_tokens=len(prefix),
        first_ttft_ms=1e3 * streams[0].ttft_s,
        later_ttft=Latency.of([stream.ttft_s for stream in streams[1:]]),
        cached_tokens=median([float(stream.cached_tokens) for stream in streams[1:]]),
        account=account,
    )


async def _idle(cluster: Deployment) -> ClusterRow:
    _, account = await cluster.account(asyncio.sleep(2.0))
    return ClusterRow(cluster.name, cluster.ready_s, cluster.memory_bytes(), account)


if __name__ == "__main__":
    run_part(__doc__, measure, tables)

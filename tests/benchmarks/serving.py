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
from tests.benchmarks.deployment import Deployment
from tests.benchmarks.report import run_part
from tests.benchmarks.scenarios import Burst, burst_row, interrupted_row, shared_row
from tests.benchmarks.served import Account, memory
from tests.benchmarks.serving_rows import BurstRow, ClusterRow, Result
from tests.benchmarks.serving_tables import tables
from tests.benchmarks.workloads import Prompts, at_once

KV_CACHE = ("--kv-cache-memory", "512MiB")
CLUSTERS = (
    ("1P1D", ("--prefill", "1", "--decode", "1", *KV_CACHE)),
    ("colocated", ("--prefill", "0", "--decode", "1", *KV_CACHE)),
)


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
        interruptions = [
            await interrupted_row(cluster, Prompts(77), calm_s=scale.calm_s, every_s=scale.every_s, longs=scale.longs)
            for cluster in _each(clusters, "W3L", progress)
        ]
        shared = [await shared_row(cluster, Prompts(78), scale.sharing) for cluster in _each(clusters, "W4", progress)]
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
    return [burst_row(burst, name, rounds) for name, rounds in done.items()]


async def _idle(cluster: Deployment) -> ClusterRow:
    _, account = await cluster.account(asyncio.sleep(2.0))
    return ClusterRow(cluster.name, cluster.ready_s, memory(cluster.processes).pss, account)


if __name__ == "__main__":
    run_part(__doc__, measure, tables)

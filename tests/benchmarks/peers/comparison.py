"""One run of everything: install, start, take turns, stop. What a peer cannot do is said; the rest goes on."""

import asyncio
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from common.model.store import Progress
from tests.benchmarks.deployment import Deployment
from tests.benchmarks.peers import goodput
from tests.benchmarks.peers.base import KV_CACHE_BYTES, Peer, Unavailable, load
from tests.benchmarks.peers.figures import Figures, Record
from tests.benchmarks.peers.rate_search import RateSearch
from tests.benchmarks.peers.server import PeerServer
from tests.benchmarks.peers.subject import FAILURES, Subject
from tests.benchmarks.peers.targets import BATON, COLOCATED, best_chunk
from tests.benchmarks.peers.workloads import GOODPUT, Scale, workloads
from tests.benchmarks.served import memory

_LIMIT_S = 300.0
"""For one workload on one server: what takes longer is a failure."""

_SEED = 1000


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be compared. `chunk` 0: the colocated deployment's best chunk size is looked for first."""

    scale: Scale
    only: Sequence[str]
    peers: Sequence[str]
    baton_args: Sequence[str]
    chunk: int


@dataclass(slots=True)
class Comparison:
    """`versions` by server. `swept`: by chunk size of the colocated deployment its (ITL p99, longest TTFT) in W3L."""

    versions: dict[str, str] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    swept: dict[int, tuple[float, float]] = field(default_factory=dict)
    records: dict[str, Record] = field(default_factory=dict)


def install(names: Sequence[str], progress: Progress, result: Comparison) -> list[Peer]:
    """Those that can be had."""
    peers = []
    for name in names:
        peer = load(name)
        try:
            peer.install(progress)
        except Unavailable as error:
            result.unavailable[name] = str(error)
        else:
            peers.append(peer)
    return peers


async def compare(order: Order, peers: Sequence[Peer], progress: Progress, result: Comparison) -> None:
    """Fills in the result, so that what was measured before a Ctrl-C can still be printed."""
    with tempfile.TemporaryDirectory(prefix="baton-bench-peers-") as folder:
        logs = Path(folder)
        chunk = order.chunk or await _sweep(order, logs, progress, result)
        async with AsyncExitStack() as resources:
            subjects = await _start(order, chunk, peers, logs, resources, progress, result)
            result.records = {subject.name: Record() for subject in subjects}
            for name in order.only:
                if name != GOODPUT:
                    await _rounds(name, order.scale, subjects, progress, result)
            if GOODPUT in order.only:
                await _goodput(order.scale, subjects, progress, result)
            for subject in subjects:
                used = memory(subject.served.processes)
                figures = {"pss": float(used.pss), "rss": float(used.rss), "ready_s": subject.served.ready_s}
                result.records[subject.name].add("memory", figures)
            progress("stopping the servers", None, None)


def _deployment(order: Order, logs: Path, *, chunk: int) -> Deployment:
    """`chunk` 0: disaggregated, else colocated with it."""
    flags = ["--kv-cache-memory", str(KV_CACHE_BYTES), *order.baton_args]
    if chunk:
        flags += ["--prefill", "0", "--decode", "1", "--max-step-tokens", str(chunk)]
        return Deployment(COLOCATED, *flags, log_dir=logs / f"colocated-{chunk}")
    return Deployment(BATON, "--prefill", "1", "--decode", "1", *flags, log_dir=logs / "1p1d")


async def _sweep(order: Order, logs: Path, progress: Progress, result: Comparison) -> int:
    """The best chunk size of the colocated deployment."""
    sizes = order.scale.sweep_chunks
    for number, size in enumerate(sizes):
        progress("looking for the colocated deployment's best chunk size", number, len(sizes))
        async with _deployment(order, logs, chunk=size) as served:
            await Subject(served).warm_up()
            figures = await workloads(order.scale)["W3L"](served, _SEED - 1)
        result.swept[size] = (figures["itl_p99"], figures["longest_ttft"])
    return best_chunk([(size, *seen) for size, seen in result.swept.items()], every_s=order.scale.long_every_s)


async def _start(
    order: Order,
    chunk: int,
    peers: Sequence[Peer],
    logs: Path,
    resources: AsyncExitStack,
    progress: Progress,
    result: Comparison,
) -> list[Subject]:
    """One after the other, each put to rest before the next one starts."""
    subjects: list[Subject] = []
    arguments = " ".join(order.baton_args) or "as it comes"
    for size, text in ((0, "one prefill and one decode node"), (chunk, f"one node, steps of {chunk} tokens")):
        progress("starting the servers", len(subjects), len(peers) + 2)
        subject = Subject(await resources.enter_async_context(_deployment(order, logs, chunk=size)))
        result.versions[subject.name] = f"{text}; {arguments}"
        subjects.append(await _put_to_rest(subject, resources))
    for number, peer in enumerate(peers, 2):
        progress("starting the servers", number, len(peers) + 2)
        own = AsyncExitStack()
        try:
            subject = Subject(await own.enter_async_context(PeerServer(peer, log_dir=logs)))
            async with asyncio.timeout(_LIMIT_S):
                await _put_to_rest(subject, own)
        except (Unavailable, *FAILURES) as error:
            await own.aclose()
            result.unavailable[peer.name] = reason(error)
            continue
        resources.push_async_exit(own)
        result.versions[subject.name] = peer.version
        subjects.append(subject)
    return subjects


async def _put_to_rest(subject: Subject, resources: AsyncExitStack) -> Subject:
    await subject.warm_up()
    subject.pause()
    resources.callback(subject.resume)
    return subject


async def _rounds(name: str, scale: Scale, subjects: Sequence[Subject], progress: Progress, result: Comparison) -> None:
    """All servers in turn, as often as there are rounds. Who failed once is out of this workload."""
    workload = workloads(scale)[name]
    for number in range(scale.rounds):
        for subject in _in_turn(subjects, f"{name}, round {number + 1} of {scale.rounds}", progress):
            record = result.records[subject.name]
            if name not in record.failures:
                try:
                    async with asyncio.timeout(_LIMIT_S), subject.awake() as served:
                        record.add(name, await workload(served, _SEED + number))
                except (*FAILURES, ExceptionGroup) as error:
                    record.failures[name] = reason(error)


async def _goodput(scale: Scale, subjects: Sequence[Subject], progress: Progress, result: Comparison) -> None:
    """Each server's search takes one step a round, until all have ended."""
    searches = {subject.name: RateSearch(first=0.5, least=0.1, most=16.0, narrow=scale.narrow) for subject in subjects}
    for subject in _in_turn(subjects, "goodput, one request at a time", progress):
        record = result.records[subject.name]
        try:
            async with asyncio.timeout(_LIMIT_S), subject.awake() as served:
                if not await goodput.one_at_a_time(served.client, scale.mix, 3, _SEED):
                    del searches[subject.name]
                    record.add(GOODPUT, _goodput_figures(0.0))
        except (*FAILURES, ExceptionGroup) as error:
            del searches[subject.name]
            record.failures[GOODPUT] = reason(error)
    step = 0
    while searches:
        step += 1
        for subject in _in_turn([one for one in subjects if one.name in searches], f"goodput, step {step}", progress):
            search, record = searches[subject.name], result.records[subject.name]
            rate = search.next_rate()
            if rate is None:
                del searches[subject.name]
                record.add(GOODPUT, _goodput_figures(search.holds))
                continue
            try:
                async with asyncio.timeout(_LIMIT_S), subject.awake() as served:
                    search.record(rate, held=await goodput.holds(served.client, scale.mix, rate, _SEED + 100 + step))
            except (*FAILURES, ExceptionGroup) as error:
                del searches[subject.name]
                record.failures[GOODPUT] = reason(error)


def _goodput_figures(rate: float) -> Figures:
    return {"requests_per_s": rate}


def _in_turn(subjects: Sequence[Subject], stage: str, progress: Progress) -> Iterator[Subject]:
    for number, subject in enumerate(subjects):
        progress(stage, number, len(subjects))
        yield subject


def reason(error: BaseException) -> str:
    """In one line."""
    if isinstance(error, BaseExceptionGroup):
        return reason(error.exceptions[0])
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, TimeoutError):
        text = f"not done within {_LIMIT_S:.0f} s"
    return text[:200]

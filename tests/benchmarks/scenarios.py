"""Workloads as rows: what one server did with them, in the client's words, with the account of its processes."""

from dataclasses import dataclass

from tests.benchmarks.client import Stream
from tests.benchmarks.report import median
from tests.benchmarks.served import Account, Served
from tests.benchmarks.serving_rows import BurstRow, InterruptedRow, Latency, SharedRow
from tests.benchmarks.workloads import Prompts, in_turn, interrupted


@dataclass(frozen=True, slots=True)
class Burst:
    """A workload of requests that start together."""

    name: str
    streams: int
    prompt_tokens: int
    max_tokens: int
    rounds: int


def burst_row(burst: Burst, cluster: str, rounds: list[tuple[list[Stream], Account]]) -> BurstRow:
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


async def interrupted_row(
    served: Served, prompts: Prompts, *, calm_s: float, every_s: float, longs: int
) -> InterruptedRow:
    """8 streams, alone for `calm_s` seconds, then beside a prompt of 1,500 tokens every `every_s` seconds."""
    long_tokens = 1500
    run, account = await served.account(
        interrupted(
            served.client,
            prompts.many(8, 128),
            prompts.many(longs, long_tokens),
            calm_s=calm_s,
            every_s=every_s,
            long_max_tokens=8,
        )
    )
    windows = ((run.calm_from_s, run.longs_from_s), (run.longs_from_s, run.ended_s))
    gaps = [[gap for stream in run.streams for gap in stream.gaps_ending_within(*window)] for window in windows]
    rates = [sum(stream.num_within(*window) for stream in run.streams) / (window[1] - window[0]) for window in windows]
    return InterruptedRow(
        cluster=served.name,
        streams=len(run.streams),
        long_tokens=long_tokens,
        calm_tokens_per_s=rates[0],
        calm_itl=Latency.of(gaps[0]),
        tokens_per_s=rates[1],
        itl=Latency.of(gaps[1]),
        long_ttft_ms=tuple(1e3 * stream.ttft_s for stream in run.longs),
        account=account,
    )


async def shared_row(served: Served, prompts: Prompts, requests: int) -> SharedRow:
    """Requests in turn that share their first 1,000 tokens."""
    prefix = prompts.one(1000)
    streams, account = await served.account(
        in_turn(served.client, [prefix + prompts.one(24) for _ in range(requests)], 8)
    )
    return SharedRow(
        cluster=served.name,
        requests=len(streams),
        shared_tokens=len(prefix),
        first_ttft_ms=1e3 * streams[0].ttft_s,
        later_ttft=Latency.of([stream.ttft_s for stream in streams[1:]]),
        cached_tokens=median([float(stream.cached_tokens) for stream in streams[1:]]),
        account=account,
    )

"""The serving part's rows in print."""

from collections.abc import Callable, Iterable, Sequence

from tests.benchmarks.report import grid, number
from tests.benchmarks.served import Account
from tests.benchmarks.serving_rows import BurstRow, InterruptedRow, Latency, Result, SharedRow

_LATENCY = ("p50", "p95", "p99", "max")


def tables(result: Result) -> str:
    accounts = [
        *((_burst_name(row), row.cluster, row.accounts) for row in result.bursts),
        *(("W3L", row.cluster, (row.account,)) for row in result.interrupted),
        *(("W4", row.cluster, (row.account,)) for row in result.shared),
        *(("idle", row.cluster, (row.idle,)) for row in result.clusters),
    ]
    return "\n\n".join(
        [
            "; ".join(
                f"{row.cluster}: ready in {row.ready_s:.1f} s, {row.memory_bytes / 1e9:.2f} GB of memory"
                for row in result.clusters
            ),
            _bursts(result.bursts),
            _interrupted(result.interrupted),
            _shared(result.shared),
            _cpu(accounts),
            _phases(result.bursts),
        ]
    )


def _bursts(rows: Sequence[BurstRow]) -> str:
    def line(row: BurstRow) -> tuple[str, ...]:
        return (
            row.workload,
            row.cluster,
            str(row.streams),
            f"{row.prompt_tokens} + {row.max_tokens}",
            number(row.output_tokens_per_s),
            *(number(value, 0) for value in (row.ttft.p50, row.ttft.p95)),
            *_latency(row.itl),
            number(row.tokens_per_event, 2),
        )

    header = ("", "", "streams", "tokens", "output tok/s", "TTFT p50", "p95", "ITL p50", *_LATENCY[1:], "tok/event")
    return "latencies in ms\n" + grid(header, [line(row) for row in rows], left=2)


def _interrupted(rows: Sequence[InterruptedRow]) -> str:
    def lines(row: InterruptedRow) -> Iterable[tuple[str, ...]]:
        name = f"{row.streams} streams alone"
        yield (name, row.cluster, number(row.calm_tokens_per_s), *_latency(row.calm_itl), "")
        ttft = " ".join(number(ms, 0) for ms in row.long_ttft_ms)
        name = f"... with prompts of {row.long_tokens:,}"
        yield (name, row.cluster, number(row.tokens_per_s), *_latency(row.itl), ttft)

    by_window = sorted((line for row in rows for line in lines(row)), key=lambda line: line[0], reverse=True)
    header = ("W3L", "", "output tok/s", "ITL p50", *_LATENCY[1:], "TTFT of the long ones")
    return grid(header, by_window, left=2)


def _shared(rows: Sequence[SharedRow]) -> str:
    lines = [
        (
            f"{row.requests} in turn, {row.shared_tokens:,} tokens shared",
            row.cluster,
            number(row.first_ttft_ms, 0),
            number(row.later_ttft.p50, 0),
            number(row.later_ttft.p95, 0),
            number(row.first_ttft_ms / row.later_ttft.p50),
            number(row.cached_tokens, 0),
        )
        for row in rows
    ]
    return grid(("W4", "", "TTFT first", "later p50", "p95", "first/later", "cached tokens"), lines, left=2)


def _cpu(accounts: Sequence[tuple[str, str, Sequence[Account]]]) -> str:
    """Cores by process."""
    names = list(dict.fromkeys(name for _, _, some in accounts for account in some for name in account.cpu))
    names.sort(key=lambda name: (name == "others", name == "client", name == "up"))

    def share(some: Sequence[Account], name: str) -> float:
        if name not in some[0].cpu:
            return float("nan")
        return sum(one.cpu[name] * one.wall_s for one in some) / sum(one.wall_s for one in some)

    lines = [(work, cluster, *(number(share(some, name), 3) for name in names)) for work, cluster, some in accounts]
    return "CPU in cores\n" + grid(("", "", *names), lines, left=2)


def _phases(rows: Sequence[BurstRow]) -> str:
    """Milliseconds a request: the gateway's phases, their sum, its own and the client's whole; the node's phases."""

    def names(phases: Callable[[Account], dict[str, float]]) -> list[str]:
        return list(dict.fromkeys(name for row in rows for one in row.accounts for name in phases(one)))

    ours, nodes = names(lambda account: account.phases_s), names(lambda account: account.node_phases_s)

    def line(row: BurstRow) -> tuple[str, ...]:
        count = sum(one.num_requests for one in row.accounts)

        def mean_ms(value: Callable[[Account], float]) -> float:
            return 1e3 * sum(value(one) for one in row.accounts) / count

        outer = [mean_ms(lambda one, name=name: one.phases_s.get(name, 0.0)) for name in ours]  # type: ignore[misc]
        inner = [mean_ms(lambda one, name=name: one.node_phases_s.get(name, 0.0)) for name in nodes]  # type: ignore[misc]
        return (
            _burst_name(row),
            row.cluster,
            *(number(ms) for ms in outer),
            number(sum(outer)),
            number(mean_ms(lambda one: one.request_s)),
            number(row.client_request_ms),
            "|",
            *(number(ms) for ms in inner),
            number(sum(inner)),
        )

    header = ("", "", *ours, "sum", "request", "client's", "|", *nodes, "sum")
    title = (
        "phases, ms a request: the gateway's, their sum, the whole as the gateway and as the client saw it | the "
        "decode node's, within waiting and streaming"
    )
    return f"{title}\n{grid(header, [line(row) for row in rows], left=2)}"


def _latency(latency: Latency) -> tuple[str, ...]:
    return tuple(number(getattr(latency, name)) for name in _LATENCY)


def _burst_name(row: BurstRow) -> str:
    return f"{row.workload} x{row.streams}"

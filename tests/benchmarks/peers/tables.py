"""The comparison in print."""

from collections.abc import Callable, Mapping, Sequence

from tests.benchmarks.peers.comparison import Comparison
from tests.benchmarks.peers.figures import Medians
from tests.benchmarks.peers.targets import BATON, Distance, distances
from tests.benchmarks.report import grid, number

_LATENCIES = ("p50", "p95", "p99", "max")


def tables(result: Comparison) -> str:
    medians: Medians = {name: record.medians() for name, record in result.records.items()}
    parts = [
        grid(("server", "what it is"), [*result.versions.items()], left=2),
        _swept(result.swept),
        _bursts(medians),
        _interrupted(medians, "W3L", "8 streams alone, then beside a prompt of 1,500 tokens every 5 s"),
        _interrupted(medians, "W3", "the same, every 1.5 s"),
        _rest(medians),
        _failures(result),
        _distances(distances(medians)),
        _disturbed(result),
    ]
    return "\n\n".join(part for part in parts if part)


def _swept(swept: Mapping[int, tuple[float, float]]) -> str:
    if not swept:
        return ""
    lines = [(f"{size}", number(p99), number(ttft, 0)) for size, (p99, ttft) in swept.items()]
    return "chunk sizes of the colocated deployment, W3L\n" + grid(("tokens a step", "ITL p99", "longest TTFT"), lines)


Row = Callable[[str, Mapping[str, float]], tuple[str, ...]]


def _of(medians: Medians, workload: str, header: Sequence[str], row: Row) -> str:
    lines = [(name, *row(name, figures[workload])) for name, figures in medians.items() if workload in figures]
    return grid((workload, *header), lines) if lines else ""


def _ratio(medians: Medians, workload: str, figure: str, value: float) -> str:
    """Of Baton's to this one."""
    ours = medians.get(BATON, {}).get(workload, {}).get(figure, float("nan"))
    return number(ours / value if value else float("nan"), 2)


def _bursts(medians: Medians) -> str:
    def row(workload: str) -> Row:
        return lambda name, one: (
            number(one["tokens_per_s"]),
            _ratio(medians, workload, "tokens_per_s", one["tokens_per_s"]),
            number(one["ttft_p50"], 0),
            _ratio(medians, workload, "ttft_p50", one["ttft_p50"]),
            *(number(one[f"itl_{place}"]) for place in _LATENCIES),
            _ratio(medians, workload, "itl_p50", one["itl_p50"]),
        )

    ours = "baton/it"
    header = ("tokens/s", ours, "TTFT p50", ours, "ITL p50", *_LATENCIES[1:], f"p50 {ours}")
    title = "medians over rounds; latencies in ms; `baton/it`: the figure of baton 1P1D over this one"
    both = [_of(medians, workload, header, row(workload)) for workload in ("W1", "W2")]
    return "\n\n".join([title, *(table for table in both if table)]) if any(both) else ""


def _interrupted(medians: Medians, workload: str, title: str) -> str:
    def row(name: str, one: Mapping[str, float]) -> tuple[str, ...]:
        return (
            number(one["calm_tokens_per_s"]),
            *(number(one[f"calm_itl_{place}"]) for place in ("p50", "p99")),
            number(one["tokens_per_s"]),
            _ratio(medians, workload, "tokens_per_s", one["tokens_per_s"]),
            *(number(one[f"itl_{place}"]) for place in _LATENCIES),
            _ratio(medians, workload, "itl_p99", one["itl_p99"]),
            number(one["long_ttft"], 0),
        )

    header = ("alone tok/s", "ITL p50", "p99", "| beside tok/s", "baton/it", "ITL p50", *_LATENCIES[1:], "p99 baton/it")
    table = _of(medians, workload, (*header, "long TTFT"), row)
    return f"{title}\n{table}" if table else ""


def _rest(medians: Medians) -> str:
    def shared(name: str, one: Mapping[str, float]) -> tuple[str, ...]:
        share = one["later_ttft"] / one["first_ttft"]
        return (number(one["first_ttft"], 0), number(one["later_ttft"], 0), number(share, 3))

    def goodput(name: str, one: Mapping[str, float]) -> tuple[str, ...]:
        rate = one["requests_per_s"]
        return (number(rate, 2), _ratio(medians, "goodput", "requests_per_s", rate))

    def memory(name: str, one: Mapping[str, float]) -> tuple[str, ...]:
        return (number(one["pss"] / 1e9, 2), number(one["rss"] / 1e9, 2), number(one["ready_s"]))

    parts = [
        _of(medians, "W4", ("TTFT first", "later", "later/first"), shared),
        _of(medians, "goodput", ("requests/s", "baton/it"), goodput),
        _of(medians, "memory", ("PSS GB", "RSS GB", "ready after s"), memory),
    ]
    return "\n\n".join(part for part in parts if part)


def _failures(result: Comparison) -> str:
    lines = [(name, "everything", why) for name, why in result.unavailable.items()]
    lines += [(name, work, why) for name, record in result.records.items() for work, why in record.failures.items()]
    return grid(("not measured", "", "because"), lines, left=3) if lines else ""


def _distances(found: Sequence[Distance]) -> str:
    def line(one: Distance) -> tuple[str, ...]:
        aim = f"{'>=' if one.at_least else '<='} {one.target:g}{'x' if one.against else ''}"
        state = "met" if one.is_met else f"{number(one.factor_missing, 2)}x to go"
        return (one.what, one.against, number(one.ours, 2), number(one.reference, 2), number(one.value, 2), aim, state)

    header = ("target", "beside", "baton 1P1D", "it", "ratio", "aim", "")
    return "distance to the targets\n" + grid(header, [line(one) for one in found], left=2) if found else ""


def _disturbed(result: Comparison) -> str:
    others = [
        one["others"]
        for record in result.records.values()
        for rounds in record.rounds.values()
        for one in rounds
        if "others" in one
    ]
    if not others:
        return ""
    return f"everything else on this machine used up to {number(max(others), 2)} cores meanwhile"

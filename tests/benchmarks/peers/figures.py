"""What each server did in each round of each workload, as plain numbers by name; medians over rounds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.benchmarks.report import median
from tests.benchmarks.serving_rows import BurstRow, InterruptedRow, Latency, SharedRow

Figures = dict[str, float]
"""Latencies in ms, rates in 1/s, memory in bytes. `others` is cores that nobody of ours used."""


@dataclass(slots=True)
class Record:
    """One server's. Failures by workload: what went wrong, once each."""

    rounds: dict[str, list[Figures]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def add(self, workload: str, figures: Figures) -> None:
        self.rounds.setdefault(workload, []).append(figures)

    def medians(self) -> dict[str, Figures]:
        return {workload: _medians(rounds) for workload, rounds in self.rounds.items()}


Medians = Mapping[str, Mapping[str, Mapping[str, float]]]
"""By server, workload and name."""


def _medians(rounds: Sequence[Figures]) -> Figures:
    return {name: median([figures[name] for figures in rounds]) for name in rounds[0]}


def of_burst(row: BurstRow) -> Figures:
    return {
        "tokens_per_s": row.output_tokens_per_s,
        **_latency("ttft", row.ttft),
        **_latency("itl", row.itl),
        "others": max(account.cpu["others"] for account in row.accounts),
    }


def of_interrupted(row: InterruptedRow) -> Figures:
    return {
        "tokens_per_s": row.tokens_per_s,
        "calm_tokens_per_s": row.calm_tokens_per_s,
        **_latency("itl", row.itl),
        **_latency("calm_itl", row.calm_itl),
        "long_ttft": median(row.long_ttft_ms),
        "longest_ttft": max(row.long_ttft_ms),
        "others": row.account.cpu["others"],
    }


def of_shared(row: SharedRow) -> Figures:
    return {
        "first_ttft": row.first_ttft_ms,
        "later_ttft": row.later_ttft.p50,
        "later_ttft_p95": row.later_ttft.p95,
        "cached_tokens": row.cached_tokens,
        "others": row.account.cpu["others"],
    }


def _latency(name: str, latency: Latency) -> Figures:
    return {
        f"{name}_p50": latency.p50,
        f"{name}_p95": latency.p95,
        f"{name}_p99": latency.p99,
        f"{name}_max": latency.max,
    }

"""What the serving part measures, as rows."""

from collections.abc import Sequence
from dataclasses import dataclass

from tests.benchmarks.report import median, quantile
from tests.benchmarks.served import Account


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds."""

    p50: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values_s: Sequence[float]) -> "Latency":
        ms = [1e3 * value for value in values_s]
        return cls(median(ms), quantile(ms, 0.95), quantile(ms, 0.99), max(ms, default=float("nan")))


@dataclass(frozen=True, slots=True)
class BurstRow:
    """All rounds of one burst on one cluster: tokens/s is their median, latencies are pooled, accounts summed."""

    workload: str
    cluster: str
    streams: int
    prompt_tokens: int
    max_tokens: int
    rounds: int
    output_tokens_per_s: float
    ttft: Latency
    itl: Latency
    tokens_per_event: float
    client_request_ms: float
    accounts: tuple[Account, ...]


@dataclass(frozen=True, slots=True)
class InterruptedRow:
    cluster: str
    streams: int
    long_tokens: int
    calm_tokens_per_s: float
    calm_itl: Latency
    tokens_per_s: float
    itl: Latency
    long_ttft_ms: tuple[float, ...]
    account: Account


@dataclass(frozen=True, slots=True)
class SharedRow:
    cluster: str
    requests: int
    shared_tokens: int
    first_ttft_ms: float
    later_ttft: Latency
    cached_tokens: float
    account: Account


@dataclass(frozen=True, slots=True)
class ClusterRow:
    cluster: str
    ready_s: float
    memory_bytes: int
    idle: Account


@dataclass(frozen=True, slots=True)
class Result:
    clusters: tuple[ClusterRow, ...]
    bursts: tuple[BurstRow, ...]
    interrupted: tuple[InterruptedRow, ...]
    shared: tuple[SharedRow, ...]

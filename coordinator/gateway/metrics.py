"""What /metrics shows of the gateway: Prometheus text, in a registry of its own."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from coordinator.gateway import replies
from coordinator.gateway.session import Session
from coordinator.gateway.session_events import SessionStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TOKEN_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)
_REQUEST_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

# A second line for each counter that no dashboard shows.
disable_created_metrics()  # type: ignore[no-untyped-call]


class TokenHistogram(Collector):
    """A histogram observed once a token: a bisection in place of the library's locks and labels."""

    def __init__(self, name: str, documentation: str, buckets: Sequence[float]) -> None:
        self._name = name
        self._documentation = documentation
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[HistogramMetricFamily]:
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*(str(bound) for bound in self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        yield HistogramMetricFamily(self._name, self._documentation, buckets=buckets, sum_value=self._sum)


class GatewayMetrics:
    """One per gateway."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "baton_gateway_requests", "Requests ended (499: the client left)", ("route", "status"), registry=registry
        )
        self.in_flight = Gauge("baton_gateway_requests_in_flight", "Requests being served", registry=registry)
        self.ttft = Histogram(
            "baton_gateway_ttft_seconds",
            "From the request's arrival to its first token",
            buckets=_REQUEST_BUCKETS,
            registry=registry,
        )
        self.itl = TokenHistogram("baton_gateway_itl_seconds", "Between one token and the next", _TOKEN_BUCKETS)
        registry.register(self.itl)
        self.duration = Histogram(
            "baton_gateway_request_seconds",
            "From the request's arrival to its end",
            buckets=_REQUEST_BUCKETS,
            registry=registry,
        )
        self.phase = Counter(
            "baton_gateway_phase_seconds", "Time of requests by phase; the phases add up", ("phase",), registry=registry
        )
        self.node_phase = Counter(
            "baton_gateway_node_phase_seconds",
            "The nodes' own account of the waiting and streaming phases",
            ("phase",),
            registry=registry,
        )
        self.refusals = Counter(
            "baton_refusals", "Requests refused before their first byte, by error code", ("reason",), registry=registry
        )
        self.prompt_tokens = Counter("baton_gateway_prompt_tokens", "Prompt tokens accepted", registry=registry)
        self.cached_tokens = Counter("baton_gateway_cached_tokens", "Prompt tokens found in a cache", registry=registry)
        self.output_tokens = Counter("baton_gateway_output_tokens", "Tokens delivered", registry=registry)
        self.attempts = Counter("baton_gateway_attempts", "Routes asked for, retries included", registry=registry)
        self.failovers = Counter("baton_gateway_failovers", "Attempts made again after a failure", registry=registry)
        self.moves = Counter(
            "baton_gateway_moves", "Attempts made again because their node is being drained", registry=registry
        )
        self.prompts = Counter(
            "baton_prompts",
            "Attempts that brought tokens, by how their prompt was computed",
            ("path",),
            registry=registry,
        )

        self.routes = Counter(
            "baton_routes",
            "Attempts routed, by the rule that decided (see coordinator/core/policy.py)",
            ("why",),
            registry=registry,
        )

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def ended(self, session: Session, *, num_output_tokens: int) -> None:
        """Take a session's account, once it has ended."""
        self.prompt_tokens.inc(len(session.prompt))
        self.cached_tokens.inc(session.cached_tokens)
        self.output_tokens.inc(num_output_tokens)
        self.attempts.inc(session.attempt)
        self.failovers.inc(session.num_failovers)
        self.moves.inc(session.num_moves)
        for entry in session.history:
            if entry.status is SessionStatus.WAITING:  # routed, and why so
                self.routes.labels(entry.why).inc()
        for path in session.paths:
            self.prompts.labels(replies.PATHS.get(path, path)).inc()
        self.duration.observe(session.history[-1].at_s - session.created_s)
        for phase, seconds in session.phases().items():
            self.phase.labels(phase).inc(seconds)
        for phase, seconds in session.node_phases.items():
            self.node_phase.labels(phase).inc(max(0.0, seconds))

"""What a request has to do to count as good, and when a trial is decided. Pure."""

import math
from dataclasses import dataclass

from tests.benchmarks.client import Stream
from tests.benchmarks.report import quantile


@dataclass(frozen=True, slots=True)
class Objective:
    """A request is good if its first token comes in time and so do 95 % of its gaps. `share` of them must be good."""

    ttft_s: float = 1.5
    itl_p95_s: float = 0.060
    share: float = 0.9

    def is_good(self, stream: Stream) -> bool:
        """Of a stream that has ended."""
        return (
            bool(stream.arrivals_s) and stream.ttft_s <= self.ttft_s and quantile(stream.gaps_s, 0.95) <= self.itl_p95_s
        )

    def is_lost(self, stream: Stream, now_s: float, max_tokens: int) -> bool:
        """Whatever a stream that still runs does from now on, it will not be good."""
        if not stream.arrivals_s:
            return now_s - stream.sent_s > self.ttft_s
        # So many that even the smaller one beside the 95th percentile is slow.
        slow = sum(gap_s > self.itl_p95_s for gap_s in stream.gaps_s)
        return stream.ttft_s > self.ttft_s or slow > 0.05 * (max_tokens - 2) + 1

    def may_miss(self, num_requests: int) -> int:
        """How many of so many requests need not be good."""
        return num_requests - math.ceil(self.share * num_requests - 1e-9)

"""The highest rate of requests that still meets an objective. Pure.

The rate doubles until it fails, or halves until it holds, then the gap is halved on a logarithmic scale until it is
narrow. What holds at one rate is taken to hold at every lower one.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class RateSearch:
    """`next_rate`, try it, `record`; until there is none. Rates are requests/s.

    `narrow`: the rate that holds is within this factor of one that fails. No rate outside `least` to `most` is tried.
    """

    first: float
    least: float
    most: float
    narrow: float
    holds: float = 0.0
    """The highest rate that held; 0 if none did."""
    fails: float = float("inf")

    def next_rate(self) -> float | None:
        if self.holds == 0.0:
            rate = self.first if self.fails == float("inf") else self.fails / 2
            return rate if rate >= self.least else None
        if self.fails == float("inf"):
            return self.holds * 2 if self.holds * 2 <= self.most else None
        if self.fails / self.holds <= self.narrow:
            return None
        return float((self.holds * self.fails) ** 0.5)

    def record(self, rate: float, *, held: bool) -> None:
        if held:
            self.holds = max(self.holds, rate)
        else:
            self.fails = min(self.fails, rate)

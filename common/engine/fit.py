"""Costs learned while they are paid: seconds as a sum of non-negative costs, one per feature. Pure.

Least squares over recent observations, older ones weighing less and less. Of all sets of features the smallest is
taken that explains the observations about as well as the best one: what was always seen together is not told apart
by chance.
"""

from collections.abc import Sequence
from itertools import combinations

_KEPT = 0.75
"""Of the weight of what was seen before: a change of speed is followed in about eight observations."""
_TOLERANCE = 1e-4
"""Of the mean squared relative error: a hundredth either way is no reason for one more feature."""
_MOST_GROWTH = 4.0
"""One observation counts at most this much above the estimate: a single stall (page faults, a paused process) must
not shrink the steps that follow to crumbs."""
_SINGULAR = 1e-9


class Fit:
    """`seconds = costs · features`. Of features that explain equally much the first ones are preferred."""

    def __init__(self, scales: Sequence[float]) -> None:
        """`scales`: about how large each feature is when it costs as much as the others."""
        self._scales = scales
        count = len(scales)
        self._sets = [chosen for size in range(1, count + 1) for chosen in combinations(range(count), size)]
        self._sums: dict[bool, _Sums] = {}
        self._costs = [0.0] * count
        self._is_stale = False
        self.is_empty = True

    def observe(self, features: Sequence[float], seconds: float, *, kind: bool = True) -> None:
        """Observations of one kind push out older ones of the same kind only."""
        seconds = min(seconds, self._most(features, seconds))
        x = [feature / scale for feature, scale in zip(features, self._scales, strict=True)]
        if kind not in self._sums:
            self._sums[kind] = _Sums(len(x))
        self._sums[kind].add(x, seconds, weight=1.0 / sum(x) ** 2)
        self._is_stale = True
        self.is_empty = False

    def costs(self) -> list[float]:
        """Seconds per unit of each feature; all 0 before the first observation."""
        if self._is_stale:
            self._costs = [cost / scale for cost, scale in zip(self._solve(), self._scales, strict=True)]
            self._is_stale = False
        return self._costs

    def _most(self, features: Sequence[float], seconds: float) -> float:
        """What an observation may say at most; old costs will do as long as they do not forbid it."""
        if seconds > _MOST_GROWTH * self._expected(self._costs, features):
            expected = self._expected(self.costs(), features)
            return _MOST_GROWTH * expected if expected > 0.0 else seconds
        return seconds

    def _expected(self, costs: Sequence[float], features: Sequence[float]) -> float:
        return sum(cost * feature for cost, feature in zip(costs, features, strict=True))

    def _solve(self) -> list[float]:
        total = _Sums(len(self._scales))
        for sums in self._sums.values():
            total.merge(sums)
        if total.yy <= 0.0:
            return [0.0] * len(self._scales)
        found = [(chosen, costs) for chosen in self._sets if (costs := total.costs(chosen)) is not None]
        errors = [total.error(costs) for _, costs in found]
        enough = min(errors) + _TOLERANCE * total.yy
        return next(costs for (_, costs), error in zip(found, errors, strict=True) if error <= enough)


class _Sums:
    """The normal equations of weighted observations."""

    def __init__(self, count: int) -> None:
        self.xx = [[0.0] * count for _ in range(count)]
        self.xy = [0.0] * count
        self.yy = 0.0

    def add(self, x: Sequence[float], y: float, weight: float) -> None:
        """The first one counts as much as all that could have come before it."""
        weight *= 1.0 if any(map(any, self.xx)) else 1.0 / (1.0 - _KEPT)
        for i, xi in enumerate(x):
            self.xy[i] = self.xy[i] * _KEPT + weight * xi * y
            for j, xj in enumerate(x):
                self.xx[i][j] = self.xx[i][j] * _KEPT + weight * xi * xj
        self.yy = self.yy * _KEPT + weight * y * y

    def merge(self, other: "_Sums") -> None:
        self.yy += other.yy
        for i, row in enumerate(other.xx):
            self.xy[i] += other.xy[i]
            self.xx[i] = [mine + its for mine, its in zip(self.xx[i], row, strict=True)]

    def costs(self, chosen: Sequence[int]) -> list[float] | None:
        """The best costs of these features alone; None if they cannot be told apart or one would be negative."""
        rows = [[*(self.xx[i][j] for j in chosen), self.xy[i]] for i in chosen]
        for at, row in enumerate(rows):
            if row[at] <= _SINGULAR * self.xx[chosen[at]][chosen[at]] or row[at] <= 0.0:
                return None
            rows[at] = row = [value / row[at] for value in row]
            for other, values in enumerate(rows):
                if other != at:
                    rows[other] = [a - values[at] * b for a, b in zip(values, row, strict=True)]
        costs = [0.0] * len(self.xy)
        for i, row in zip(chosen, rows, strict=True):
            costs[i] = row[-1]
        return costs if min(costs) >= 0.0 else None

    def error(self, costs: Sequence[float]) -> float:
        fitted = sum(
            a * sum(b * xx for b, xx in zip(costs, row, strict=True)) for a, row in zip(costs, self.xx, strict=True)
        )
        return self.yy - 2.0 * sum(cost * xy for cost, xy in zip(costs, self.xy, strict=True)) + fitted

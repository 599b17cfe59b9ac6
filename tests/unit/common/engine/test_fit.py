"""Costs are found from noisy observations, and what was never told apart is not invented."""

import itertools
import random
from collections.abc import Sequence

from common.engine.fit import Fit

COSTS = (1e-4, 1e-3, 1e-2, 1e-1)


def test_what_it_expects_is_what_comes() -> None:
    """Nearly: a feature that explains no more than a hundredth is left out, and some point may need it most."""
    errors = []
    for costs in itertools.product(COSTS, repeat=3):
        for seed in range(5):
            rng, fit = random.Random(seed), Fit((1.0, 1.0, 1.0))
            draws = [(rng.uniform(0.2, 1), 1.0, rng.uniform(0.2, 1)) for _ in range(17)]
            for features in draws[:12]:
                fit.observe(features, _seconds(costs, features))
            assert min(fit.costs()) >= 0.0
            errors += [abs(_seconds(fit.costs(), new) / _seconds(costs, new) - 1) for new in draws[12:]]
    errors.sort()
    assert errors[-1] < 0.2
    assert errors[len(errors) * 9 // 10] < 0.05


def _seconds(costs: Sequence[float], features: Sequence[float]) -> float:
    return sum(cost * feature for cost, feature in zip(costs, features, strict=True))


def test_noise_makes_no_cost_negative_and_hides_none() -> None:
    rng, fit = random.Random(5), Fit((64.0, 1.0, 8.0))
    for turn in range(300):
        tokens, decodes = rng.randrange(16, 200) * (turn % 2), rng.randrange(1, 20)
        seconds = (0.02 + 0.002 * decodes + 0.001 * tokens) * rng.uniform(0.9, 1.1)
        fit.observe((tokens, 1.0, decodes), seconds, kind=tokens > 0)
    token_s, start_s, decode_s = fit.costs()
    assert 0.0008 < token_s < 0.0012
    assert abs(start_s + 8 * decode_s - 0.036) < 0.006


def test_what_always_comes_together_counts_as_the_first_of_them() -> None:
    fit = Fit((1.0, 1.0))
    for _ in range(5):
        fit.observe((10.0, 1.0), 0.1)
    assert fit.costs() == [0.01, 0.0]


def test_one_kind_of_observations_does_not_push_out_the_other() -> None:
    fit = Fit((64.0, 1.0))
    fit.observe((100.0, 1.0), 0.15, kind=True)
    for _ in range(500):
        fit.observe((0.0, 1.0), 0.05, kind=False)
    token_s, start_s = fit.costs()
    assert abs(token_s - 0.001) < 1e-6
    assert abs(start_s - 0.05) < 1e-6


def test_nothing_seen_costs_nothing() -> None:
    fit = Fit((1.0, 1.0))
    assert fit.is_empty
    assert fit.costs() == [0.0, 0.0]

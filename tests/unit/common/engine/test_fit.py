"""Costs are found from noisy observations, and what was never told apart is not invented."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.fit import Fit

COST = st.floats(1e-4, 1e-1)


@settings(deadline=None)
@given(COST, COST, COST, st.integers(0, 1000))
def test_what_it_expects_is_what_comes(first: float, second: float, third: float, seed: int) -> None:
    rng, fit = random.Random(seed), Fit((1.0, 1.0, 1.0))

    def draw() -> tuple[tuple[float, float, float], float]:
        features = rng.uniform(0.2, 1), 1.0, rng.uniform(0.2, 1)
        return features, first * features[0] + second * features[1] + third * features[2]

    for _ in range(12):
        fit.observe(*draw())
    assert min(fit.costs()) >= 0.0
    for _ in range(5):
        features, seconds = draw()
        expected = sum(cost * feature for cost, feature in zip(fit.costs(), features, strict=True))
        assert abs(expected - seconds) <= 0.05 * seconds


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

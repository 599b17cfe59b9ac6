"""Whole clusters under faults, seed by seed; `make simulate-faults` runs many more."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.history import run_history

NUM_HISTORIES = 250
CHUNK = 25


@pytest.mark.parametrize("first_seed", range(0, NUM_HISTORIES, CHUNK))
def test_every_request_ends_once_and_right_and_nothing_is_left(first_seed: int) -> None:
    fates: dict[str, int] = {}
    for seed in range(first_seed, first_seed + CHUNK):
        result = run_history(seed)
        assert not result.wrong, f"python -m tests.simulation --replay {seed}"
        for fate, number in result.counts.items():
            fates[fate] = fates.get(fate, 0) + number
    assert fates["finished"] > 0.8 * fates["requests"], "most requests survive what is done to the cluster"
    assert fates["reads"] > fates["requests"] // 3, "most prompts cross from pool to pool"


@pytest.mark.parametrize("seed", range(5))
def test_the_same_seed_is_the_same_history(seed: int) -> None:
    first, again = run_history(seed), run_history(seed)
    assert len(first.log) > 20
    assert first.log == again.log
    assert first.digest != run_history(seed + 100).digest


def test_a_history_is_the_same_in_another_process() -> None:
    program = "from tests.simulation.history import run_history; print(*[run_history(n).digest for n in range(8)])"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONHASHSEED": "12345"},
        capture_output=True,
        text=True,
        timeout=250,
        check=True,
    )
    assert done.stdout.split() == [run_history(seed).digest for seed in range(8)]

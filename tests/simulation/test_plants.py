"""The simulation finds bugs: every one that is planted shows within some histories, which are clean without it."""

import pytest

from tests.simulation.history import Result, run_history
from tests.simulation.plants import PLANTS

FIRST_SEED = 0
MOST_HISTORIES = 300


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_bug_is_caught(name: str) -> None:
    caught = first_caught(name)
    assert caught is not None, f"{MOST_HISTORIES} histories did not show that {name}"
    assert not run_history(caught.seed).wrong, "the same history is clean without it"


def first_caught(name: str) -> Result | None:
    with PLANTS[name]():
        for seed in range(FIRST_SEED, FIRST_SEED + MOST_HISTORIES):
            result = run_history(seed)
            if result.wrong:
                return result
    return None

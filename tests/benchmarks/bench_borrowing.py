"""What a node gains by its neighbour's core while that rests, and what the neighbour loses by lending it.

Gain: the same steps of the demo model on one thread of this process, with and without the core of a second place that
rests, in turns. Loss: a neighbour that decodes a step, rests for `GAP_S` and so on, beside a process that computes
prompts all the time, without borrowing and with it. Wants a quiet machine of two cores or more.
"""

import multiprocessing
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.synchronize import Event

from common.model.store import DEMO, Progress, resolve
from tests.benchmarks.decode_step import Loaded
from tests.benchmarks.machine import seconds
from tests.benchmarks.report import grid, number, quantile, run_part

GAP_S = 0.004
BESIDE = ("nobody", "one that does not borrow", "one that borrows")
_START_S = 300.0


@dataclass(frozen=True, slots=True)
class Gain:
    case: str
    num_seqs: int
    alone_ms: float
    borrowed_ms: float
    faster: float
    """By the medians."""


@dataclass(frozen=True, slots=True)
class Loss:
    beside: str
    p50_ms: float
    p95_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class Result:
    gains: tuple[Gain, ...]
    losses: tuple[Loss, ...]


def measure(quick: bool, progress: Progress) -> Result:
    neighbour = Loaded(resolve(DEMO), "native", "auto")
    losses = []
    for beside in BESIDE:
        progress(f"a node beside {beside}", None, None)
        with _prompts_beside(beside):
            losses.append(_loss(neighbour, beside, 100 if quick else 400))
    progress("a node with and without its neighbour's core", None, None)
    return Result(_gains(neighbour, 5 if quick else 20), tuple(losses))


def _loss(node: Loaded, beside: str, rounds: int) -> Loss:
    _, _, plan = node.cases[0]
    taken_s, gap = [], threading.Event()
    for _ in range(rounds):
        node.runner.rest()
        gap.wait(GAP_S)
        taken_s.append(seconds(partial(node.runner.execute, plan)))
    node.runner.rest()
    return Loss(beside, *(quantile(taken_s, share) * 1e3 for share in (0.5, 0.95, 0.99)))


@contextmanager
def _prompts_beside(beside: str) -> Iterator[None]:
    """Another process that computes prompts meanwhile."""
    if beside == BESIDE[0]:
        yield
        return
    spawn = multiprocessing.get_context("spawn")
    runs, ends = spawn.Event(), spawn.Event()
    process = spawn.Process(target=_compute_prompts, args=(beside == BESIDE[2], runs, ends), daemon=True)
    process.start()
    try:
        assert runs.wait(_START_S)
        yield
    finally:
        ends.set()
        process.join()


def _compute_prompts(borrow_cores: bool, runs: Event, ends: Event) -> None:
    loaded = Loaded(resolve(DEMO), "native", "auto", borrow_cores=borrow_cores)
    _, _, plan = loaded.cases[-1]
    runs.set()
    while not ends.is_set():
        loaded.runner.execute(plan)


def _gains(neighbour: Loaded, rounds: int) -> tuple[Gain, ...]:
    borrower = Loaded(resolve(DEMO), "native", "auto", borrow_cores=True)
    for _ in range(rounds):
        for loaded in (neighbour, borrower):
            loaded.run()
            loaded.runner.rest()
    found = []
    for (case, num_seqs, _), alone_s, borrowed_s in zip(borrower.cases, neighbour.times, borrower.times, strict=True):
        alone_ms, borrowed_ms = (quantile(taken_s, 0.5) * 1e3 for taken_s in (alone_s, borrowed_s))
        found.append(Gain(case, num_seqs, alone_ms, borrowed_ms, alone_ms / borrowed_ms))
    return tuple(found)


def tables(result: Result) -> str:
    gains = [
        (one.case, str(one.num_seqs), number(one.alone_ms), number(one.borrowed_ms), number(one.faster, 2))
        for one in result.gains
    ]
    losses = [
        (one.beside, number(one.p50_ms, 2), number(one.p95_ms, 2), number(one.p99_ms, 2)) for one in result.losses
    ]
    return "\n".join(
        [
            "steps on one thread, and with a resting neighbour's core; medians",
            grid(("step", "seqs", "alone ms", "borrowed ms", "faster"), gains),
            "",
            f"a decode step every {GAP_S * 1e3:.0f} ms beside another process that computes prompts",
            grid(("beside", "p50 ms", "p95 ms", "p99 ms"), losses),
        ]
    )


if __name__ == "__main__":
    run_part(__doc__, measure, tables)

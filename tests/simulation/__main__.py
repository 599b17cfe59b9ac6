"""Seeded histories of a whole cluster under faults: `make simulate-faults`, or one of them again with all it logged."""

import argparse
import os
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from itertools import count, takewhile
from time import perf_counter

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.simulation.history import Result, run_history

CHUNK = 50
MOST_SHOWN = 10


def main() -> int:
    asked = _arguments()
    if asked.replay is not None:
        return _replay(asked.replay)
    started_s = perf_counter()
    failures, counts = _run(asked.first_seed, asked.count, asked.jobs)
    seconds = perf_counter() - started_s
    print(f"{asked.count} histories in {seconds:.0f} s ({asked.count / seconds:.0f} a second), {len(failures)} wrong")
    print("  " + ", ".join(f"{number} {what}" for what, number in sorted(counts.items())))
    for result in failures[:MOST_SHOWN]:
        _show(result)
    return 1 if failures else 0


def _run(first_seed: int, number: int, jobs: int) -> tuple[list[Result], Counter[str]]:
    end = first_seed + number
    chunks = [range(at, min(at + CHUNK, end)) for at in takewhile(lambda at: at < end, count(first_seed, CHUNK))]
    failures: list[Result] = []
    counts: Counter[str] = Counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with ProcessPoolExecutor(jobs) as pool, Progress(*columns, disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task("histories", total=number)
        for seeds, (wrong, counted) in zip(chunks, pool.map(run_chunk, chunks), strict=True):
            failures += wrong
            counts += counted
            progress.update(bar, advance=len(seeds), description=f"histories, {len(failures)} wrong")
    return failures, counts


def run_chunk(seeds: range) -> tuple[list[Result], Counter[str]]:
    """Those that went wrong, and what came to pass in all of them."""
    failures: list[Result] = []
    counts: Counter[str] = Counter()
    for seed in seeds:
        result = run_history(seed)
        counts += result.counts
        if result.wrong:
            failures.append(result)
    return failures, counts


def _replay(seed: int) -> int:
    result = run_history(seed, tell=print)
    print("wrong:" if result.wrong else "nothing wrong", *result.wrong, sep="\n  ")
    return 1 if result.wrong else 0


def _show(result: Result) -> None:
    print(f"\nseed {result.seed}:", *result.wrong, sep="\n  ")
    print(f"  again, with all it logs: python -m tests.simulation --replay {result.seed}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="histories to run (10000)")
    parser.add_argument("--first-seed", type=int, default=0, help="seed of the first; the others follow (0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (one a core)")
    parser.add_argument("--replay", type=int, metavar="SEED", help="run one history and print everything it logs")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

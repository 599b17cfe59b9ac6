"""What every part of the benchmark does alike: its command line, its progress, its tables.

A part is a module with `main`, run as a process of its own, so that what one part loads (torch's threads, UCX)
weighs on no other. It prints its tables to stdout, its progress to stderr and its rows as JSON into a file.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil
from rich.console import Console

from common.model.store import Progress
from coordinator.cli.progress import Bars

Result = TypeVar("Result")


def run_part(
    description: str | None, measure: Callable[[bool, Progress], Result], tables: Callable[[Result], str]
) -> None:
    """The command line of one part: `measure(quick, progress)`, print its tables, write its JSON."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and shorter runs")
    arguments = parser.parse_args()
    with Bars(Console(stderr=True, highlight=False)) as bars:
        result = measure(arguments.quick, bars.report)
    print(tables(result))
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1))


def grid(header: Sequence[str], lines: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Columns as wide as their widest cell; the first `left` of them lean left, the others right."""
    rows = [header, *lines]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def quantile(values: Sequence[float], share: float) -> float:
    """Between the two nearest values; nan without any."""
    if len(values) < 2:
        return values[0] if values else float("nan")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def median(values: Sequence[float]) -> float:
    """nan without any."""
    return statistics.median(values) if values else float("nan")


def number(value: float, digits: int = 1) -> str:
    """A dash for nan."""
    return "-" if value != value else f"{value:,.{digits}f}"


def machine_busy_s() -> float:
    """CPU seconds of everything on this machine since it started."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq)

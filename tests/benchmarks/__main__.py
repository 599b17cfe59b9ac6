"""`make bench`: how fast this project is on this machine, each figure beside its limit, measured in the same run.

    python -m tests.benchmarks [--json FILE] [--quick] [--only NAME]...

Parts, each a process of its own (a module here that can also be run by itself):

    machine      cores, memory bandwidth, fp32 arithmetic: the limits
    attention    the attention kernel beside its limits and beside gather + SDPA
    linear       linear layers of every weight kind beside their limits and beside torch
    transports   each transport beside a memcpy of the same blocks
    step         one engine step beside the least it could take, and where its time goes
    quality      what quantised weights cost: perplexity, agreement with fp32
    serving      whole clusters under load, disaggregated and colocated

All of it takes about six minutes on two quiet cores, `--quick` a quarter of that. A table says beside which load it
was measured: `others` are the cores that everything else on the machine used meanwhile. With more than a few
hundredths of a core it says little about anything but ratios.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from tests.benchmarks.report import machine_busy_s

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Part:
    """`shows_progress`: it does so itself."""

    name: str
    module: str
    title: str
    full: tuple[str, ...] = ()
    quick: tuple[str, ...] = ("--quick",)
    shows_progress: bool = True


PARTS = (
    Part("machine", "machine", "Limits of the machine"),
    Part("attention", "bench_attention", "Attention", ("--rounds", "9"), ("--rounds", "3"), shows_progress=False),
    Part("linear", "bench_linear", "Linear layers", ("--rounds", "9"), ("--rounds", "3"), shows_progress=False),
    Part("transports", "bench_transfer", "Transports", ("--rounds", "20"), ("--rounds", "6"), shows_progress=False),
    Part("step", "decode_step", "Engine step"),
    Part("quality", "quality", "Quality"),
    Part("serving", "serving", "Serving"),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One part as it went. `others` is in cores; `result` is None if it failed."""

    seconds: float
    others: float
    load_before: float
    result: Any


def run(part: Part, number: int, num_parts: int, *, quick: bool, console: Console) -> Outcome:
    """Run one part; its tables go to stdout as soon as it ends."""
    console.print(f"\n[bold]{number}/{num_parts} {part.title}[/bold] ({part.name})")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        command = [sys.executable, "-m", f"tests.benchmarks.{part.module}", "--json", str(file)]
        command += part.quick if quick else part.full
        load_before = os.getloadavg()[0]
        started_s, ours_s, machine_s = time.perf_counter(), _ours_s(), machine_busy_s()
        done = _follow(command, console, part)
        seconds = time.perf_counter() - started_s
        others = max(0.0, (machine_busy_s() - machine_s - (_ours_s() - ours_s)) / seconds)
        print(done.stdout.rstrip())
        print(f"({seconds:.0f} s; load before {load_before:.2f}, others used {others:.2f} cores)", flush=True)
        if done.returncode != 0:
            console.print(f"[red]{part.name} failed with {done.returncode}[/red]")
            return Outcome(seconds, others, load_before, None)
        return Outcome(seconds, others, load_before, msgspec.json.decode(file.read_bytes()))


def _follow(command: list[str], console: Console, part: Part) -> "subprocess.CompletedProcess[str]":
    def to_end() -> "subprocess.CompletedProcess[str]":
        return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)

    if part.shows_progress or not console.is_terminal:
        return to_end()
    with console.status(f"measuring: {part.title.lower()}", refresh_per_second=2):
        return to_end()


def _ours_s() -> float:
    """CPU seconds of this process and of all that it has started and waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures here")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and shorter runs")
    parser.add_argument("--only", action="append", metavar="NAME", choices=[part.name for part in PARTS])
    arguments = parser.parse_args()
    parts = [part for part in PARTS if arguments.only is None or part.name in arguments.only]
    console = Console(stderr=True, highlight=False)
    outcomes = {
        part.name: run(part, number, len(parts), quick=arguments.quick, console=console)
        for number, part in enumerate(parts, 1)
    }
    if arguments.json is not None:
        document = {"quick": arguments.quick, "load_after": os.getloadavg(), "parts": outcomes}
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1))
    return 0 if all(outcome.result is not None for outcome in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

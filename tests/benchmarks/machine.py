"""What this machine can do at best: the limits that everything else is measured against.

Reading memory: the faster of a sum over, and a matrix-vector product with, as many bytes as the demo model's
weights have, far more than any cache holds. Arithmetic: a product of fp32 matrices whose operands fit a cache.
The best of several rounds counts, for a limit is what the machine can do undisturbed; the median beside it shows
how disturbed it was.
"""

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from common.model.store import Progress
from tests.benchmarks.report import grid, median, number, run_part

READ_BYTES = 512 << 20
GEMM_SIZE = 1024
_ISA = ("avx2", "fma", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8", "amx_bf16", "asimd", "sve")
_ROW = 2048


class Limits:
    """Times the two limits with as many threads as torch has; `best` figures grow truer with every `measure`."""

    def __init__(self, read_bytes: int = READ_BYTES) -> None:
        self._memory = torch.ones(read_bytes // 4 // _ROW, _ROW)
        self._vector = torch.ones(_ROW)
        self._matrix = torch.randn(GEMM_SIZE, GEMM_SIZE)
        self.read_bytes_per_s: list[float] = []
        self.flop_per_s: list[float] = []

    def measure(self) -> None:
        """One round of each."""
        read_s = min(seconds(self._memory.sum), seconds(lambda: torch.mv(self._memory, self._vector)))
        self.read_bytes_per_s.append(self._memory.nbytes / read_s)
        gemm_s = seconds(lambda: self._matrix @ self._matrix)
        self.flop_per_s.append(2 * GEMM_SIZE**3 / gemm_s)

    @property
    def best_read_bytes_per_s(self) -> float:
        return max(self.read_bytes_per_s)

    @property
    def best_flop_per_s(self) -> float:
        return max(self.flop_per_s)


def seconds(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


@dataclass(frozen=True, slots=True)
class ThreadLimits:
    threads: int
    read_gb_per_s: float
    median_read_gb_per_s: float
    gemm_gflop_per_s: float
    median_gemm_gflop_per_s: float


@dataclass(frozen=True, slots=True)
class Machine:
    cpu: str
    cores: int
    isa: tuple[str, ...]
    l3_bytes: int
    memory_bytes: int
    system: str
    python: str
    torch: str
    limits: tuple[ThreadLimits, ...]


def measure(quick: bool, progress: Progress) -> Machine:
    cores = len(os.sched_getaffinity(0))
    cpuinfo = _cpuinfo()
    flags = (cpuinfo.get("flags") or cpuinfo.get("Features") or "").split()
    rounds = 4 if quick else 10
    counts = [count for count in (1, 2) if count <= cores]
    limits = []
    for number_done, threads in enumerate(counts):
        progress("limits of the machine", number_done, len(counts))
        torch.set_num_threads(threads)
        limits.append(_limits(threads, rounds))
    return Machine(
        cpu=cpuinfo.get("model name", platform.processor() or platform.machine()),
        cores=cores,
        isa=tuple(name for name in _ISA if name in flags),
        l3_bytes=_l3_bytes(),
        memory_bytes=int(psutil.virtual_memory().total),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=str(torch.__version__),
        limits=tuple(limits),
    )


def _limits(threads: int, rounds: int) -> ThreadLimits:
    limits = Limits()
    for _ in range(rounds):
        limits.measure()
    return ThreadLimits(
        threads=threads,
        read_gb_per_s=limits.best_read_bytes_per_s / 1e9,
        median_read_gb_per_s=median(limits.read_bytes_per_s) / 1e9,
        gemm_gflop_per_s=limits.best_flop_per_s / 1e9,
        median_gemm_gflop_per_s=median(limits.flop_per_s) / 1e9,
    )


def _cpuinfo() -> dict[str, str]:
    """The first processor's entries."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _l3_bytes() -> int:
    """0 where the system does not say."""
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
    except OSError:
        return 0
    return int(text.removesuffix("K")) << 10 if text.endswith("K") else int(text)


def tables(machine: Machine) -> str:
    cache = f", {machine.l3_bytes >> 20} MiB L3" if machine.l3_bytes else ""
    return "\n".join(
        [
            f"{machine.cpu}: {machine.cores} cores ({' '.join(machine.isa) or 'no vector extensions known'}){cache}, "
            f"{machine.memory_bytes / 1e9:.0f} GB",
            f"{machine.system}, Python {machine.python}, torch {machine.torch}",
            grid(
                ("threads", "read GB/s", "median", "fp32 GEMM GFLOP/s", "median"),
                [
                    (
                        str(limits.threads),
                        number(limits.read_gb_per_s),
                        number(limits.median_read_gb_per_s),
                        number(limits.gemm_gflop_per_s),
                        number(limits.median_gemm_gflop_per_s),
                    )
                    for limits in machine.limits
                ],
            ),
        ]
    )


if __name__ == "__main__":
    run_part(__doc__, measure, tables)

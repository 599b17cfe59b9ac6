"""A server that is measured: Baton's or another's. Its processes, its client, and what a piece of work cost whom."""

import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import psutil

from tests.benchmarks.client import Client
from tests.benchmarks.report import machine_busy_s

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Account:
    """Of one piece of work. `cpu` is cores used by each process; `others` is all else that ran on the machine.

    Phases are seconds summed over the requests: the gateway's own, and the nodes' account of part of them; only Baton
    has them.
    """

    wall_s: float
    cpu: dict[str, float]
    num_requests: int = 0
    request_s: float = 0.0
    phases_s: dict[str, float] = field(default_factory=dict)
    node_phases_s: dict[str, float] = field(default_factory=dict)


class Served(Protocol):
    name: str
    client: Client
    processes: dict[str, psutil.Process]
    ready_s: float

    async def account(self, work: Awaitable[Result]) -> tuple[Result, Account]:
        """Do the work, which leaves no request behind, and see what it took."""
        ...


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes. In `pss` what processes share counts once, in `rss` once for each."""

    pss: int
    rss: int


def memory(processes: dict[str, psutil.Process]) -> Memory:
    full = [process.memory_full_info() for process in processes.values()]
    return Memory(sum(int(one.pss) for one in full), sum(int(one.rss) for one in full))


class Spending:
    """CPU seconds of these processes, of this one as their client, and of everything else, from now on."""

    def __init__(self, processes: dict[str, psutil.Process]) -> None:
        self._processes = processes
        self._started_s, self._machine_s, self._cpu_s = time.perf_counter(), machine_busy_s(), self._now()

    def account(self) -> Account:
        """Until now."""
        wall_s = time.perf_counter() - self._started_s
        spent_s = {name: now_s - self._cpu_s[name] for name, now_s in self._now().items()}
        spent_s["others"] = max(0.0, machine_busy_s() - self._machine_s - sum(spent_s.values()))
        return Account(wall_s, {name: seconds / wall_s for name, seconds in spent_s.items()})

    def _now(self) -> dict[str, float]:
        times = {name: process.cpu_times() for name, process in self._processes.items()}
        return {**{name: one.user + one.system for name, one in times.items()}, "client": time.process_time()}

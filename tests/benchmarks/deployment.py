"""A running cluster with its client, and the account of what a piece of work cost whom."""

import asyncio
import re
import time
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

import psutil

from tests.benchmarks.client import Client
from tests.benchmarks.report import machine_busy_s
from tests.process.cluster import BatonUp

Result = TypeVar("Result")

_PHASE = re.compile(r'baton_gateway_(node_)?phase_seconds_total\{phase="(\w+)"\}')
_COUNT, _SECONDS = "baton_gateway_request_seconds_count", "baton_gateway_request_seconds_sum"


@dataclass(frozen=True, slots=True)
class Account:
    """Of one piece of work. `cpu` is cores used by each process; `others` is all else that ran on the machine.

    Phases are seconds summed over the requests: the gateway's own, and the nodes' account of part of them.
    """

    wall_s: float
    cpu: dict[str, float]
    num_requests: int
    request_s: float
    phases_s: dict[str, float]
    node_phases_s: dict[str, float]


class Deployment:
    """`baton up` with these flags. Leaving it stops everything and asserts that nothing is left."""

    def __init__(self, name: str, *flags: str, log_dir: Path) -> None:
        self.name = name
        self._up = BatonUp(*flags, log_dir=log_dir)
        self._resources = AsyncExitStack()
        self.ready_s = 0.0

    async def __aenter__(self) -> Self:
        started_s = time.perf_counter()
        await self._resources.enter_async_context(self._up)
        self.ready_s = time.perf_counter() - started_s
        try:
            self.client = await self._resources.enter_async_context(Client(self._up.url))
        except BaseException:
            await self._resources.aclose()
            raise
        self.processes = {**self._up.children(), "up": psutil.Process(self._up.pid)}
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._resources.aclose()

    def memory_bytes(self) -> int:
        """Of all processes; what they share counts once."""
        return sum(int(process.memory_full_info().pss) for process in self.processes.values())

    async def account(self, work: Awaitable[Result]) -> tuple[Result, Account]:
        """Do the work, which leaves no request behind, and see what it took."""
        before = await self.client.metrics()
        started_s, cpu_s, machine_s = time.perf_counter(), self._cpu_s(), machine_busy_s()
        result = await work
        wall_s = time.perf_counter() - started_s
        spent_s = {name: now_s - cpu_s[name] for name, now_s in self._cpu_s().items()}
        spent_s["others"] = max(0.0, machine_busy_s() - machine_s - sum(spent_s.values()))
        after = await self._settled_metrics()
        spent = {name: value - before.get(name, 0.0) for name, value in after.items()}
        phases: dict[bool, dict[str, float]] = {False: {}, True: {}}
        for name, value in spent.items():
            if match := _PHASE.fullmatch(name):
                phases[match[1] is not None][match[2]] = value
        return result, Account(
            wall_s=wall_s,
            cpu={name: seconds / wall_s for name, seconds in spent_s.items()},
            num_requests=int(spent[_COUNT]),
            request_s=spent[_SECONDS],
            phases_s=phases[False],
            node_phases_s=phases[True],
        )

    def _cpu_s(self) -> dict[str, float]:
        cpu_s = {}
        for name, process in self.processes.items():
            times = process.cpu_times()
            cpu_s[name] = times.user + times.system
        return {**cpu_s, "client": time.process_time()}

    async def _settled_metrics(self) -> dict[str, float]:
        """When the gateway has booked every request: it does so a moment after the client has its last byte."""
        while True:
            figures = await self.client.metrics()
            if figures["baton_gateway_requests_in_flight"] == 0:
                return figures
            await asyncio.sleep(0.01)

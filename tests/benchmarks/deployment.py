"""A running cluster with its client, and the account of what a piece of work cost whom."""

import asyncio
import re
import time
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Self, TypeVar

import psutil

from tests.benchmarks.client import Client
from tests.benchmarks.served import Account, Spending
from tests.process.cluster import BatonUp

Result = TypeVar("Result")

_PHASE = re.compile(r'baton_gateway_(node_)?phase_seconds_total\{phase="(\w+)"\}')
_COUNT, _SECONDS = "baton_gateway_request_seconds_count", "baton_gateway_request_seconds_sum"


class Deployment:
    """`baton up` with these flags, and the checkpoint's own weights as by default. Leaving it stops everything and
    asserts that nothing is left."""

    def __init__(self, name: str, *flags: str, log_dir: Path) -> None:
        self.name = name
        self._up = BatonUp("--quantization", "auto", *flags, log_dir=log_dir)
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

    async def account(self, work: Awaitable[Result]) -> tuple[Result, Account]:
        """Do the work, which leaves no request behind, and see what it took."""
        before = await self.client.metrics()
        spending = Spending(self.processes)
        result = await work
        account = spending.account()
        after = await self._settled_metrics()
        spent = {name: value - before.get(name, 0.0) for name, value in after.items()}
        phases: dict[bool, dict[str, float]] = {False: {}, True: {}}
        for name, value in spent.items():
            if match := _PHASE.fullmatch(name):
                phases[match[1] is not None][match[2]] = value
        return result, replace(
            account,
            num_requests=int(spent[_COUNT]),
            request_s=spent[_SECONDS],
            phases_s=phases[False],
            node_phases_s=phases[True],
        )

    async def _settled_metrics(self) -> dict[str, float]:
        """When the gateway has booked every request: it does so a moment after the client has its last byte."""
        while True:
            figures = await self.client.metrics()
            if figures["baton_gateway_requests_in_flight"] == 0:
                return figures
            await asyncio.sleep(0.01)

"""A server under test beside others: only one of them is awake at a time."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import psutil

from tests.benchmarks.served import Served
from tests.benchmarks.workloads import Prompts, at_once

FAILURES = (AssertionError, aiohttp.ClientError, OSError, TimeoutError)
"""What a server does wrong: it refuses, breaks off, says something else than was agreed, or takes for ever."""

_AWAKE_WITHIN_S = 30.0
_ON_ITS_USUAL_PATH_WITHIN_S = 10.0


class Subject:
    """Stands still (SIGSTOP) but for the time that a body spends inside `awake`."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.name = served.name
        self._path = ""
        self._prompts = Prompts(int.from_bytes(served.name.encode()[-4:]))

    async def warm_up(self) -> None:
        await at_once(self.served.client, Prompts(0).many(8, 128), 8)
        self._path = (await self.served.client.run(self._prompts.one(256), 4)).path

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """For good: what stands still cannot stop in order."""
        self._signal(signal.SIGCONT)

    @asynccontextmanager
    async def awake(self) -> AsyncIterator[Served]:
        """It has answered something before the body begins. One of FAILURES if it does not."""
        self.resume()
        try:
            await self.served.client.reconnect()
            await self._answered()
            yield self.served
        finally:
            self.pause()

    async def _answered(self) -> None:
        """The way it did when it was warmed up, unless that takes long: Baton's nodes find each other again after a
        pause, and until then one does the others' work."""
        started_s = time.perf_counter()
        while True:
            waited_s = time.perf_counter() - started_s
            try:
                async with asyncio.timeout(_AWAKE_WITHIN_S):
                    stream = await self.served.client.run(self._prompts.one(256), 4)
                if stream.path == self._path or waited_s > _ON_ITS_USUAL_PATH_WITHIN_S:
                    return
            except FAILURES:
                if waited_s > _AWAKE_WITHIN_S:
                    raise
            await asyncio.sleep(0.2)

    def _signal(self, number: signal.Signals) -> None:
        for process in self.served.processes.values():
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue  # its next request fails and says so

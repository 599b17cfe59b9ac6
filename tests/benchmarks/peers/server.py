"""A peer's server as a child process with its client."""

import asyncio
import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self, TypeVar

import aiohttp
import psutil

from tests.benchmarks.client import Client
from tests.benchmarks.peers.base import Peer, Unavailable
from tests.benchmarks.served import Account, Spending

Result = TypeVar("Result")

READY_WITHIN_S = 300.0
_LOOK_S = 0.1
_STOP_WITHIN_S = 10.0
_LIBC, _PR_SET_PDEATHSIG = ctypes.CDLL(None), 1


class PeerServer:
    """`async with`: inside, it is ready. Its output goes to a file in `log_dir`. Unavailable: it does not come up."""

    def __init__(self, peer: Peer, *, log_dir: Path) -> None:
        self.name = peer.name
        self._peer = peer
        self._log = log_dir / f"{peer.name}.log"
        self._resources = AsyncExitStack()

    async def __aenter__(self) -> Self:
        started_s = time.perf_counter()
        port = _free_port()
        url = f"http://127.0.0.1:{port}"
        await self._start(self._peer.command(port))
        try:
            await self._ready(f"{url}/v1/models")
            self.client = await self._resources.enter_async_context(Client(url))
        except BaseException:
            await self._resources.aclose()
            raise
        self.ready_s = time.perf_counter() - started_s
        process = psutil.Process(self._process.pid)
        children = {f"{child.name()} {child.pid}": child for child in process.children(recursive=True)}
        self.processes = {"server": process, **children}
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._resources.aclose()

    async def account(self, work: Awaitable[Result]) -> tuple[Result, Account]:
        spending = Spending(self.processes)
        result = await work
        return result, spending.account()

    async def _start(self, command: Sequence[str]) -> None:
        log = self._resources.enter_context(self._log.open("wb"))
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._peer.environment()},
                start_new_session=True,  # Ctrl-C reaches us alone, and we end it
                preexec_fn=_end_with_parent,
            )
        except OSError as error:
            await self._resources.aclose()
            raise Unavailable(f"{command[0]} does not start: {error}") from error
        self._resources.push_async_callback(self._stop)

    async def _ready(self, url: str) -> None:
        """Until it lists its model, which it may do with an error while it still loads."""
        ends_s = time.perf_counter() + READY_WITHIN_S
        async with aiohttp.ClientSession() as session:
            while True:
                if self._process.returncode is not None:
                    raise Unavailable(f"its server ended with {self._process.returncode}: {self._last_line()}")
                try:
                    async with session.get(url) as answer:
                        if answer.status == 200:
                            return
                except aiohttp.ClientError:
                    pass
                if time.perf_counter() > ends_s:
                    raise Unavailable(f"its server is not ready within {READY_WITHIN_S:.0f} s: {self._last_line()}")
                await asyncio.sleep(_LOOK_S)

    def _last_line(self) -> str:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip() if lines else "it said nothing"

    async def _stop(self) -> None:
        """It and its children, whatever state they are in: it keeps nothing worth a farewell."""
        if self._process.returncode is not None:
            return
        family = psutil.Process(self._process.pid).children(recursive=True)
        self._process.kill()
        for child in family:
            child.kill()
        async with asyncio.timeout(_STOP_WITHIN_S):
            await self._process.wait()


def _end_with_parent() -> None:
    """In the child: a benchmark that is killed leaves no server behind, not even one that stands still."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port

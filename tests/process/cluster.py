"""`baton up` as a child process: its lines, its URL, its processes, and nothing left of it afterwards."""

import asyncio
import os
import re
import signal
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp
import psutil

from common.config import CoordinatorConfig
from tests.process.footprint import Footprint

BATON = str(Path(sys.executable).with_name("baton"))
SMALL = ("--kv-cache-memory", "16MiB", "--threads", "1")
"""Flags of a node that needs no more."""
READY_WITHIN_S = 240.0
ENDS_WITHIN_S = 60.0
"""Both are for a machine that is slow and busy with other things: what is shown is that it comes at all."""
_ROLES = {"coordinator": "coordinator", "coordinator.gateway": "gateway", "prefill_node": "prefill-0"}


class BatonUp:
    """Use: `async with BatonUp("--model", folder) as up:`; inside, the cluster is ready. Leaving stops it with
    SIGTERM and asserts that it left nothing. `lines` is what it printed.

    Weights are not quantised unless the flags say so: answers are compared with those of `transformers` in fp32.
    """

    def __init__(self, *flags: str, log_dir: Path, prefix: tuple[str, ...] = ()) -> None:
        always = ("--port", "0", "--quantization", "none", "--log-dir", str(log_dir))
        self._command = (*prefix, BATON, "up", *always, *flags)  # of a flag given twice the last counts
        self.log_dir = log_dir
        self.url = ""
        self.curl = ""
        self.coordinator = ""
        self.lines: list[str] = []
        self.footprint = Footprint()
        self.is_started = False
        self._new_line = asyncio.Condition()

    async def start(self) -> None:
        """Without waiting for anything; `__aenter__` does both."""
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        self._reader = asyncio.create_task(self._read())
        self.is_started = True

    async def __aenter__(self) -> Self:
        if not self.is_started:
            await self.start()
        try:
            self.url = (await self.line(r"Ready after .*: (http://\S+)", within_s=READY_WITHIN_S))[1]
            self.curl = (await self.line(r"^(curl .*)"))[1]
            status = await self.line(r"baton status(?: --coordinator (\S+))?(?: --keys \S+)?$")
            self.coordinator = status[1] or CoordinatorConfig().listen
        except BaseException:
            await self._end(signal.SIGKILL)
            raise
        self.footprint.take(self.pid)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.footprint.take(self.pid)
        status = await self._end(signal.SIGTERM)
        if kind is None:
            assert self.footprint.remains() == []
            assert status in (0, -signal.SIGKILL), self.text

    @property
    def pid(self) -> int:
        """Of `baton up` itself."""
        return self._process.pid

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def children(self) -> dict[str, psutil.Process]:
        """The processes of the cluster by name."""
        found = {}
        for process in self.footprint.take(self.pid):
            command = process.cmdline()
            if "--parent-pipe" in command:
                module = command[command.index("-m") + 1]
                name = command[command.index("--name") + 1] if "--name" in command else _ROLES[module]
                found[name] = process
        return found

    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self.children().items()}

    async def line(self, pattern: str, *, within_s: float = ENDS_WITHIN_S, after: int = 0) -> re.Match[str]:
        """The first printed line, from number `after` on, that matches; waits for it."""
        try:
            async with asyncio.timeout(within_s), self._new_line:
                while True:
                    for text in self.lines[after:]:
                        if match := re.search(pattern, text):
                            return match
                    if self._reader.done():
                        raise AssertionError(f"baton up ended without a line like {pattern!r}:\n{self.text}")
                    await self._new_line.wait()
        except TimeoutError as error:
            raise AssertionError(f"no line like {pattern!r} within {within_s} s:\n{self.text}") from error

    async def complete(self, prompt: str = "once upon a time", *, max_tokens: int = 8) -> str:
        """The text of one greedy completion."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/v1/models") as models:
            model = (await models.json())["data"][0]["id"]
            async with session.post(f"{self.url}/v1/completions", json={"model": model, **body}) as answer:
                document = await answer.json()
                assert answer.status == 200, document
                return str(document["choices"][0]["text"])

    async def command(self, name: str, *flags: str, within_s: float = ENDS_WITHIN_S) -> tuple[int, str]:
        """Exit code and output of `baton NAME` for this cluster."""
        process = await asyncio.create_subprocess_exec(
            *(BATON, name, "--coordinator", self.coordinator, *flags),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        async with asyncio.timeout(within_s):
            output, _ = await process.communicate()
        assert process.returncode is not None
        return process.returncode, output.decode()

    async def wait(self, *, within_s: float = ENDS_WITHIN_S) -> int:
        """Until `baton up` has ended by itself; its exit code."""
        async with asyncio.timeout(within_s):
            status = await self._process.wait()
            await self._reader
        return status

    async def _end(self, number: signal.Signals) -> int:
        if self._process.returncode is None:
            self._process.send_signal(number)
        return await self.wait()

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            async with self._new_line:
                self.lines.append(line.decode().rstrip("\n"))
                self._new_line.notify_all()
        async with self._new_line:
            self._new_line.notify_all()


async def gone(pid: int, *, within_s: float) -> None:
    """Return once the process has ended; TimeoutError if it does not in time."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(fd, ended.set)
    try:
        async with asyncio.timeout(within_s):
            await ended.wait()
    finally:
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)

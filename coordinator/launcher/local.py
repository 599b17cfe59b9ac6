"""Nodes as child processes of this one.

Every child holds the reading end of one pipe whose writing end is ours alone: when we end, however we end,
the pipe closes and each child exits by itself. Each child leads its own process group, so that Ctrl-C in a
terminal reaches only us, and so that whatever a child had started itself ends with it.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from common.clock import Clock, SystemClock
from coordinator.launcher.base import ChildDied, ChildSpec, LaunchError
from coordinator.launcher.logs import last_lines
from coordinator.launcher.restarts import RestartHistory, RestartPolicy


class LocalLauncher:
    """Children write to `<log_dir>/<name>.log`. `on_death` is told of every child that dies unasked."""

    def __init__(
        self,
        *,
        log_dir: Path,
        on_death: Callable[[ChildDied], None],
        clock: Clock | None = None,
        policy: RestartPolicy | None = None,
        grace_s: float = 5.0,
    ) -> None:
        self._log_dir = log_dir
        self._on_death = on_death
        self._clock = clock or SystemClock()
        self._policy = policy or RestartPolicy()
        self._grace_s = grace_s
        self._starting_up = True
        self._children: dict[str, _Child] = {}
        self._failure: asyncio.Future[LaunchError] = asyncio.get_running_loop().create_future()
        self._pipe_reader, self._pipe_writer = os.pipe()

    async def start(self, child: ChildSpec) -> None:
        if child.name in self._children:
            raise LaunchError(f"{child.name} runs already")
        process = self._spawn(child)
        keeper = _Child(child, process)
        self._children[child.name] = keeper
        keeper.task = asyncio.create_task(self._keep(keeper), name=f"keep {child.name}")

    async def stop(self, name: str) -> None:
        child = self._children.get(name)
        if child is None or child.task is None:
            return
        child.stopping.set()
        child.process.signal(signal.SIGTERM)
        done, _ = await asyncio.wait({child.task}, timeout=self._grace_s)
        if not done:
            child.process.signal(signal.SIGKILL)
        await child.task
        self._children.pop(name, None)  # only now: a stop that is cancelled can be asked for again

    def pids(self) -> dict[str, int]:
        return {name: child.process.pid for name, child in self._children.items() if child.process.running}

    def settle(self) -> None:
        self._starting_up = False

    async def failed(self) -> None:
        raise await asyncio.shield(self._failure)

    async def close(self) -> None:
        await asyncio.gather(*(self.stop(name) for name in list(self._children)))
        self._failure.cancel()
        for fd in (self._pipe_reader, self._pipe_writer):
            with contextlib.suppress(OSError):
                os.close(fd)
        self._pipe_reader = self._pipe_writer = -1

    async def _keep(self, child: "_Child") -> None:
        """Watch the child and start it again until it is to stop or its deaths are too many."""
        history = RestartHistory(self._policy)
        started_s = self._clock.now_s()
        while True:
            status = await child.process.wait()
            if child.stopping.is_set():
                return
            lived_s = self._clock.now_s() - started_s
            delay_s = history.died(lived_s=lived_s, status=status, starting_up=self._starting_up)
            died = ChildDied(
                name=child.spec.name,
                pid=child.process.pid,
                status=status,
                restart_in_s=delay_s,
                last_lines=last_lines(self._log_path(child.spec.name), from_byte=child.process.log_start),
            )
            self._on_death(died)
            if delay_s is None:
                self._give_up(f"{child.spec.name} does not start; its log is {self._log_path(child.spec.name)}")
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(child.stopping.wait(), delay_s)
            if child.stopping.is_set():
                return
            started_s = self._clock.now_s()
            try:
                child.process = self._spawn(child.spec)
            except LaunchError as error:
                self._give_up(error.message)
                return

    def _give_up(self, message: str) -> None:
        if not self._failure.done():
            self._failure.set_result(LaunchError(message))

    def _log_path(self, name: str) -> Path:
        return self._log_dir / f"{name}.log"

    def _spawn(self, child: ChildSpec) -> "_Process":
        command = (*child.command, "--parent-pipe", str(self._pipe_reader))
        try:
            with self._log_path(child.name).open("ab") as log:
                log_start = log.tell()
                popen = subprocess.Popen(
                    command,
                    env={**os.environ, **child.env},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(self._pipe_reader,),
                    process_group=0,
                )
        except OSError as error:
            raise LaunchError(f"{child.name}: cannot run {command[0]} ({error})") from error
        return _Process(popen, log_start)


class _Child:
    """What is kept running, and the process that does so at the moment."""

    def __init__(self, spec: ChildSpec, process: "_Process") -> None:
        self.spec = spec
        self.process = process
        self.stopping = asyncio.Event()
        self.task: asyncio.Task[None] | None = None


class _Process:
    """One started process, watched by a pidfd: no thread and no polling."""

    def __init__(self, popen: "subprocess.Popen[bytes]", log_start: int) -> None:
        self.pid = popen.pid
        self.log_start = log_start
        self.running = True
        self._popen = popen
        self._pidfd = os.pidfd_open(popen.pid)
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap)

    async def wait(self) -> int:
        """Its exit code, or minus the signal that killed it."""
        return await asyncio.shield(self._ended)

    def signal(self, number: signal.Signals) -> None:
        """To the process on SIGTERM, to all it started on SIGKILL; nothing if it is gone."""
        if not self.running:
            return
        if number == signal.SIGKILL:
            self._kill_group()
        self._popen.send_signal(number)

    def _reap(self) -> None:
        # Its group id cannot be anybody else's before it is waited for.
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._kill_group()
        self.running = False
        self._ended.set_result(self._popen.wait())

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

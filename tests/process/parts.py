"""Single Baton processes, beside a running cluster or making up one of their own; and what is done to processes."""

import asyncio
import contextlib
import random
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from common.messages import NodeState, Role, View
from coordinator.launcher import ready
from tests.process.cluster import ENDS_WITHIN_S, READY_WITHIN_S, SMALL
from tests.process.questions import caller_of

ROOT = Path(__file__).parents[2]
_LOWEST_PORT = 10_000
_GIVEN: set[int] = set()


class Parts:
    """`async with Parts(model_folder, log_dir) as parts:`; what still runs at the end is told to end, and must."""

    def __init__(self, model: Path, log_dir: Path) -> None:
        self._model = ("--model", str(model), "--served-name", model.name)
        self._log_dir = log_dir
        self._running: dict[str, asyncio.subprocess.Process] = {}
        self._life = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._life.aclose()
        for process in self._running.values():
            process.terminate()
        async with asyncio.timeout(ENDS_WITHIN_S):
            await asyncio.gather(*[process.wait() for process in self._running.values()])

    async def coordinator(self, *flags: str) -> str:
        """The address of a new one."""
        address = f"tcp://127.0.0.1:{free_port()}"
        await self._run(address, "coordinator", "--listen", address, *flags)
        await seen(address, lambda view: True)
        return address

    async def gateway(self, coordinator: str, *flags: str) -> str:
        """The URL of a new one, which is ready if the cluster is."""
        port = free_port()
        of_cluster = ("--port", str(port), "--coordinators", coordinator)
        await self._run(f"gateway-{port}", "coordinator.gateway", *self._model, *of_cluster, *flags)
        url = f"http://127.0.0.1:{port}"
        async with asyncio.timeout(READY_WITHIN_S):
            await ready.gateway_is_ready(url)
        return url

    async def node(self, role: Role, name: str, coordinators: list[str], *flags: str) -> psutil.Process:
        """A new one that every coordinator lists, ready or not."""
        of_cluster = [word for address in coordinators for word in ("--coordinators", address)]
        flags = (*self._model, "--name", name, *of_cluster, *SMALL, "--quantization", "none", *flags)
        process = await self._run(name, f"{role}_node", *flags)
        for address in coordinators:
            await seen(address, lambda view: any(node.card.pid == process.pid for node in view.nodes))
        return psutil.Process(process.pid)

    async def kill(self, name: str) -> None:
        process = self._running.pop(name)
        process.kill()
        await process.wait()

    async def _run(self, name: str, module: str, *flags: str) -> asyncio.subprocess.Process:
        assert name not in self._running
        log = self._life.enter_context((self._log_dir / f"{name.rpartition('/')[2]}.log").open("ab"))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", module, *flags),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=ROOT,
        )
        self._running[name] = process
        return process


async def seen(coordinator: str, holds: Callable[[View], bool], *, within_s: float = READY_WITHIN_S) -> View:
    """What the coordinator shows first for which `holds`."""
    view = View()
    try:
        async with (
            asyncio.timeout(within_s),
            caller_of(coordinator) as caller,
            aclosing(ready.views(caller.client, coordinator)) as views,
        ):
            async for view in views:
                if holds(view):
                    return view
    except TimeoutError:
        raise AssertionError(f"not seen within {within_s} s: {view}") from None
    raise AssertionError("views never end")


def is_ready(view: View, name: str) -> bool:
    return any(node.card.node == name and node.state is NodeState.READY for node in view.nodes)


@asynccontextmanager
async def frozen(process: psutil.Process) -> AsyncIterator[None]:
    """SIGSTOP, and SIGCONT at the end of the block."""
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


async def passing(seconds: float) -> None:
    """Real time: other processes have no clock that a test could advance."""
    passed = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(seconds, passed.set_result, None)
    await passed


def free_port() -> int:
    """Free and given to nobody before. From below the kernel's own range: until its process listens, no connection
    that goes out can take it."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.sample(range(_LOWEST_PORT, lowest), k=lowest - _LOWEST_PORT):
        if port not in _GIVEN:
            with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
                _GIVEN.add(port)
                return port
    raise AssertionError(f"no port from {_LOWEST_PORT} to {lowest - 1} is free")

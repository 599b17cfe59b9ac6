"""A cluster of real processes behind proxies, with a launcher that restarts whatever dies."""

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from common.clock import new_id
from common.config import CoordinatorConfig, EngineConfig, ModelConfig
from common.fields import parse_size
from common.messages import Incarnation, NodeId
from common.rpc.link import ZmqNetwork
from coordinator.launcher import ready
from coordinator.launcher.base import ChildDied, ChildSpec
from coordinator.launcher.local import LocalLauncher
from coordinator.launcher.plan import UpConfig, flags_of, make_plan
from coordinator.launcher.restarts import RestartPolicy
from tests.chaos.faults import Fault, Kind
from tests.chaos.proxy import Proxy
from tests.process.cluster import BATON, READY_WITHIN_S
from tests.process.footprint import Footprint
from tests.process.parts import free_port

NUM_COORDINATORS = 2
_OUR_DOING = (0, -signal.SIGKILL, -signal.SIGTERM)


class ChaosCluster:
    """Use as an async context manager; inside, the cluster is whole. `on_event` is told what happens, in words."""

    def __init__(
        self,
        model: str,
        kv_cache_memory: str,
        *,
        prefill: int,
        decode: int,
        log_dir: Path,
        on_event: Callable[[str], None],
    ) -> None:
        self._config = UpConfig(
            prefill=prefill,
            decode=decode,
            port=free_port(),
            model=ModelConfig(model=model, served_name="chaos", threads=1, quantization="none"),
            engine=EngineConfig(kv_cache_memory=parse_size(kv_cache_memory)),
        )
        self._log_dir = log_dir
        self._on_event = on_event
        self._life = AsyncExitStack()
        self._proxies: dict[str, Proxy] = {}
        self._stopped: dict[str, int] = {}
        self._footprint = Footprint()
        self._gateway_back_s = float("-inf")
        """When it took connections again after it had last been made to end; inf while it does not."""
        self._coming_back: asyncio.Task[None] | None = None
        self.crashes: list[str] = []
        """Processes that ended in a way that nobody had made them end."""

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._life.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._footprint.take(os.getpid())
        await self._life.aclose()

    def remains(self) -> list[str]:
        """What is left of it on this machine, once it was left."""
        ours = {os.getpid()}
        self._footprint.processes = {pid: one for pid, one in self._footprint.processes.items() if pid not in ours}
        return self._footprint.remains()

    async def _start(self) -> None:
        coordinators = [await self._proxied(f"coordinator-{n}") for n in range(NUM_COORDINATORS)]
        plan = make_plan(self._config, coordinator=coordinators[0][1], num_cores=2, env=os.environ)
        self.coordinators = [address for _, address in coordinators]
        self.url, self.nodes = plan.url, plan.nodes
        network = ZmqNetwork()
        self._life.push_async_callback(network.close)
        self._client = network.client(node=NodeId("chaos"), incarnation=Incarnation(new_id()))
        policy = RestartPolicy(max_delay_s=0.5)
        self._launcher = LocalLauncher(log_dir=self._log_dir, on_death=self._on_death, policy=policy)
        self._life.push_async_callback(self._launcher.close)
        for number, (listen, _) in enumerate(coordinators):
            told = flags_of(CoordinatorConfig(listen=listen), os.environ)
            command = (sys.executable, "-P", "-m", "coordinator", *told)
            await self._launcher.start(ChildSpec(name=f"coordinator-{number}", command=command))
        for child in plan.children:
            if child.name == "coordinator":
                continue
            flags = [flag for address in self.coordinators[1:] for flag in ("--coordinators", address)]
            if child.name in plan.nodes:
                listen, address = await self._proxied(child.name)
                flags += ["--listen", listen, "--advertise", address]
            await self._launcher.start(dataclasses.replace(child, command=(*child.command, *flags)))
        await self.whole(within_s=READY_WITHIN_S)
        self._launcher.settle()

    async def _proxied(self, name: str) -> tuple[str, str]:
        """Where it listens, and the address by which everybody else knows it."""
        port = free_port()
        proxy = self._proxies[name] = Proxy(port)
        address = f"tcp://127.0.0.1:{await proxy.start()}"
        self._life.push_async_callback(proxy.close)
        return f"tcp://127.0.0.1:{port}", address

    # --- what is done to it --------------------------------------------------------------------------------

    @property
    def targets(self) -> tuple[str, ...]:
        return (*self.nodes, *(f"coordinator-{n}" for n in range(NUM_COORDINATORS)), "gateway")

    async def hurt(self, fault: Fault) -> bool:
        """Returns when it is over; False if there was nothing to hurt."""
        match fault.kind:
            case Kind.CUT:
                return self._proxies[fault.target].cut() > 0
            case Kind.PARTITION:
                self._proxies[fault.target].swallow()
                try:
                    await asyncio.sleep(fault.for_s)
                finally:
                    self._proxies[fault.target].heal()
                return True
            case Kind.STOP:
                return await self._pause(fault.target, fault.for_s)
            case Kind.KILL:
                return self._signal(fault.target, signal.SIGKILL)
            case Kind.RESTART:
                return self._signal(fault.target, signal.SIGTERM)

    async def _pause(self, target: str, seconds: float) -> bool:
        pid = self._launcher.pids().get(target)
        if pid is None or target in self._stopped or not _send(pid, signal.SIGSTOP):
            return False
        self._stopped[target] = pid
        try:
            await asyncio.sleep(seconds)
        finally:
            del self._stopped[target]
            _send(pid, signal.SIGCONT)
        return True

    def _signal(self, target: str, number: signal.Signals) -> bool:
        self._footprint.take(os.getpid())
        pid = self._launcher.pids().get(target)
        if pid is None or not _send(pid, number):
            return False
        if target == "gateway":
            self._gateway_back_s = float("inf")
        return True

    def gateway_was_away_since(self, moment_s: float) -> bool:
        return self._gateway_back_s >= moment_s - 1.0

    async def _gateway_comes_back(self) -> None:
        address = urlsplit(self.url)
        while True:
            with suppress(OSError):
                _, writer = await asyncio.open_connection(address.hostname, address.port)
                self._gateway_back_s = time.monotonic()
                writer.close()
                return
            await asyncio.sleep(0.02)

    def _on_death(self, died: ChildDied) -> None:
        if died.name == "gateway":
            self._gateway_back_s = float("inf")
            if self._coming_back is not None:
                self._coming_back.cancel()
            self._coming_back = asyncio.create_task(self._gateway_comes_back())
        words = f"{died.name} ended with {died.status}"
        if died.status not in _OUR_DOING:
            self.crashes.append(words)
            words = "\n    ".join((words, *died.last_lines))
        self._on_event(words)

    # --- how it is ------------------------------------------------------------------------------------------

    async def whole(self, *, within_s: float) -> None:
        """Every node is ready at every coordinator, and the gateway is ready. TimeoutError if not in time."""
        async with asyncio.timeout(within_s):
            for coordinator in self.coordinators:
                await ready.nodes_are_ready(
                    self._client, coordinator, self.nodes, self._launcher.pids, on_ready=lambda name: None
                )
            await ready.gateway_is_ready(self.url)

    async def audit(self, *, within_s: float) -> tuple[int, str]:
        """`baton audit --idle`: its exit code and what it printed."""
        named = [flag for address in self.coordinators for flag in ("--coordinator", address)]
        command = (BATON, "audit", "--idle", "--wait", f"{within_s:g}", *named)
        process = await asyncio.create_subprocess_exec(
            *command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, "COLUMNS": "160"}
        )
        said, _ = await process.communicate()
        assert process.returncode is not None
        return process.returncode, said.decode()


def _send(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True

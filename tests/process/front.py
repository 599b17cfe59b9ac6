"""A real gateway process in front of nodes of the fake model: what HTTP costs, without what a model costs."""

import asyncio
import re
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp
import psutil

from common.config import GatewayConfig
from coordinator.launcher.plan import flags_of
from tests.process import fake_nodes
from tests.process.cluster import ENDS_WITHIN_S, READY_WITHIN_S
from tests.process.parts import free_port

ROOT = Path(__file__).parents[2]


class Front:
    """`async with Front(folder, log=...)`: inside it answers at `url`. `gateway` is the gateway's process."""

    def __init__(
        self,
        folder: Path,
        *,
        log: Path,
        model: str = "fake",
        vocab_size: int = 320,
        max_model_len: int = 4096,
        num_blocks: int = 16_384,
    ) -> None:
        """`folder` has the tokenizer; its vocabulary is the fake model's."""
        self.model = model
        self._folder = folder
        self._log = log
        self._sizes = (str(vocab_size), str(max_model_len), str(num_blocks))
        self._life = AsyncExitStack()
        self.url = ""
        self.coordinator = ""

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
        await self._life.aclose()

    async def _start(self) -> None:
        nodes = await self._run(fake_nodes.__file__, self.model, *self._sizes, output=asyncio.subprocess.PIPE)
        assert nodes.stdout is not None
        self.coordinator = (await nodes.stdout.readline()).decode().strip()
        assert re.fullmatch(r"tcp://127\.0\.0\.1:\d+", self.coordinator), self._log.read_text()
        port = free_port()
        config = GatewayConfig(
            model=str(self._folder),
            served_name=self.model,
            port=port,
            coordinators=(self.coordinator,),
            patience_s=30.0,
        )
        gateway = await self._run("-m", "coordinator.gateway", *flags_of(config, {}), output=None)
        self.gateway = psutil.Process(gateway.pid)
        self.url = f"http://127.0.0.1:{port}"
        async with aiohttp.ClientSession() as session, asyncio.timeout(READY_WITHIN_S):
            while not await self._is_ready(session):
                assert gateway.returncode is None, self._log.read_text()

    async def _run(self, *arguments: str, output: int | None) -> asyncio.subprocess.Process:
        log = self._life.enter_context(self._log.open("ab"))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=log if output is None else output,
            stderr=log,
            cwd=ROOT,
        )
        self._life.push_async_callback(_ended, process)
        return process

    async def _is_ready(self, session: aiohttp.ClientSession) -> bool:
        try:
            async with session.get(f"{self.url}/ready") as answer:
                return answer.status == 200
        except aiohttp.ClientConnectionError:
            return False

    async def in_flight(self) -> float:
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        [line] = [line for line in lines if line.startswith("baton_gateway_requests_in_flight ")]
        return float(line.split()[1])

    @property
    def resident_bytes(self) -> int:
        """Of the gateway."""
        return int(self.gateway.memory_info().rss)


async def _ended(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        assert process.stdin is not None
        process.stdin.close()
        process.terminate()
    async with asyncio.timeout(ENDS_WITHIN_S):
        await process.wait()

"""A gateway on a free port of the loopback, before a scripted cluster."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from common.config import GatewayConfig
from common.model.tokenizer import Tokenizer
from coordinator.gateway.serve import serve
from tests.tiny_tokenizer import write_folder
from tests.unit.coordinator.gateway.cluster import COORDINATOR, MODEL, ScriptedClient, ScriptedNetwork

WITHIN_S = 60.0


@dataclass
class RunningGateway:
    url: str
    cluster: ScriptedClient
    tokenizer: Tokenizer
    http: aiohttp.ClientSession
    task: "asyncio.Task[None]"

    async def post(self, path: str, body: object, **options: Any) -> tuple[int, Any, Any]:
        """Status, body (parsed if it is JSON) and headers."""
        given = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with self.http.post(f"{self.url}{path}", **given, **options) as response:
            text = await response.text()
            is_json = response.content_type == "application/json"
            return response.status, json.loads(text) if is_json else text, response.headers

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.http.get(f"{self.url}{path}") as response:
            text = await response.text()
            return response.status, json.loads(text) if response.content_type == "application/json" else text

    async def chat(self, content: str = "Hi", **fields: Any) -> tuple[int, Any, Any]:
        return await self.post("/v1/chat/completions", chat_body(content, **fields))


def chat_body(content: str = "Hi", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}


def events_of(stream: str) -> list[str]:
    """The payloads of a stream's events, comments left out."""
    blocks = stream.split("\n\n")
    assert blocks.pop() == "", "a stream ends with a whole event"
    return [block.removeprefix("data: ") for block in blocks if not block.startswith(":")]


def chunks_of(stream: str) -> list[dict[str, Any]]:
    """The chunks of a stream that ended well."""
    events = events_of(stream)
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


StartGateway = Callable[..., Awaitable[RunningGateway]]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = write_folder(tmp_path_factory.mktemp("model"))
    return Tokenizer.from_folder(folder)


@pytest.fixture
async def start_gateway(tokenizer: Tokenizer) -> AsyncIterator[StartGateway]:
    """Starts gateways with settings; each ends empty."""
    running: list[RunningGateway] = []
    before = asyncio.all_tasks()

    async def start(**settings: Any) -> RunningGateway:
        cluster = ScriptedClient()
        config = GatewayConfig(
            model="nowhere", served_name=MODEL, port=0, **{"coordinators": (COORDINATOR,), **settings}
        )
        listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(
            serve(config, ScriptedNetwork(cluster), tokenizer=tokenizer, listening=listening), name="serve"
        )
        either: list[asyncio.Future[Any]] = [task, listening]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
        gateway = RunningGateway(listening.result(), cluster, tokenizer, aiohttp.ClientSession(), task)
        running.append(gateway)
        await cluster.until(lambda: bool(cluster.open_calls))  # the watch
        return gateway

    yield start
    for gateway in running:
        await gateway.http.close()
        gateway.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await gateway.task
        assert gateway.cluster.open_calls == []
        await gateway.cluster.settled()
    left = {task for task in asyncio.all_tasks() - before if task is not asyncio.current_task() and not task.done()}
    assert not left


@pytest.fixture
async def gateway(start_gateway: StartGateway) -> RunningGateway:
    return await start_gateway()

"""Clients that leave, that read slowly, that wait; the gateway that stops. Whatever happens, nothing is left."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from urllib.parse import urlsplit

import pytest
from aiohttp import web

from common.config import GatewayConfig
from common.errors import ConfigError
from common.messages import FinishReason, Generate, Tokens, View
from common.model.tokenizer import Tokenizer
from coordinator.gateway.serve import serve
from tests.unit.coordinator.gateway.cluster import ScriptedClient, ScriptedNetwork, hangs, node_view, says
from tests.unit.coordinator.gateway.conftest import (
    WITHIN_S,
    RunningGateway,
    StartGateway,
    chat_body,
    chunks_of,
    events_of,
)

Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


@pytest.fixture
async def connect(gateway: RunningGateway) -> AsyncIterator[Connect]:
    """Opens plain connections to the gateway; they are closed at the end at the latest."""
    writers: list[asyncio.StreamWriter] = []

    async def open_one() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        url = urlsplit(gateway.url)
        reader, writer = await asyncio.open_connection(url.hostname, url.port, limit=8 << 20)
        writers.append(writer)
        return reader, writer

    yield open_one
    for writer in writers:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def http(body: dict[str, object], version: str = "1.1") -> bytes:
    text = json.dumps(body).encode()
    return b"POST /v1/chat/completions HTTP/%b\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (
        version.encode(),
        len(text),
        text,
    )


async def nothing_left(gateway: RunningGateway) -> None:
    """The moment the cluster sees that the request is over."""
    async with asyncio.timeout(WITHIN_S):
        await gateway.cluster.until(lambda: len(gateway.cluster.open_calls) == 1)  # the watch alone


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_before_the_first_token_ends_the_call(
    gateway: RunningGateway, connect: Connect, stream: bool
) -> None:
    gateway.cluster.generate = hangs([])
    _, writer = await connect()
    writer.write(http(chat_body(stream=stream)))
    await gateway.cluster.until(lambda: gateway.cluster.num_generating == 1)
    writer.close()
    await nothing_left(gateway)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_in_the_middle_ends_the_call(
    gateway: RunningGateway, connect: Connect, stream: bool
) -> None:
    gateway.cluster.generate = hangs(gateway.tokenizer.encode("one two"))
    reader, writer = await connect()
    writer.write(http(chat_body(stream=stream)))
    if stream:
        await reader.readuntil(b'"one')
    else:
        await gateway.cluster.until(lambda: gateway.cluster.num_generating == 1)
    writer.transport.abort()
    await nothing_left(gateway)
    _, metrics = await gateway.get("/metrics")
    assert 'baton_gateway_requests_total{route="/v1/chat/completions",status="499"} 1.0' in metrics
    assert "baton_gateway_requests_in_flight 0.0" in metrics


async def test_a_reader_that_leaves_at_done_is_no_error(
    gateway: RunningGateway, connect: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_eof = web.StreamResponse.write_eof

    async def write_eof_too_late(response: web.StreamResponse, data: bytes = b"") -> None:
        if response.content_type == "text/event-stream":
            assert gateway_side[0].transport is not None
            gateway_side[0].transport.close()
        await write_eof(response, data)

    gateway_side: list[web.BaseRequest] = []
    prepare = web.StreamResponse.prepare

    async def remember(response: web.StreamResponse, request: web.BaseRequest) -> object:
        gateway_side.insert(0, request)
        return await prepare(response, request)

    monkeypatch.setattr(web.StreamResponse, "prepare", remember)
    monkeypatch.setattr(web.StreamResponse, "write_eof", write_eof_too_late)
    gateway.cluster.generate = says(gateway.tokenizer.encode("one"))
    reader, writer = await connect()
    writer.write(http(chat_body(stream=True)))
    assert (await reader.read()).rstrip().endswith(b"data: [DONE]")
    _, metrics = await gateway.get("/metrics")
    assert 'baton_gateway_requests_total{route="/v1/chat/completions",status="200"} 1.0' in metrics
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_client_that_leaves_while_no_coordinator_answers_is_forgotten(
    gateway: RunningGateway, connect: Connect
) -> None:
    await gateway.cluster.change(away={"tcp://coordinator": True})
    _, writer = await connect()
    writer.write(http(chat_body()))
    _, metrics = await gateway.get("/metrics")
    while "baton_gateway_requests_in_flight 1.0" not in metrics:
        _, metrics = await gateway.get("/metrics")
    writer.close()
    async with asyncio.timeout(WITHIN_S):
        while "baton_gateway_requests_in_flight 0.0" not in metrics:
            _, metrics = await gateway.get("/metrics")
    assert gateway.cluster.routes == []


async def test_a_stream_that_waits_shows_signs_of_life(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(keep_alive_s=0.02)
    go_on = asyncio.Event()
    gateway.cluster.generate = says(gateway.tokenizer.encode("one"), before=go_on.wait)
    async with gateway.http.post(f"{gateway.url}/v1/chat/completions", json=chat_body(stream=True)) as response:
        assert response.headers["x-baton-path"] == "prefill-decode"
        for _ in range(2):
            assert await response.content.readline() == b": waiting\n"
            assert await response.content.readline() == b"\n"
        go_on.set()
        chunks = chunks_of((await response.content.read()).decode())
    contents = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(contents) == "one"


async def test_an_answer_in_time_has_no_comments(gateway: RunningGateway) -> None:
    gateway.cluster.generate = says(gateway.tokenizer.encode("one"))
    _, stream, _ = await gateway.chat(stream=True)
    assert ": waiting" not in stream


async def test_a_reader_that_does_not_read_gets_all_of_it_later_and_holds_up_nobody(
    gateway: RunningGateway, connect: Connect
) -> None:
    text = "0123456789" * 2_500  # 5 MB of events, more than the kernel's buffers take
    tokens = gateway.tokenizer.encode(text)
    finished = asyncio.Event()

    async def long_answer(body: Generate) -> AsyncIterator[Tokens]:
        for token in tokens:
            yield Tokens([token])
        finished.set()
        yield Tokens([], FinishReason.STOP)

    gateway.cluster.generate = long_answer
    await gateway.cluster.change(view=View((node_view("d1", max_model_len=100_000),)))
    while (await gateway.get("/v1/models"))[1]["data"][0]["max_model_len"] != 100_000:
        pass
    reader, writer = await connect()
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 << 10)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(http(chat_body(stream=True)))
    async with asyncio.timeout(WITHIN_S):
        await finished.wait()
    gateway.cluster.generate = says(gateway.tokenizer.encode("one"))
    status, _, _ = await gateway.chat()
    assert status == 200
    writer.transport.resume_reading()  # type: ignore[attr-defined]
    async with asyncio.timeout(WITHIN_S):
        stream = await reader.readuntil(b"[DONE]\n\n")
    writer.close()
    chunks = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith(b"data: {")]
    contents = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(contents) == text
    assert max(map(len, contents)) > 1_000, "what waited came as one larger event"


async def test_an_old_client_gets_a_plain_body(gateway: RunningGateway, connect: Connect) -> None:
    gateway.cluster.generate = says(gateway.tokenizer.encode("one"))
    reader, writer = await connect()
    writer.write(http(chat_body(stream=True), version="1.0"))
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    assert chunks_of(body.decode())
    writer.close()


async def test_a_gateway_that_stops_lets_answers_end(gateway: RunningGateway) -> None:
    go_on = asyncio.Event()
    gateway.cluster.generate = says(gateway.tokenizer.encode("one"), before=go_on.wait)
    running = asyncio.create_task(gateway.chat())
    await gateway.cluster.until(lambda: gateway.cluster.num_generating == 1)
    gateway.task.cancel()
    await asyncio.sleep(0)
    go_on.set()
    status, _, _ = await running
    assert status == 200
    with pytest.raises(asyncio.CancelledError):
        await gateway.task


@pytest.mark.parametrize("num_tokens", [0, 2])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_gateway_that_must_go_ends_what_takes_longer_with_an_error(
    start_gateway: StartGateway, stream: bool, num_tokens: int
) -> None:
    gateway = await start_gateway(drain_s=0.3)
    gateway.cluster.generate = hangs(gateway.tokenizer.encode("one two")[:num_tokens])
    running = asyncio.create_task(gateway.chat(stream=stream))
    await gateway.cluster.until(lambda: gateway.cluster.num_generating == 1)
    gateway.task.cancel()
    status, body, headers = await running
    if stream and num_tokens:
        *_, last = events_of(body)
        assert status == 200
        assert "being stopped" in json.loads(last)["error"]["message"]
    else:
        assert (status, headers["Retry-After"]) == (503, "1")
        assert "being stopped" in body["error"]["message"]
    with pytest.raises(asyncio.CancelledError):
        await gateway.task


async def test_a_stopping_gateway_refuses_what_comes_on_old_connections(
    gateway: RunningGateway, connect: Connect
) -> None:
    go_on = asyncio.Event()
    gateway.cluster.generate = says(gateway.tokenizer.encode("one"), before=go_on.wait)
    reader, writer = await connect()
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    running = asyncio.create_task(gateway.chat())
    await gateway.cluster.until(lambda: gateway.cluster.num_generating == 1)
    gateway.task.cancel()
    await asyncio.sleep(0)
    writer.write(http(chat_body()))
    async with asyncio.timeout(WITHIN_S):
        assert b" 503 " in await reader.readuntil(b"Retry-After: 1\r\n")
    go_on.set()
    assert (await running)[0] == 200
    writer.close()


async def test_a_taken_port_is_named_with_what_to_do(gateway: RunningGateway, tokenizer: Tokenizer) -> None:
    port = urlsplit(gateway.url).port
    config = GatewayConfig(model="m", port=port or 0)
    with pytest.raises(ConfigError, match=rf"port {port} on 127\.0\.0\.1 is taken .*--port"):
        await serve(config, ScriptedNetwork(ScriptedClient()), tokenizer=tokenizer)

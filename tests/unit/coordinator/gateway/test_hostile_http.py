"""HTTP that means harm: smuggled requests, requests that never end, more requests than anybody can answer."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from common.messages import Generate, Tokens
from coordinator.gateway.connection import GatewayRunner
from tests.raw_http import connection, http
from tests.unit.coordinator.gateway.cluster import hangs, says
from tests.unit.coordinator.gateway.conftest import WITHIN_S, RunningGateway, chat_body

POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
SMUGGLED = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNKED = b"0\r\n\r\n"

# A proxy before us may see one request where we would see two, or the other way round.
AMBIGUOUS = {
    "both lengths": POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKED,
    "both lengths, the other way": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n" + CHUNKED,
    "two lengths": POST + b"Content-Length: 0\r\nContent-Length: 38\r\n\r\n",
    "a list of lengths": POST + b"Content-Length: 0, 38\r\n\r\n",
    "a signed length": POST + b"Content-Length: +0\r\n\r\n",
    "a hexadecimal length": POST + b"Content-Length: 0x0\r\n\r\n",
    "a length beyond all bounds": POST + b"Content-Length: 18446744073709551616\r\n\r\n",
    "a space before the colon": POST + b"Content-Length : 0\r\n\r\n",
    "an unknown coding": POST + b"Transfer-Encoding: xchunked\r\n\r\n" + CHUNKED,
    "chunked is not the last coding": POST + b"Transfer-Encoding: chunked, identity\r\n\r\n" + CHUNKED,
    "chunked twice": POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKED,
    "a folded header": POST + b"Transfer-Encoding:\r\n chunked\r\n\r\n" + CHUNKED,
    "a carriage return in a header": POST + b"X: a\rTransfer-Encoding: chunked\r\n\r\n" + CHUNKED,
    "a NUL in a header": POST + b"Transfer-Encoding: chunked\0\r\n\r\n" + CHUNKED,
    "a negative chunk": POST + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n\r\n",
    "an endless chunk": POST + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
    "a chunk without its end": POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\nab0\r\n\r\n",
    "a bare line feed after a chunk": POST + b"Transfer-Encoding: chunked\r\n\r\n1\na0\n\n",
    "lines without carriage returns": b"POST /v1/completions HTTP/1.1\nHost: x\nContent-Length: 0\n\n",
    "a request line in a header": b"POST /v1/completions HTTP/1.1\r\nGET / HTTP/1.1\r\n\r\n",
}


async def until_closed(url: str, sent: bytes) -> bytes:
    """Everything that comes back until the gateway hangs up."""
    async with asyncio.timeout(WITHIN_S), connection(url) as (reader, writer):
        writer.write(sent)
        with contextlib.suppress(ConnectionError):
            return await reader.read()
    return b""


def statuses(replies: bytes) -> list[int]:
    """Of the replies on one connection; what was no HTTP/1.1 is answered as to a peer of 1.0."""
    return [int(found) for found in re.findall(rb"HTTP/1\.[01] (\d{3}) ", replies)]


@pytest.mark.parametrize("request_bytes", AMBIGUOUS.values(), ids=AMBIGUOUS.keys())
async def test_a_request_that_can_be_read_in_two_ways_is_refused_and_nothing_after_it_is_answered(
    gateway: RunningGateway, request_bytes: bytes
) -> None:
    replies = await until_closed(gateway.url, request_bytes + SMUGGLED)
    assert statuses(replies) == [400], replies
    assert gateway.cluster.generates == []


async def test_noise_behind_a_request_that_is_at_work_does_not_spoil_its_answer(gateway: RunningGateway) -> None:
    go_on = asyncio.Event()
    gateway.cluster.generate = says(gateway.tokenizer.encode("one"), before=go_on.wait)
    async with asyncio.timeout(WITHIN_S), connection(gateway.url) as (reader, writer):
        writer.write(http(chat_body(), "/v1/chat/completions"))
        await gateway.cluster.until(lambda: gateway.cluster.num_generating == 1)
        writer.write(b"\xff\0 no HTTP\r\n\r\n")
        await writer.drain()
        assert (await gateway.get("/health"))[0] == 200
        go_on.set()
        replies = await reader.read()
    assert statuses(replies) == [200, 400], replies


async def test_requests_in_one_connection_are_answered_in_order(gateway: RunningGateway) -> None:
    gateway.cluster.generate = says(gateway.tokenizer.encode("one"))
    asked = http(chat_body(), "/v1/chat/completions")
    last = b"GET /nothing HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    replies = await until_closed(gateway.url, asked * 3 + last)
    assert statuses(replies) == [200, 200, 200, 404]


async def test_what_comes_behind_a_request_that_is_at_work_is_not_collected(gateway: RunningGateway) -> None:
    gateway.cluster.generate = hangs([])
    many = SMUGGLED * 1_000
    async with asyncio.timeout(WITHIN_S), connection(gateway.url) as (_, writer):
        writer.write(http(chat_body(), "/v1/chat/completions"))
        await gateway.cluster.until(lambda: gateway.cluster.num_generating == 1)
        for _ in range(600):
            writer.write(many)  # 23 MB, more than the kernel's buffers take
            await asyncio.sleep(0)
        for _ in range(3):
            assert (await gateway.get("/health"))[0] == 200
        assert writer.transport.get_write_buffer_size() > 1 << 20


@pytest.mark.parametrize("length", [b"Content-Length: 9", b"Transfer-Encoding: chunked"])
async def test_a_connection_cut_in_the_middle_of_a_body_leaves_nothing(
    gateway: RunningGateway, length: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with connection(gateway.url) as (_, writer):
        writer.write(POST + length + b"\r\n\r\n3\r\n{")
        await writer.drain()
        assert (await gateway.get("/health"))[0] == 200
    metrics = ""
    async with asyncio.timeout(WITHIN_S):
        while 'route="/v1/completions",status="499"' not in metrics:
            _, metrics = await gateway.get("/metrics")
    assert "baton_gateway_requests_in_flight 0.0" in metrics
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


# --- slow ones --------------------------------------------------------------------------------------------------


async def trickle(writer: asyncio.StreamWriter, sent: bytes) -> None:
    """A byte at a time for as long as anybody listens."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(ConnectionError):
        for byte in sent:
            writer.write(bytes([byte]))
            await writer.drain()
            moment = loop.create_future()
            loop.call_later(0.01, moment.set_result, None)
            await moment


@pytest.fixture
async def impatient() -> AsyncIterator[str]:
    """A server that gives a request's head half a second."""
    runner = GatewayRunner(web.Application(), access_log=None, keepalive_timeout=0.5)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@pytest.mark.parametrize("before", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"], ids=["first", "second"])
async def test_a_head_that_comes_a_byte_at_a_time_has_no_more_time_than_any(impatient: str, before: bytes) -> None:
    async with asyncio.timeout(WITHIN_S), connection(impatient) as (reader, writer):
        writer.write(before)
        if before:
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 404")
        trickling = asyncio.create_task(trickle(writer, b"POST / HTTP/1.1\r\n" + b"X: y\r\n" * 1_000))
        with contextlib.suppress(ConnectionError):
            assert b"HTTP/1.1 2" not in await reader.read()
        await trickling


async def test_a_body_that_comes_a_byte_at_a_time_is_a_408(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.gateway.app.BODY_TIMEOUT_S", 0.2)
    async with asyncio.timeout(WITHIN_S), connection(gateway.url) as (reader, writer):
        writer.write(POST + b"Content-Length: 100000\r\n\r\n")
        trickling = asyncio.create_task(trickle(writer, b" " * 10_000))
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 408 ")
        trickling.cancel()
        await asyncio.wait([trickling])


async def test_a_stream_whose_reader_left_is_not_written_on(gateway: RunningGateway) -> None:
    """Even where nothing is read from the connection any more, for requests wait behind this one."""

    async def endless(body: Generate) -> AsyncIterator[Tokens]:
        while True:
            yield Tokens([gateway.tokenizer.encode("one")[0]])
            await asyncio.sleep(0)

    gateway.cluster.generate = endless
    async with connection(gateway.url) as (reader, writer):
        writer.write(http(chat_body(stream=True), "/v1/chat/completions") + SMUGGLED * 2_000)
        await reader.readuntil(b"data: ")
    async with asyncio.timeout(WITHIN_S):
        await gateway.cluster.until(lambda: gateway.cluster.num_generating == 0)

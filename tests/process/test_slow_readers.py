"""Readers that are slow, and a gateway that stands still: nobody pays for it, and in the end everybody has all."""

import asyncio
import re
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp
import pytest

from tests.process.front import Front
from tests.process.questions import caller_of, is_empty
from tests.process.streams import Streams, body, nothing_is_held, read_stream, text_of
from tests.raw_http import http

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

MIB = 1 << 20
MODEL = "fake-" + "m" * 2_000
"""Every event names it: so an answer of a few thousand tokens is more than the kernel's buffers take."""
NUM_SLOW = 50
LONG_TOKENS = 2_000
SHORT_TOKENS = 150
RECEIVE_BYTES = 4 << 10
MAX_BYTES_EACH = 256 << 10
"""What the gateway may hold for one slow reader: a sixteenth of its events."""
NUM_FROZEN = 30
FROZEN_S = 10.0


@pytest.fixture
async def front(tiny_model: Path, tmp_path: Path) -> AsyncIterator[Front]:
    async with Front(tiny_model, log=tmp_path / "log", model=MODEL) as front:
        yield front
        assert await front.in_flight() == 0
        await nothing_is_held(front.coordinator)
    assert "Traceback" not in (tmp_path / "log").read_text()


class SlowReader:
    """Asks, and from then on takes a byte a second, or none (`every_s` None), until it reads `all`."""

    def __init__(self, sock: socket.socket, every_s: float | None) -> None:
        self._sock = sock
        self._every_s = every_s
        self._come = b""
        self._hurry = asyncio.Event()
        self._dawdling = asyncio.create_task(self._dawdle())

    @classmethod
    async def ask(cls, url: str, asked: dict[str, Any], *, every_s: float | None) -> Self:
        loop, address = asyncio.get_running_loop(), urlsplit(url)
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        await loop.sock_connect(sock, (address.hostname, address.port))
        await loop.sock_sendall(sock, http(asked, headers={"Connection": "close"}))
        return cls(sock, every_s)

    async def _dawdle(self) -> None:
        loop = asyncio.get_running_loop()
        while self._every_s is not None and not self._hurry.is_set():
            self._come += await loop.sock_recv(self._sock, 1)
            await _at_most(self._hurry, self._every_s)

    async def all(self) -> str:
        """The text of the whole answer, read as fast as it comes."""
        self._hurry.set()
        await self._dawdling
        pieces = [self._come]
        while pieces[-1] or len(pieces) == 1:
            pieces.append(await asyncio.get_running_loop().sock_recv(self._sock, 1 << 16))
        self._sock.close()
        head, _, chunks = b"".join(pieces).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 "), head
        return text_of(re.sub(rb"\r\n[0-9a-f]+\r\n", b"", b"\r\n" + chunks))


async def _at_most(event: asyncio.Event, seconds: float) -> None:
    waiting = asyncio.create_task(event.wait())
    await asyncio.wait([waiting], timeout=seconds)
    waiting.cancel()


async def quickest(
    session: aiohttp.ClientSession, front: Front, asked: dict[str, Any], text: str, *, enough_s: float = 0.0
) -> float:
    """Seconds of the fastest of several equal streams, one after the other, or of the first that is fast enough."""
    best_s = float("inf")
    for _ in range(5 if not enough_s else 50):
        started_s = time.perf_counter()
        assert await read_stream(session, front.url, asked) == text
        best_s = min(best_s, time.perf_counter() - started_s)
        if best_s < enough_s:
            break
    return best_s


async def test_fifty_clients_that_hardly_read_cost_little_and_harm_nobody(front: Front) -> None:
    long = body(front.model, "a long answer", max_tokens=LONG_TOKENS)
    short = body(front.model, "a short answer", max_tokens=SHORT_TOKENS)
    async with aiohttp.ClientSession() as session, caller_of(front.coordinator) as caller:
        whole, text = await read_stream(session, front.url, long), await read_stream(session, front.url, short)
        alone_s = await quickest(session, front, short, text)
        before = front.resident_bytes
        slow = [
            await SlowReader.ask(front.url, long, every_s=1.0 if number % 2 else None) for number in range(NUM_SLOW)
        ]
        assert await read_stream(session, front.url, short) == text, "while all of them are being answered"
        await is_empty(caller, within_s=240.0, fresh=True)
        assert await front.in_flight() == NUM_SLOW, "the nodes are done, the readers are not"
        growth = front.resident_bytes - before
        enough_s = 2 * alone_s + 0.2
        beside_s = await quickest(session, front, short, text, enough_s=enough_s)
        print(f"{growth / NUM_SLOW / 1024:.0f} KiB for each, {alone_s:.3f} s alone, {beside_s:.3f} s beside them")
        assert growth < NUM_SLOW * MAX_BYTES_EACH
        assert beside_s < enough_s
        assert await asyncio.gather(*[reader.all() for reader in slow]) == [whole] * NUM_SLOW


async def test_a_gateway_that_stands_still_for_ten_seconds_loses_no_token(front: Front) -> None:
    """By then the node has given it up, so it goes on where it was with the next attempt."""
    asked = [body(front.model, f"stream {number}", max_tokens=1_000) for number in range(NUM_FROZEN)]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=NUM_FROZEN)) as session:
        streams = Streams(session, front.url, asked)
        await streams.begin()
        front.gateway.suspend()
        try:
            await _at_most(asyncio.Event(), FROZEN_S)
        finally:
            front.gateway.resume()
        await streams.end_rightly()

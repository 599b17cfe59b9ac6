"""A thousand streams at once through one gateway, half of them dropped: it is as large afterwards as before."""

import asyncio
import random
import resource
from pathlib import Path

import pytest

from tests.process.front import Front
from tests.process.streams import body, nothing_is_held, text_of
from tests.raw_http import connection, http

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

NUM_STREAMS = 1_000
NUM_ROUNDS = 3
SHORT_TOKENS, LONG_TOKENS = 40, 300
MAX_GROWTH = 0.10
MIB = 1 << 20


@pytest.fixture(autouse=True)
def enough_descriptors() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 3 * NUM_STREAMS:
        pytest.skip(f"only {hard} open files are allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def read_whole(front: Front, number: int, *, max_tokens: int) -> None:
    """A stream read to its end."""
    async with connection(front.url) as (reader, writer):
        writer.write(request(front, number, max_tokens))
        events = await reader.readuntil(b"\r\n\r\n")
        assert events.startswith(b"HTTP/1.1 200 "), events
        pieces = [await reader.read(1 << 16)]
        while b"[DONE]\n\n" not in b"".join(pieces[-2:]):
            pieces.append(await reader.read(1 << 16))
            assert pieces[-1], "the stream ended without a word"
    text_of(unchunked(b"".join(pieces)))


def unchunked(payload: bytes) -> bytes:
    """Of HTTP's chunks; the last one may be cut short."""
    pieces = []
    while payload:
        size, _, payload = payload.partition(b"\r\n")
        pieces.append(payload[: int(size, 16)])
        payload = payload[int(size, 16) + 2 :]
    return b"".join(pieces)


def request(front: Front, number: int, max_tokens: int) -> bytes:
    return http(body(front.model, f"stream {number}", max_tokens=max_tokens))


async def drop(front: Front, number: int, chance: random.Random, *, max_tokens: int) -> None:
    """A stream whose reader leaves: at once, in its request, while it waits, after some tokens."""
    async with connection(front.url) as (reader, writer):
        asked = request(front, number, max_tokens)
        moment = chance.randrange(4)
        writer.write(asked[: chance.randrange(len(asked))] if moment == 1 else asked)
        await writer.drain()
        if moment == 2:
            await reader.readuntil(b"\r\n\r\n")
        if moment == 3:
            for _ in range(chance.randrange(1, max_tokens)):
                if b"[DONE]" in await reader.readuntil(b"\n\n"):
                    break  # what came together shares an event


async def a_round(front: Front, seed: int) -> None:
    chance = random.Random(seed)
    droppers = [drop(front, number, chance, max_tokens=200) for number in range(0, NUM_STREAMS, 2)]
    readers = [
        read_whole(front, number, max_tokens=SHORT_TOKENS if number % 100 > 1 else LONG_TOKENS)
        for number in range(1, NUM_STREAMS, 2)
    ]
    async with asyncio.timeout(600.0):
        await asyncio.gather(*droppers, *readers)
        while await front.in_flight():
            pass
    await nothing_is_held(front.coordinator)


async def test_three_rounds_of_a_thousand_streams_leave_the_gateway_as_it_was(tiny_model: Path, tmp_path: Path) -> None:
    async with Front(tiny_model, log=tmp_path / "log") as front:
        await a_round(front, 0)
        before = front.resident_bytes
        sizes = []
        for number in range(NUM_ROUNDS):
            await a_round(front, number + 1)
            sizes.append(front.resident_bytes)
        print(f"{before / MIB:.1f} MiB, then {[f'{size / MIB:.1f}' for size in sizes]}")
        assert front.gateway.is_running()
        assert max(sizes) < (1 + MAX_GROWTH) * before
    assert "Traceback" not in (tmp_path / "log").read_text()

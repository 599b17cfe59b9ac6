"""Streams of a running cluster, as a client reads them: their text, and nothing but their text."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from common.rpc.link import ZmqNetwork
from coordinator.auditor import Auditor


def body(model: str, prompt: str, *, max_tokens: int, **fields: Any) -> dict[str, Any]:
    """A seeded completion of just so many tokens: asked again, the same answer."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "seed": 11,
        "ignore_eos": True,
        "stream": True,
        **fields,
    }


def text_of(events: bytes) -> str:
    """What the events of a whole stream say. It must end well."""
    lines = [line[len(b"data: ") :] for line in events.splitlines() if line.startswith(b"data: ")]
    assert lines and lines[-1] == b"[DONE]", events[-300:]
    pieces, reason = [], None
    for line in lines[:-1]:
        event = json.loads(line)
        assert "error" not in event, event
        for choice in event["choices"]:
            pieces.append(choice["text"])
            reason = choice["finish_reason"] or reason
    assert reason == "length", reason
    return "".join(pieces)


async def read_stream(
    session: aiohttp.ClientSession, url: str, asked: Mapping[str, Any], *, begun: asyncio.Event | None = None
) -> str:
    """The text of a whole stream. `begun` is set when its first event is there."""
    async with session.post(f"{url}/v1/completions", json=asked) as answer:
        events = await answer.content.readany()
        if begun is not None:
            begun.set()
        events += await answer.read()
        assert answer.status == 200, events
    return text_of(events)


class Streams:
    """Streams that are asked for again and again, side by side; each must always say what it said at first.

    However fast the nodes are and however slow the test is, all of them run until `end_rightly`.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, asked: Sequence[Mapping[str, Any]]) -> None:
        self._session, self._url, self._asked = session, url, asked
        self._over = asyncio.Event()
        self._reading: list[asyncio.Task[int]] = []

    async def begin(self) -> None:
        """Returns when each has had an event since it was first read to its end."""
        quiet = [await read_stream(self._session, self._url, self._asked[0])]
        quiet += await asyncio.gather(*[read_stream(self._session, self._url, one) for one in self._asked[1:]])
        begun = [asyncio.Event() for _ in self._asked]
        for asked, text, event in zip(self._asked, quiet, begun, strict=True):
            self._reading.append(asyncio.create_task(self._read_on(asked, text, event)))
        await asyncio.gather(*[event.wait() for event in begun])

    async def _read_on(self, asked: Mapping[str, Any], text: str, begun: asyncio.Event) -> int:
        num_read = 0
        while not self._over.is_set():
            assert await read_stream(self._session, self._url, asked, begun=begun) == text
            num_read += 1
        return num_read

    async def end_rightly(self) -> int:
        """Each is read to its end once more; how often all were read together."""
        self._over.set()
        return sum(await asyncio.gather(*self._reading))


async def nothing_is_held(*coordinators: str, wait_s: float = 30.0) -> None:
    """An audit of the idle cluster finds nothing."""
    report = await Auditor(ZmqNetwork(), list(coordinators)).audit(idle=True, wait_s=wait_s)
    assert report.findings == ()
    assert len(report.look.holdings) >= 3, "whoever is there has answered"

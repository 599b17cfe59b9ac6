"""A client that only measures: streams of completions over HTTP, and when each piece of them came.

It must not be what limits the server, so it looks at events no closer than it has to; its share of a core is
printed beside every figure (`serving`).
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import aiohttp
import msgspec

_TEXT = b'"finish_reason":null'
_EVENT_END = b"\n\n"


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    completion_tokens: int
    prompt_tokens_details: _Details


class _Last(msgspec.Struct):
    usage: _Usage


@dataclass(slots=True)
class Stream:
    """One streamed completion. `arrivals_s` are events with text; a token whose text waits for the next one has
    none of its own, so `num_tokens`, the server's count at the end, may be a little larger."""

    sent_s: float
    arrivals_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    num_tokens: int = 0
    cached_tokens: int = 0
    path: str = ""
    first: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ttft_s(self) -> float:
        return self.arrivals_s[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.arrivals_s)]

    def gaps_ending_within(self, start_s: float, end_s: float) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.arrivals_s) if start_s <= later < end_s]

    def num_within(self, start_s: float, end_s: float) -> int:
        return sum(start_s <= arrival_s < end_s for arrival_s in self.arrivals_s)


class Client:
    """Of one server. `async with`."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._http: aiohttp.ClientSession

    async def __aenter__(self) -> "Client":
        self._open()
        try:
            async with self._http.get("/v1/models") as answer:
                self._model = (await answer.json())["data"][0]["id"]
        except BaseException:
            await self._http.close()
            raise
        return self

    def _open(self) -> None:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
        self._http = aiohttp.ClientSession(
            self.url, connector=connector, timeout=aiohttp.ClientTimeout(total=None), read_bufsize=1 << 20
        )

    async def __aexit__(self, *exception: object) -> None:
        await self._http.close()

    async def reconnect(self) -> None:
        """Over new connections from now on: the server may have given up the old ones."""
        await self._http.close()
        self._open()

    async def metrics(self) -> dict[str, float]:
        """The gateway's figures by their Prometheus names, labels included."""
        async with self._http.get("/metrics") as answer:
            lines = (await answer.text()).splitlines()
        pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    async def run(self, prompt: Sequence[int], max_tokens: int, stream: Stream | None = None) -> Stream:
        """Send one request and read it to its end. Cancelling hangs up; the given `stream` keeps what came.

        AssertionError if the server refuses or breaks off.
        """
        body = msgspec.json.encode(
            {
                "model": self._model,
                "prompt": prompt,
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        stream = stream or Stream(0.0)
        stream.sent_s = time.perf_counter()
        headers = {"content-type": "application/json"}
        async with self._http.post("/v1/completions", data=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            stream.path = answer.headers.get("x-baton-path", "")
            tail = await self._read(answer, stream)
        stream.ended_s = time.perf_counter()
        events = tail.split(_EVENT_END)
        assert events[-2] == b"data: [DONE]", tail.decode()
        usage = msgspec.json.decode(events[-3].removeprefix(b"data: "), type=_Last).usage
        stream.num_tokens = usage.completion_tokens
        stream.cached_tokens = usage.prompt_tokens_details.cached_tokens
        return stream

    @staticmethod
    async def _read(answer: aiohttp.ClientResponse, stream: Stream) -> bytes:
        """Note when each event came; the last events as they came."""
        tail = b""
        async for piece in answer.content.iter_any():
            now_s = time.perf_counter()
            # What ends the last piece may begin what this one ends.
            stream.arrivals_s += [now_s] * (tail[1 - len(_TEXT) :] + piece).count(_TEXT)
            if not stream.first.is_set() and stream.arrivals_s:
                stream.first.set()
            tail = (tail + piece)[-4096:]
        return tail

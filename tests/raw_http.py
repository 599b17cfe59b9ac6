"""HTTP by hand: requests no client library would send, and connections left at any moment."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def document(self) -> Any:
        return json.loads(self.body)


def http(
    body: object,
    path: str = "/v1/completions",
    *,
    method: str = "POST",
    headers: Mapping[str, str] | None = None,
) -> bytes:
    """A request as bytes; `body` is sent as it is if it is bytes, else as JSON."""
    payload = body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {"Host": "x", "Content-Length": str(len(payload)), **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + payload


@asynccontextmanager
async def connection(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A plain connection; leaving drops it without a goodbye."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def exchange(url: str, request: bytes, *, within_s: float = 20.0) -> Reply:
    """Send `request` and read a reply of known length."""
    async with asyncio.timeout(within_s), connection(url) as (reader, writer):
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status, *fields = head.strip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (field.partition(":") for field in fields)}
        body = await reader.readexactly(int(headers["content-length"]))
    return Reply(int(status.split()[1]), headers, body)

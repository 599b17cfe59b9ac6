"""Streams of a running cluster, as a client reads them: their text, and nothing but their text."""

import asyncio
import json
from collections.abc import Mapping
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


async def nothing_is_held(*coordinators: str, wait_s: float = 5.0) -> None:
    """An audit of the idle cluster finds nothing."""
    report = await Auditor(ZmqNetwork(), list(coordinators)).audit(idle=True, wait_s=wait_s)
    assert report.findings == ()
    assert len(report.look.holdings) >= 3, "whoever is there has answered"

"""Nodes killed under streams of a running cluster: no stream notices, and what comes back is another process."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tests.process.cluster import READY_WITHIN_S, BatonUp
from tests.process.parts import Parts, seen
from tests.process.streams import Streams, body, nothing_is_held

pytestmark = [pytest.mark.process, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="session")]

MODEL = "tiny-llama"
NUM_STREAMS = 8
NUM_CHATS = 50
STREAM_TOKENS = 300
NOTICED_WITHIN_S = 5.0


@pytest_asyncio.fixture(loop_scope="session")
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        yield session


async def chat(session: aiohttp.ClientSession, url: str, words: str) -> tuple[str, str]:
    """A greedy chat: its text, and how its prompt was computed."""
    asked = {"messages": [{"role": "user", "content": words}], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    async with session.post(f"{url}/v1/chat/completions", json=asked) as answer:
        document = await answer.json()
        assert answer.status == 200, document
        return document["choices"][0]["message"]["content"], answer.headers["x-baton-path"]


def many_streams(session: aiohttp.ClientSession, url: str) -> Streams:
    return Streams(
        session, url, [body(MODEL, f"stream {n} of many", max_tokens=STREAM_TOKENS) for n in range(NUM_STREAMS)]
    )


async def test_a_prefill_node_killed_under_streams_is_replaced_and_decode_need_not_be(
    standing_pair: BatonUp, session: aiohttp.ClientSession
) -> None:
    up = standing_pair
    words = [f"question {n} of five" for n in range(5)]
    expected = [(await chat(session, up.url, each))[0] for each in words]
    streams = many_streams(session, up.url)
    await streams.begin()
    before, num_lines = up.pids(), len(up.lines)
    up.children()["prefill-0"].kill()
    # At once, in this moment or that of noticing it: computed by whoever is there.
    assert [(await chat(session, up.url, each))[0] for each in words] == expected
    await streams.end_rightly()
    await up.line("whole again", within_s=READY_WITHIN_S, after=num_lines)
    again = [await chat(session, up.url, f"{n} for the new one") for n in range(5)]
    assert {path for _, path in again} == {"prefill-decode"}
    assert up.pids() == before | {"prefill-0": up.pids()["prefill-0"]}
    assert up.pids()["prefill-0"] != before["prefill-0"]
    await nothing_is_held(up.coordinator)


async def test_a_decode_node_killed_under_streams_is_waited_for_and_a_stream_that_may_not_wait_says_so(
    standing_pair: BatonUp, session: aiohttp.ClientSession, tiny_model: Path, tmp_path: Path
) -> None:
    up = standing_pair
    words = [f"question {n} of five" for n in range(5)]
    expected = [(await chat(session, up.url, each))[0] for each in words]
    async with Parts(tiny_model, tmp_path) as parts:
        impatient = await parts.gateway(up.coordinator, "--stream-patience-s", "0.1", "--patience-s", "0.1")
        streams = many_streams(session, up.url)
        await streams.begin()
        before, num_lines, victim = up.pids(), len(up.lines), up.children()["decode-0"]
        async with session.post(f"{impatient}/v1/completions", json=body(MODEL, "cut", max_tokens=1900)) as cut:
            await cut.content.readany()
            victim.kill()
            *_, last = [line for line in (await cut.content.read()).split(b"\n\n") if line]
        is_an_error(last.removeprefix(b"data: "))
        await streams.end_rightly()
        await up.line("whole again", within_s=READY_WITHIN_S, after=num_lines)
        assert [(await chat(session, up.url, each))[0] for each in words] == expected
        assert up.pids() == before | {"decode-0": up.pids()["decode-0"]}
        await nothing_is_held(up.coordinator)


def is_an_error(event: bytes) -> None:
    document: dict[str, Any] = json.loads(event)
    assert list(document) == ["error"]
    assert document["error"]["message"] == "the node serving this request was lost"


async def test_after_a_killed_decode_node_was_noticed_no_request_fails(
    standing_pairs: BatonUp, session: aiohttp.ClientSession
) -> None:
    up = standing_pairs
    prompts = [f"chat {n} of fifty" for n in range(NUM_CHATS)]
    expected = [(await chat(session, up.url, each))[0] for each in prompts]
    victim, num_lines = up.children()["decode-0"], len(up.lines)
    victim.kill()
    killed_s = time.monotonic()
    await seen(
        up.coordinator, lambda view: all(node.card.pid != victim.pid for node in view.nodes), within_s=NOTICED_WITHIN_S
    )
    print(f"noticed {time.monotonic() - killed_s:.3f} s after it was killed")
    answers = await asyncio.gather(*[chat(session, up.url, each) for each in prompts])
    assert [text for text, _ in answers] == expected
    await up.line("whole again", within_s=READY_WITHIN_S, after=num_lines)
    await nothing_is_held(up.coordinator)

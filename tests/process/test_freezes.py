"""Processes that are stopped and go on later: they are noticed, made up for, and taken back without a restart."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from common.config import LinkConfig
from tests.process.cluster import BatonUp
from tests.process.parts import Parts, frozen, is_ready, passing, seen
from tests.process.streams import body, nothing_is_held, read_stream, text_of
from tests.raw_http import connection, http

pytestmark = [pytest.mark.process, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="session")]

MODEL = "tiny-llama"
NODES = ("prefill-0", "decode-0")
NOTICED_WITHIN_S = LinkConfig().lost_after_s + 1.0
SLACK_S = 30.0
"""For a machine that is busy with other things."""
DELAY_S = 1.5
COORDINATOR_AWAY_S = 10.0
_METRIC = re.compile(r"^baton_gateway_(\w+?)(?:_total)?(?:\{phase=\"(\w+)\"\})? (\S+)$", re.MULTILINE)


@pytest_asyncio.fixture(loop_scope="session")
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        yield session


async def all_ready(up: BatonUp, *, within_s: float) -> None:
    await seen(up.coordinator, lambda view: all(is_ready(view, name) for name in NODES), within_s=within_s)


async def until(holds: Callable[[], Awaitable[bool]], *, within_s: float) -> float:
    """Ask again and again; the seconds that it took."""
    began_s = time.monotonic()
    async with asyncio.timeout(within_s):
        while not await holds():
            await passing(0.05)
    return time.monotonic() - began_s


async def metrics(session: aiohttp.ClientSession, url: str) -> dict[tuple[str, str], float]:
    """By name (without "baton_gateway_") and phase."""
    async with session.get(f"{url}/metrics") as answer:
        return {(name, phase): float(value) for name, phase, value in _METRIC.findall(await answer.text())}


async def answers(session: aiohttp.ClientSession, url: str, status: int) -> bool:
    """Whether the gateway answers so when asked if it is ready."""
    async with session.get(f"{url}/ready") as answer:
        return answer.status == status


async def test_what_was_routed_to_a_prefill_node_that_freezes_is_answered_in_time(
    standing_pair: BatonUp, session: aiohttp.ClientSession, tiny_model: Path, tmp_path: Path
) -> None:
    """Its client is shown that it is waited for; another one does not wait, and leaves nothing behind."""
    up, asked = standing_pair, body(MODEL, "go on a long way " * 30, max_tokens=20)
    async with Parts(tiny_model, tmp_path) as parts:
        url = await parts.gateway(up.coordinator, "--keep-alive-s", "0.5")
        before = up.pids()
        async with frozen(up.children()["prefill-0"]):
            began_s = time.monotonic()
            async with connection(url) as (_, writer):
                writer.write(http(body(MODEL, "never mind " * 30, max_tokens=20)))
                await seen(up.coordinator, lambda view: any(node.load.num_calls for node in view.nodes))
            async with session.post(f"{url}/v1/completions", json=asked) as answer:
                events = await answer.read()
                assert answer.status == 200
            took_s = time.monotonic() - began_s
            print(f"answered in {took_s:.3f} s, with {events.count(b': waiting')} signs of life")
            assert took_s < NOTICED_WITHIN_S + SLACK_S
            assert events.index(b": waiting") < events.index(b"data: ")
        await all_ready(up, within_s=NOTICED_WITHIN_S + SLACK_S)
        assert text_of(events) == await read_stream(session, up.url, asked)
        assert up.pids() == before
        await nothing_is_held(up.coordinator)


async def test_a_delay_on_the_way_to_prefill_shows_in_the_first_token_and_in_its_phase(
    standing_pair: BatonUp, session: aiohttp.ClientSession
) -> None:
    up, asked = standing_pair, body(MODEL, "how long does it take " * 9, max_tokens=4)
    before = await metrics(session, up.url)
    async with frozen(up.children()["prefill-0"]):
        asking = asyncio.create_task(read_stream(session, up.url, asked))
        await seen(up.coordinator, lambda view: any(node.load.num_calls for node in view.nodes))
        await passing(DELAY_S)
    await asking
    after = await metrics(session, up.url)
    spent = {key: after[key] - before.get(key, 0.0) for key in after}
    assert spent["ttft_seconds_count", ""] == 1
    assert spent["ttft_seconds_sum", ""] > DELAY_S
    assert spent["node_phase_seconds", "prefill"] > 0.8 * DELAY_S
    phases = sum(seconds for (name, _), seconds in spent.items() if name == "phase_seconds")
    assert phases == pytest.approx(spent["request_seconds_sum", ""])
    await nothing_is_held(up.coordinator)


async def test_a_frozen_decode_node_is_not_ready_and_is_again_when_it_goes_on(
    standing_pair: BatonUp, session: aiohttp.ClientSession
) -> None:
    up, before = standing_pair, standing_pair.pids()
    text = await up.complete("are you there")
    async with frozen(up.children()["decode-0"]):
        took_s = await until(partial(answers, session, up.url, 503), within_s=NOTICED_WITHIN_S + SLACK_S)
        print(f"not ready after {took_s:.3f} s")
        async with session.get(f"{up.url}/health") as answer:
            assert answer.status == 200, "the gateway itself is well"
        await seen(up.coordinator, lambda view: not is_ready(view, "decode-0"))
    await all_ready(up, within_s=SLACK_S)
    await until(partial(answers, session, up.url, 200), within_s=SLACK_S)
    assert await up.complete("are you there") == text
    assert up.pids() == before
    await nothing_is_held(up.coordinator)


async def test_a_coordinator_that_was_away_for_ten_seconds_lists_all_nodes_again(
    standing_pair: BatonUp, session: aiohttp.ClientSession
) -> None:
    up, before = standing_pair, standing_pair.pids()
    asked, begun = body(MODEL, "nobody is in charge", max_tokens=200), asyncio.Event()
    quiet = await read_stream(session, up.url, asked)
    reading = asyncio.create_task(read_stream(session, up.url, asked, begun=begun))
    await begun.wait()
    async with frozen(up.children()["coordinator"]):
        thaw = asyncio.create_task(passing(COORDINATOR_AWAY_S))
        assert await reading == quiet, "a stream in flight does not notice"
        await thaw
    await all_ready(up, within_s=SLACK_S)
    await until(partial(answers, session, up.url, 200), within_s=SLACK_S)
    assert await read_stream(session, up.url, asked) == quiet
    assert up.pids() == before
    await nothing_is_held(up.coordinator)

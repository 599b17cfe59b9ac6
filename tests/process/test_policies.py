"""What happens without a prefill node, as the operator chose, and with more requests than a queue takes."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from common.messages import Role
from tests.process.cluster import READY_WITHIN_S
from tests.process.parts import Parts, is_ready, seen
from tests.process.streams import body, nothing_is_held, text_of

pytestmark = [pytest.mark.process, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]

MODEL = "tiny-llama"
POLICIES = ("local", "wait", "fail")
MAX_RUNNING, MAX_WAITING = 2, 10
NUM_ASKED = 50
ANSWER_TOKENS = 250
REFUSED_WITHIN_S = 0.1
NUM_REFUSED = 30
PATIENCE_S = READY_WITHIN_S


@dataclass(frozen=True)
class Policies:
    """One prefill and one decode node behind three coordinators of different minds, each with a gateway."""

    parts: Parts
    coordinators: dict[str, str]
    urls: dict[str, str]

    async def start_prefill(self) -> None:
        addresses = list(self.coordinators.values())
        await self.parts.node(Role.PREFILL, "prefill-0", addresses)
        for address in addresses:
            await seen(address, lambda view: is_ready(view, "prefill-0"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def policies(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Policies]:
    async with Parts(tiny_model, tmp_path_factory.mktemp("policies")) as parts:
        minds = [parts.coordinator("--prefill-unavailable", policy) for policy in POLICIES]
        coordinators = dict(zip(POLICIES, await asyncio.gather(*minds), strict=True))
        cluster = Policies(parts, coordinators, {})
        queue = ("--max-waiting", str(MAX_WAITING), "--max-running", str(MAX_RUNNING))
        await asyncio.gather(
            cluster.start_prefill(), parts.node(Role.DECODE, "decode-0", list(coordinators.values()), *queue)
        )
        for policy, address in coordinators.items():
            cluster.urls[policy] = await parts.gateway(address, "--patience-s", str(PATIENCE_S))
        yield cluster
        await nothing_is_held(*coordinators.values())


@pytest_asyncio.fixture(loop_scope="module")
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        yield session


@dataclass(frozen=True)
class Reply:
    status: int
    path: str
    retry_after: str
    took_s: float
    text: str


async def ask(session: aiohttp.ClientSession, url: str, prompt: str, *, max_tokens: int = 8) -> Reply:
    began_s = time.monotonic()
    async with session.post(f"{url}/v1/completions", json=body(MODEL, prompt, max_tokens=max_tokens)) as answer:
        events = await answer.read()
        took_s = time.monotonic() - began_s
        path, retry_after = (answer.headers.get(name, "") for name in ("x-baton-path", "Retry-After"))
        text = text_of(events) if answer.status == 200 else events.decode()
        return Reply(answer.status, path, retry_after, took_s, text)


async def test_beyond_a_queue_of_ten_requests_are_refused_at_once_and_the_others_are_answered(
    policies: Policies, session: aiohttp.ClientSession
) -> None:
    """As many as run and wait come again and again: whoever comes besides finds no place, however slow the test is."""
    url, over = policies.urls["local"], asyncio.Event()

    async def come_again(number: int) -> list[Reply]:
        replies = []
        while not over.is_set():
            replies.append(await ask(session, url, f"one of many: {number}", max_tokens=ANSWER_TOKENS))
        return replies

    regulars = [asyncio.create_task(come_again(number)) for number in range(MAX_RUNNING + MAX_WAITING)]
    await seen(
        policies.coordinators["local"], lambda view: any(n.load.num_waiting >= MAX_WAITING - 1 for n in view.nodes)
    )
    # Long answers: those that find a place, because this client was slower than the regulars' answers, keep it
    many = await asyncio.gather(
        *[ask(session, url, "one too many", max_tokens=ANSWER_TOKENS) for _ in range(NUM_ASKED)]
    )
    refused: list[Reply] = []
    while len(refused) < NUM_REFUSED:  # one after the other: fifty at once wait for each other
        probe = await ask(session, url, "one too many", max_tokens=1)
        refused += [probe] if probe.status == 429 else []
        if probe.status == 429 and probe.took_s < REFUSED_WITHIN_S:
            break
    over.set()
    answered = await asyncio.gather(*regulars)
    replies = [*many, *refused, *[reply for those in answered for reply in those]]
    statuses = Counter(reply.status for reply in replies)
    print(f"{statuses}, refusals took {[f'{reply.took_s:.3f}' for reply in refused]} s")
    assert set(statuses) == {200, 429}
    assert [reply.status for reply in many].count(429) > NUM_ASKED / 5
    assert statuses[200] >= MAX_WAITING
    assert all(int(reply.retry_after) >= 1 for reply in replies if reply.status == 429)
    assert min(reply.took_s for reply in refused) < REFUSED_WITHIN_S


async def test_without_a_prefill_node_the_policy_says_what_happens_and_the_answer_says_what_did(
    policies: Policies, session: aiohttp.ClientSession
) -> None:
    for policy, url in policies.urls.items():
        reply = await ask(session, url, f"{policy} with a prefill node")
        assert (reply.status, reply.path) == (200, "prefill-decode"), policy
    await policies.parts.kill("prefill-0")
    for address in policies.coordinators.values():
        await seen(address, lambda view: not is_ready(view, "prefill-0"))
    local, fail = [await ask(session, policies.urls[policy], f"{policy} without one") for policy in ("local", "fail")]
    assert (local.status, local.path) == (200, "decode-only")
    assert (fail.status, fail.path) == (503, "")
    assert int(fail.retry_after) >= 1
    assert "no prefill node can take" in fail.text
    waiting = asyncio.create_task(ask(session, policies.urls["wait"], "wait without one"))
    assert 'baton_prompts_total{path="decode-only"} 1.0' in await metrics(session, policies.urls["local"])
    assert 'baton_refusals_total{reason="no_prefill"} 1.0' in await metrics(session, policies.urls["fail"])
    assert not waiting.done()
    await policies.start_prefill()
    waited = await waiting
    assert (waited.status, waited.path) == (200, "prefill-decode")


async def metrics(session: aiohttp.ClientSession, url: str) -> str:
    async with session.get(f"{url}/metrics") as answer:
        return await answer.text()

"""What a request means does not change because two nodes serve it: limits, ends, stop strings, whose cache it is."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from common.messages import Sampling
from coordinator.gateway.tenants import add_key
from tests.caller import Caller
from tests.process.cluster import BatonUp
from tests.process.parts import Parts, seen
from tests.process.questions import caller_of, is_empty
from tests.process.streams import nothing_is_held

pytestmark = [pytest.mark.process, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="session")]

END = 2
"""The token that ends the tiny model's answers."""
MANY_TOKENS = 200
LONG_PROMPT = 500


@pytest_asyncio.fixture(loop_scope="session")
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def post(
    session: aiohttp.ClientSession, url: str, path: str = "/v1/completions", *, key: str = "", **fields: Any
) -> dict[str, Any]:
    """A greedy answer, whole."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with session.post(f"{url}{path}", json={"temperature": 0, **fields}, headers=headers) as answer:
        document: dict[str, Any] = await answer.json()
        assert answer.status == 200, document
        return document


async def generated(caller: Caller, node: str) -> int:
    """Tokens drawn by a node since it started, when it holds nothing any more."""
    await is_empty(caller, fresh=True)
    [load] = [view.load for view in (await caller.view()).nodes if view.card.node == node]
    return load.num_generated_tokens


@pytest.mark.parametrize("field", ["max_completion_tokens", "max_tokens"])
async def test_prefill_draws_one_token_however_many_are_asked_for(
    standing_pair: BatonUp, session: aiohttp.ClientSession, field: str
) -> None:
    up = standing_pair
    async with caller_of(up.coordinator) as caller:
        before = {name: await generated(caller, name) for name in ("prefill-0", "decode-0")}
        messages = [{"role": "user", "content": f"{field} of a long story"}]
        fields = {"messages": messages, "ignore_eos": True, field: MANY_TOKENS}
        answer = await post(session, up.url, "/v1/chat/completions", **fields)
        assert answer["usage"]["completion_tokens"] == MANY_TOKENS
        drawn = {name: await generated(caller, name) - before[name] for name in before}
    assert drawn == {"prefill-0": 1, "decode-0": MANY_TOKENS - 1}


async def test_an_answer_whose_first_token_ends_it_is_empty_and_goes_on_only_where_that_is_ignored(
    standing_pair: BatonUp, session: aiohttp.ClientSession
) -> None:
    up = standing_pair
    drawn = {"temperature": 1, "max_tokens": 8, **await asked_for_an_end(up)}
    answer = await post(session, up.url, **drawn)
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    assert answer["usage"]["completion_tokens"] == 1, "the one that ended it"
    assert await streamed(session, up.url, **drawn) == ""
    longer = await post(session, up.url, **drawn, ignore_eos=True)
    assert longer["choices"][0]["finish_reason"] == "length"
    assert longer["usage"]["completion_tokens"] == 8
    await nothing_is_held(up.coordinator)


async def test_a_stop_string_from_prefills_token_into_decodes_first_is_found(
    standing_pair: BatonUp, session: aiohttp.ClientSession
) -> None:
    up = standing_pair
    for number in range(200):
        fields = {"prompt": f"sentence number {number}", "ignore_eos": True}
        first, two = [
            (await post(session, up.url, max_tokens=count, **fields))["choices"][0]["text"] for count in (1, 2)
        ]
        if first and len(two) > len(first) and two.startswith(first) and two.isprintable() and "\ufffd" not in two:
            break
    stop = two[len(first) - 1 : len(first) + 1]
    cut = await post(session, up.url, max_tokens=20, stop=stop, **fields)
    [choice] = cut["choices"]
    assert (choice["text"], choice["finish_reason"]) == (two[: two.index(stop)], "stop")
    assert cut["usage"]["completion_tokens"] <= 2
    assert await streamed(session, up.url, max_tokens=20, stop=stop, **fields) == choice["text"]
    await nothing_is_held(up.coordinator)


async def asked_for_an_end(up: BatonUp) -> dict[str, Any]:
    """A prompt and a seed whose first token is the end: what is drawn depends on the seed and the place alone."""
    async with caller_of(up.coordinator) as caller:
        for seed in range(20):
            prompt = [3 + seed, 4, 5]
            answer = await caller.ask(prompt, MANY_TOKENS, sampling=Sampling(max_tokens=MANY_TOKENS, seed=seed))
            if END in answer.tokens:
                return {"prompt": prompt + answer.tokens[: answer.tokens.index(END)], "seed": seed}
    raise AssertionError("one of many random answers was meant to have an end in it")


async def streamed(session: aiohttp.ClientSession, url: str, **fields: Any) -> str:
    """The text of a greedy stream."""
    async with session.post(f"{url}/v1/completions", json={"temperature": 0, "stream": True, **fields}) as answer:
        *events, done = [line[6:] for line in (await answer.read()).splitlines() if line.startswith(b"data: ")]
    assert done == b"[DONE]"
    return "".join([json.loads(event)["choices"][0]["text"] for event in events])


@asynccontextmanager
async def guarded_gateway(up: BatonUp, model: Path, folder: Path, keys: Path) -> AsyncIterator[str]:
    async with Parts(model, folder) as parts:
        yield await parts.gateway(up.coordinator, "--api-keys", str(keys))
    await seen(up.coordinator, lambda view: len(view.gateways) == 1)


async def test_a_prompt_that_one_tenant_warmed_is_cold_for_another(
    standing_pair: BatonUp, session: aiohttp.ClientSession, tiny_model: Path, tmp_path: Path
) -> None:
    up, keys = standing_pair, tmp_path / "keys.toml"
    ours, theirs = add_key(keys, "ours", None), add_key(keys, "theirs", None)
    prompt = [3 + (13 * position) % 300 for position in range(LONG_PROMPT)]
    async with guarded_gateway(up, tiny_model, tmp_path, keys) as url:

        async def cached(key: str) -> int:
            answer = await post(session, url, key=key, prompt=prompt, max_tokens=4)
            return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

        warm = (LONG_PROMPT - 1) // 16 * 16
        assert [await cached(key) for key in (ours, ours, theirs, theirs, ours)] == [0, warm, 0, warm, warm]
    await nothing_is_held(up.coordinator)


async def test_all_processes_call_a_prefix_by_the_same_name(
    standing_pair: BatonUp, session: aiohttp.ClientSession
) -> None:
    """The gateway names a prompt's blocks, the node that has them told the coordinator of them in its own hashing."""
    up, prompt = standing_pair, [3 + (17 * position) % 300 for position in range(LONG_PROMPT)]
    paths = [await path_of(session, up.url, prompt=prompt, max_tokens=4)]
    async with caller_of(up.coordinator) as caller:
        await is_empty(caller, fresh=True)
    paths.append(await path_of(session, up.url, prompt=prompt, max_tokens=4))
    assert paths == ["prefill-decode", "decode-only"], "the second time it was sent where its blocks are"
    await nothing_is_held(up.coordinator)


async def path_of(session: aiohttp.ClientSession, url: str, **fields: Any) -> str:
    async with session.post(f"{url}/v1/completions", json=fields) as answer:
        assert answer.status == 200, await answer.text()
        return answer.headers["x-baton-path"]

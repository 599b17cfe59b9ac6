"""Nodes and processes taken away in turn under load: no request and no token is lost."""

import asyncio
import signal
import time

import aiohttp
import pytest

from tests.process.cluster import READY_WITHIN_S, BatonUp

pytestmark = [pytest.mark.process, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="session")]

PROMPTS = [
    f"{words} and then " * repeats for words in ("once upon a time", "the river", "a stone") for repeats in (1, 9)
]
NUM_TOKENS = 300
ACCEPTED_WITHIN_S = 1.0


async def is_whole_again(up: BatonUp, *, after: int) -> None:
    """`baton up` says, in a line after so many, that every process is there and ready."""
    await up.line(r"whole again", within_s=READY_WITHIN_S, after=after)


class Load:
    """Clients that ask on and on; every answer must be the one that an idle cluster gave."""

    def __init__(self, up: BatonUp) -> None:
        self._up = up
        self._model = ""
        self._oracle: dict[str, str] = {}
        self.num_answers = 0
        self.gateway_ends_s = float("inf")
        """When the gateway was told to."""

    async def learn(self) -> None:
        async with aiohttp.ClientSession() as http, http.get(f"{self._up.url}/v1/models") as models:
            self._model = (await models.json())["data"][0]["id"]
        for prompt in PROMPTS:
            self._oracle[prompt] = await self._ask(prompt)

    async def ask_on(self, prompt: str, until: asyncio.Event) -> None:
        while not until.is_set():
            began_s = time.monotonic()
            try:
                answer = await self._ask(prompt)
            except aiohttp.ClientConnectorError:  # nobody took the request: a gateway that ends listens no more
                await asyncio.sleep(0)
                continue
            except aiohttp.ClientConnectionError:
                # The kernel had connected it, and then nobody listened to take it up.
                assert began_s > self.gateway_ends_s - ACCEPTED_WITHIN_S
                continue
            assert answer == self._oracle[prompt]
            self.num_answers += 1

    async def _ask(self, prompt: str) -> str:
        body = {"model": self._model, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        url = f"{self._up.url}/v1/completions"
        # A connection of its own: a kept one may be closed at any time.
        async with aiohttp.ClientSession() as http, http.post(url, json=body) as answer:
            document = await answer.json()
            assert answer.status == 200, document
            return str(document["choices"][0]["text"])


async def test_every_process_in_turn_under_load(standing_pairs: BatonUp) -> None:
    up = standing_pairs
    load, done = Load(up), asyncio.Event()
    await load.learn()
    clients = [asyncio.create_task(load.ask_on(prompt, done)) for prompt in PROMPTS]
    for number in (0, 1):
        num_lines, names = len(up.lines), [f"{role}-{number}" for role in ("decode", "prefill")]
        drained = await asyncio.gather(*[up.command("drain", name, "--timeout", "30") for name in names])
        assert [(status, text.splitlines()[-1]) for status, text in drained] == [(0, f"{n}: drained") for n in names]
        await is_whole_again(up, after=num_lines)
    for name in ("coordinator", "gateway"):
        num_lines = len(up.lines)
        if name == "gateway":
            load.gateway_ends_s = time.monotonic()
        up.children()[name].send_signal(signal.SIGTERM)
        await is_whole_again(up, after=num_lines)
    before = load.num_answers
    await up.complete()
    done.set()
    await asyncio.gather(*clients)
    assert load.num_answers > before >= len(PROMPTS)


async def test_a_node_that_is_not_there_is_named(standing_pair: BatonUp) -> None:
    status, output = await standing_pair.command("drain", "decode-7")
    assert status == 1
    assert "there is no node 'decode-7'; there is " in output

"""A pair whose blocks travel over UCX: it gives the oracle's answers, and noise at its doors harms nobody."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import pytest_asyncio

from common.messages import View
from tests.process.attacker import Attacker, Doors
from tests.process.cluster import SMALL, BatonUp
from tests.process.oracle import answers_rightly, answers_rightly_all_at_once
from tests.process.questions import Question, caller_of
from tests.process.streams import nothing_is_held

pytestmark = [pytest.mark.process, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[BatonUp]:
    flags = ("--transport", "ucx", "--no-prefix-cache")
    async with BatonUp("--model", str(tiny_model), *SMALL, *flags, log_dir=tmp_path_factory.mktemp("ucx")) as up:
        yield up


async def test_a_pair_without_a_cache_gives_the_oracles_answers(
    pair: BatonUp, tiny_questions: list[Question], short_questions: list[Question]
) -> None:
    await answers_rightly(pair, tiny_questions)
    await answers_rightly_all_at_once(pair, short_questions)


async def test_bytes_that_are_no_ucx_harm_nobody(pair: BatonUp) -> None:
    chance = random.Random(17)
    noises = [b"", b"\0", b"GET / HTTP/1.1\r\n\r\n", bytes(4096), *(chance.randbytes(1 << n) for n in range(18))]
    async with caller_of(pair.coordinator) as caller:
        offers = [offer for node in (await caller.view()).nodes for offer in node.card.offers]
    ports = [urlsplit(offer.address).port or 0 for offer in offers if offer.transport == "ucx"]
    assert len(ports) == 2
    text, before = await pair.complete("pulled over ucx " * 20), pair.pids()
    with Attacker(Doors.of(url=pair.url, coordinator=pair.coordinator, view=View(), ports=ports)) as attacker:
        for noise in noises * 3:
            await asyncio.to_thread(attacker.say_tcp, attacker.doors.ports, noise)
    assert await pair.complete("pulled over ucx " * 20) == text
    assert pair.pids() == before
    await nothing_is_held(pair.coordinator)

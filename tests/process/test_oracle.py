"""Greedy answers through real processes equal those of `transformers` generate, token for token.

Transports, pools, cache and order of asking are combined pairwise; the tiny model takes the whole matrix, the
demo model the straight path. All answers are compared exactly: the questions leave no room for ties.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from common.messages import Role
from common.model.store import resolve
from tests.process.cluster import BatonUp
from tests.process.questions import LENGTHS, Question, caller_of, is_empty, questions

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

MakeUp = Callable[..., BatonUp]
NUM_TOKENS = 24
# 1,523 tokens take 96 blocks: the longest question just fits alone, and 16 of the short ones do not fit together.
TINY_POOL = ("--kv-cache-memory", str(98 * 3 * 2 * 2 * 16 * 16 * 4))
SHORT_LENGTHS = (1, 15, 16, 17, 31, 32, 33, 48) * 4
NUM_TOKENS_OF_SHORT = 80


@pytest.fixture(scope="session")
def tiny_questions(tiny_model: Path) -> list[Question]:
    return questions(tiny_model, LENGTHS * 2, num_tokens=NUM_TOKENS)


@pytest.fixture(scope="session")
def short_questions(tiny_model: Path) -> list[Question]:
    """Short prompts with long answers: admitted together, they outgrow a small pool."""
    return questions(tiny_model, SHORT_LENGTHS, num_tokens=NUM_TOKENS_OF_SHORT)


def case(transport: str, prefill: int, decode: int, *flags: str, slow: bool = False) -> object:
    name = (
        f"{transport}-{prefill}P{decode}D"
        + ("-tiny" if flags[:2] == TINY_POOL else "")
        + ("-uncached" if "--no-prefix-cache" in flags else "")
    )
    flags = ("--transport", transport, "--prefill", str(prefill), "--decode", str(decode), *flags)
    return pytest.param(flags, id=name, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize(
    "flags",
    [
        case("auto", 1, 1),
        case("tcp", 2, 2, *TINY_POOL),
        case("ucx", 1, 1, "--no-prefix-cache"),
        case("shm", 0, 1, *TINY_POOL, "--kv-host-memory", "16MiB"),
        case("shm", 2, 2, *TINY_POOL, "--no-prefix-cache", slow=True),
        case("shm", 1, 1, *TINY_POOL, "--no-prefix-cache", slow=True),
        case("tcp", 1, 1, "--no-prefix-cache", slow=True),
        case("tcp", 0, 2, *TINY_POOL, "--no-prefix-cache", slow=True),
        case("ucx", 2, 2, *TINY_POOL, slow=True),
        case("ucx", 0, 1, slow=True),
    ],
)
async def test_every_deployment_gives_the_oracles_answers(
    baton_up: MakeUp, tiny_questions: list[Question], short_questions: list[Question], flags: tuple[str, ...]
) -> None:
    async with baton_up(*flags) as up, caller_of(up.coordinator) as caller:

        async def right(question: Question) -> None:
            answer = await caller.ask(question.prompt, len(question.answer))
            assert answer.tokens == question.answer, f"prompt of {len(question.prompt)} tokens"

        one_by_one, at_once = tiny_questions[: len(LENGTHS)], tiny_questions[len(LENGTHS) :]
        for question in one_by_one:
            await right(question)
        # A read that fails is made up for by computing at home: equal answers alone prove no transport.
        await is_empty(caller, fresh=True)
        computed = dict.fromkeys(Role, 0)
        for view in (await caller.view()).nodes:
            computed[view.card.role] += view.load.num_computed_prompt_tokens
        where = Role.DECODE if flags[flags.index("--prefill") + 1] == "0" else Role.PREFILL
        num_tokens = sum(len(question.prompt) for question in one_by_one)
        assert computed == dict.fromkeys(Role, 0) | {where: num_tokens}
        await asyncio.gather(*[right(question) for question in (*at_once, *one_by_one)])
        await asyncio.gather(*[right(question) for question in short_questions])
        await is_empty(caller)
        loads = [view.load for view in (await caller.view()).nodes]
        if "--kv-cache-memory" in flags:
            assert sum(load.num_preemptions for load in loads) > 0, "the pools were meant to be too small"
        if "--kv-host-memory" in flags:
            assert sum(load.num_blocks_in for load in loads) > 0, "nothing came back from host memory"


@pytest.mark.asyncio(loop_scope="session")
async def test_the_demo_model_gives_the_oracles_answers(standing_demo: BatonUp) -> None:
    async with caller_of(standing_demo.coordinator) as caller:
        asked = questions(resolve("demo"), (1, 15, 16, 17, 33, 64, 250, 1500), num_tokens=16)
        for question in asked[:4]:
            assert (await caller.ask(question.prompt, 16)).tokens == question.answer
        answers = await asyncio.gather(*[caller.ask(question.prompt, 16) for question in asked])
        assert [answer.tokens for answer in answers] == [question.answer for question in asked]
        await is_empty(caller)

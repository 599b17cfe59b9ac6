"""Greedy answers through real processes equal those of `transformers` generate, token for token.

Transports, pools, cache and order of asking are combined pairwise (`test_ucx.py` has one more); the tiny model takes
the whole matrix, the demo model the straight path. All answers are compared exactly: the questions leave no room for
ties.
"""

import asyncio
from collections.abc import Callable

import pytest

from common.model.store import resolve
from tests.process.cluster import BatonUp
from tests.process.oracle import answers_rightly, answers_rightly_all_at_once
from tests.process.questions import Question, caller_of, is_empty, questions

pytestmark = [pytest.mark.process, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="session")]

# 1,523 tokens take 96 blocks: the longest question just fits alone, and 16 of the short ones do not fit together.
TINY_POOL = ("--kv-cache-memory", str(98 * 3 * 2 * 2 * 16 * 16 * 4))
NUM_ROUNDS = 10


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
        case("tcp", 2, 2, *TINY_POOL),
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
    baton_up: Callable[..., BatonUp],
    standing_pair: BatonUp,
    tiny_questions: list[Question],
    short_questions: list[Question],
    flags: tuple[str, ...],
) -> None:
    async with baton_up(*flags) as up:
        nodes = [
            f"{role}-{n}" for role in ("prefill", "decode") for n in range(int(flags[flags.index(f"--{role}") + 1]))
        ]
        assert sorted(up.children()) == sorted(["coordinator", "gateway", *nodes])
        assert await up.complete() == await standing_pair.complete()
        await answers_rightly(up, tiny_questions)
        for _ in range(NUM_ROUNDS):  # where questions come so slowly that they never meet, nobody is pre-empted
            await answers_rightly_all_at_once(up, short_questions)
            async with caller_of(up.coordinator) as caller:
                await is_empty(caller, fresh=True)
                loads = [view.load for view in (await caller.view()).nodes]
            preempted = any(load.num_preemptions for load in loads)
            if preempted or "--kv-cache-memory" not in flags:
                break
        assert preempted or "--kv-cache-memory" not in flags, "the pools were meant to be too small"
        if "--kv-host-memory" in flags:
            assert any(load.num_blocks_in for load in loads), "nothing came back from host memory"


async def test_a_pair_without_any_flag_gives_the_oracles_answers(
    standing_pair: BatonUp, tiny_questions: list[Question], short_questions: list[Question]
) -> None:
    await answers_rightly(standing_pair, tiny_questions)
    await answers_rightly_all_at_once(standing_pair, short_questions)


async def test_the_demo_model_gives_the_oracles_answers(standing_demo: BatonUp) -> None:
    async with caller_of(standing_demo.coordinator) as caller:
        asked = questions(resolve("demo"), (1, 15, 16, 17, 33, 64, 250, 1500), num_tokens=16)
        for question in asked[:4]:
            assert (await caller.ask(question.prompt, 16)).tokens == question.answer
        answers = await asyncio.gather(*[caller.ask(question.prompt, 16) for question in asked])
        assert [answer.tokens for answer in answers] == [question.answer for question in asked]
        await is_empty(caller)

"""A cluster's greedy answers against those of `transformers` generate, token for token."""

import asyncio

from common.messages import Role
from tests.caller import Caller
from tests.process.cluster import BatonUp
from tests.process.questions import Question, caller_of, is_empty


async def answers_rightly(up: BatonUp, questions: list[Question]) -> None:
    """A first half of them one after the other; then all at once, of which the first half is asked again."""
    one_by_one, at_once = questions[: len(questions) // 2], questions[len(questions) // 2 :]
    async with caller_of(up.coordinator) as caller:
        before = await computed(caller)
        for question in one_by_one:
            await is_right(caller, question)
        # A read that fails is made up for by computing at home: equal answers alone prove no transport.
        where = Role.PREFILL if "prefill-0" in up.children() else Role.DECODE
        before[where] += sum(len(question.prompt) for question in one_by_one)
        assert await computed(caller) == before
        await asyncio.gather(*[is_right(caller, question) for question in (*at_once, *one_by_one)])
        await is_empty(caller)


async def answers_rightly_all_at_once(up: BatonUp, questions: list[Question]) -> None:
    async with caller_of(up.coordinator) as caller:
        await asyncio.gather(*[is_right(caller, question) for question in questions])
        await is_empty(caller)


async def is_right(caller: Caller, question: Question) -> None:
    answer = await caller.ask(question.prompt, len(question.answer))
    assert answer.tokens == question.answer, f"prompt of {len(question.prompt)} tokens"


async def computed(caller: Caller) -> dict[Role, int]:
    """Prompt tokens since the nodes started, when nothing runs."""
    await is_empty(caller, fresh=True)
    found = dict.fromkeys(Role, 0)
    for view in (await caller.view()).nodes:
        found[view.card.role] += view.load.num_computed_prompt_tokens
    return found

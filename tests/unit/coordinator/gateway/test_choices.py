"""Several answers to one prompt, as an HTTP client sees them."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from common.errors import MovedError, PeerLostError
from common.messages import Branch, FinishReason, Generate, Tokens
from tests.unit.coordinator.gateway.cluster import MODEL, Script, in_turn, says_each
from tests.unit.coordinator.gateway.conftest import RunningGateway, chat_body, chunks_of, events_of

TEXTS = ["one two three", "漢字 three", "four"]


def scripted(gateway: RunningGateway, *, finish: FinishReason = FinishReason.LENGTH) -> list[list[int]]:
    answers = [gateway.tokenizer.encode(text) for text in TEXTS]
    gateway.cluster.generate = says_each(*answers, finish=finish)
    return answers


def joined(chunks: list[dict[str, Any]]) -> dict[int, tuple[str, list[str]]]:
    """By index: the text, and how often it ended how."""
    said: dict[int, tuple[str, list[str]]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        text, ends = said.get(choice["index"], ("", []))
        assert not ends, "a choice says something after its end"
        piece = choice.get("text") or choice.get("delta", {}).get("content") or ""
        said[choice["index"]] = text + piece, [*ends, *filter(None, [choice["finish_reason"]])]
    return said


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_every_choice_has_its_index_its_text_and_one_end(gateway: RunningGateway, path: str) -> None:
    answers = scripted(gateway)
    body = chat_body(n=3) if "chat" in path else {"model": MODEL, "prompt": "Hi", "n": 3}
    status, whole, _ = await gateway.post(path, body)
    assert status == 200
    texts = [choice["message"]["content"] if "chat" in path else choice["text"] for choice in whole["choices"]]
    assert texts == TEXTS
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["length"] * 3
    assert whole["usage"]["completion_tokens"] == sum(map(len, answers))
    assert whole["usage"]["prompt_tokens"] == len(gateway.cluster.generates[0].tokens)
    _, stream, _ = await gateway.post(path, {**body, "stream": True, "stream_options": {"include_usage": True}})
    assert events_of(stream).count("[DONE]") == 1
    chunks = chunks_of(stream)
    assert chunks[-1]["usage"] == whole["usage"]
    assert sum("usage" in chunk for chunk in chunks) == 1
    assert joined(chunks) == {index: (text, ["length"]) for index, text in enumerate(TEXTS)}
    roles = [c["index"] for chunk in chunks for c in chunk["choices"] if c.get("delta", {}).get("role")]
    assert sorted(roles) == ([0, 1, 2] if "chat" in path else [])


@pytest.mark.parametrize(("n", "shown"), [(1, [2]), (2, [2, 0]), (3, [0, 1, 2])])
async def test_the_best_are_those_whose_tokens_were_likeliest_on_average(
    gateway: RunningGateway, n: int, shown: list[int]
) -> None:
    answers = [gateway.tokenizer.encode(text) for text in TEXTS]
    gateway.cluster.generate = says_each(*answers, finish=FinishReason.LENGTH, logprobs=(-1.0, -2.0, -0.5))
    body = {"model": MODEL, "prompt": "Hi", "n": n, "best_of": 3}
    _, whole, _ = await gateway.post("/v1/completions", body)
    assert [choice["text"] for choice in whole["choices"]] == [TEXTS[index] for index in shown]
    assert [choice["index"] for choice in whole["choices"]] == list(range(n))
    assert whole["usage"]["completion_tokens"] == sum(map(len, answers)), "all that were written are counted"
    assert gateway.cluster.generates[0].sampling.scored == (n < 3)


async def test_one_call_is_made_for_all_of_them(gateway: RunningGateway) -> None:
    scripted(gateway)
    await gateway.chat(n=3)
    [generate] = gateway.cluster.generates
    assert generate.branches == (Branch(0), Branch(1), Branch(2))
    assert len(generate.tokens) == generate.num_prompt_tokens
    await gateway.chat()
    assert gateway.cluster.generates[1].branches == ()


async def test_a_stop_string_ends_its_choice_alone_at_the_node_too(gateway: RunningGateway) -> None:
    scripted(gateway)
    _, whole, _ = await gateway.chat(n=3, stop="漢")
    assert [choice["message"]["content"] for choice in whole["choices"]] == [TEXTS[0], "", TEXTS[2]]
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["length", "stop", "length"]
    assert set(gateway.cluster.stopped) == {1}


async def test_stop_strings_in_all_of_them_end_the_call(gateway: RunningGateway) -> None:
    scripted(gateway)
    _, stream, _ = await gateway.chat(n=3, stop=[" two", "漢", "four"], stream=True)
    assert joined(chunks_of(stream)) == {0: ("one", ["stop"]), 1: ("", ["stop"]), 2: ("", ["stop"])}
    await gateway.cluster.until(lambda: gateway.cluster.num_generating == 0)


@pytest.mark.parametrize("error", [PeerLostError("gone"), MovedError("drained")])
async def test_after_a_loss_only_what_is_unfinished_is_asked_for_with_what_it_has(
    gateway: RunningGateway, error: Exception
) -> None:
    answers = scripted(gateway)
    gateway.cluster.generate = in_turn(
        _breaking(answers, [2, 1, 99], error), _breaking(answers, [1, 99, 0], error), says_each(*answers)
    )
    _, stream, _ = await gateway.chat(n=3, stream=True)
    said = joined(chunks_of(stream))
    assert {index: text for index, (text, _) in said.items()} == dict(enumerate(TEXTS))
    _, second, third = gateway.cluster.generates
    assert second.branches == (Branch(0, answers[0][:2]), Branch(1, answers[1][:1]))
    prompt = second.tokens
    assert len(prompt) == second.num_prompt_tokens
    assert third.branches == (Branch(0),), "the last one that is left shares what it has with itself"
    assert third.tokens == [*prompt, *answers[0][:3]]


def _breaking(answers: list[list[int]], numbers: list[int], error: Exception) -> Script:
    """So many tokens of each choice, its end with the last one, then the error."""

    async def script(body: Generate) -> AsyncIterator[Tokens]:
        for branch in body.branches:
            start = len(branch.tokens)
            tokens = answers[branch.choice][start:][: numbers[branch.choice]]
            is_last = start + len(tokens) == len(answers[branch.choice])
            yield Tokens(tokens, FinishReason.LENGTH if is_last else None, choice=branch.choice)
        raise error

    return script


async def test_a_node_that_says_something_of_a_choice_that_nobody_asked_for_is_not_believed(
    gateway: RunningGateway,
) -> None:
    async def script(body: Generate) -> AsyncIterator[Tokens]:
        yield Tokens([5], choice=3)

    gateway.cluster.generate = script
    status, _, _ = await gateway.chat(n=3)
    assert status == 503


async def test_a_client_that_leaves_ends_the_one_call(gateway: RunningGateway) -> None:
    async def hangs(body: Generate) -> AsyncIterator[Tokens]:
        yield Tokens([5], choice=1)
        await asyncio.Event().wait()

    gateway.cluster.generate = hangs
    asking = asyncio.create_task(gateway.chat(n=2, stream=True))
    await gateway.cluster.until(lambda: gateway.cluster.num_generating == 1)
    asking.cancel()
    await gateway.cluster.until(lambda: gateway.cluster.num_generating == 0)

"""Answers over HTTP: whole and streamed, their usage, their headers, as OpenAI's own client reads them."""

import json
from typing import Any

import openai
import pytest
from openai.types import Completion, CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from common.errors import InternalError, OverloadedError, PeerLostError
from common.messages import FinishReason, Routed
from tests.unit.coordinator.gateway.cluster import MODEL, address, breaks, in_turn, refuses, says
from tests.unit.coordinator.gateway.conftest import RunningGateway, chat_body, chunks_of

ANSWER = "one two 漢字 three 🙂 four"


def streamed_text(chunks: list[dict[str, Any]]) -> str:
    texts = [choice.get("text") or choice.get("delta", {}).get("content") for c in chunks for choice in c["choices"]]
    return "".join(text or "" for text in texts)


async def both_ways(gateway: RunningGateway, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], str, list[str]]:
    """The whole answer; the streamed text; the streamed finish reasons."""
    status, whole, _ = await gateway.post(path, body)
    assert status == 200, whole
    status, stream, _ = await gateway.post(path, {**body, "stream": True})
    assert status == 200, stream
    chunks = chunks_of(stream)
    reasons = [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
    return whole, streamed_text(chunks), reasons


@pytest.mark.parametrize("per_item", [1, 3, 100])
async def test_a_chat_is_the_same_whole_and_streamed(gateway: RunningGateway, per_item: int) -> None:
    gateway.cluster.generate = says([*gateway.tokenizer.encode(ANSWER), 1], per_item=per_item)
    whole, text, reasons = await both_ways(gateway, "/v1/chat/completions", chat_body())
    assert whole["choices"][0]["message"]["content"] == text == ANSWER
    assert [whole["choices"][0]["finish_reason"]] == reasons == ["stop"]


@pytest.mark.parametrize("prompt", ["one", ["one"], [5, 6, 7], [[5, 6, 7]]])
async def test_a_completion_is_the_same_whole_and_streamed(gateway: RunningGateway, prompt: object) -> None:
    gateway.cluster.generate = says([*gateway.tokenizer.encode(ANSWER), 1])
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 80}
    whole, text, reasons = await both_ways(gateway, "/v1/completions", body)
    assert whole["choices"][0]["text"] == text == ANSWER
    assert [whole["choices"][0]["finish_reason"]] == reasons == ["stop"]
    expected = gateway.tokenizer.encode("one") if "one" in str(prompt) else [5, 6, 7]
    assert [generate.tokens for generate in gateway.cluster.generates] == [expected, expected]


@pytest.mark.parametrize("stop", ["o thr", ["zzz", "漢字 t", "four"], "🙂"])
async def test_a_stop_string_over_tokens_cuts_both_ways_alike(gateway: RunningGateway, stop: str | list[str]) -> None:
    tokens = gateway.tokenizer.encode("one two three 漢字 two 🙂 four")
    gateway.cluster.generate = says(tokens, finish=FinishReason.LENGTH)
    whole, text, reasons = await both_ways(gateway, "/v1/chat/completions", chat_body(stop=stop))
    assert whole["choices"][0]["message"]["content"] == text
    assert reasons == ["stop"]
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens"] < len(tokens)
    await gateway.cluster.until(lambda: gateway.cluster.num_generating == 0)


async def test_the_official_types_parse_what_we_send(gateway: RunningGateway) -> None:
    gateway.cluster.generate = says([*gateway.tokenizer.encode(ANSWER), 1], cached_tokens=2)
    _, whole, _ = await gateway.chat()
    chat = ChatCompletion.model_validate(whole, strict=True)
    assert chat.usage is not None
    assert chat.usage.prompt_tokens_details is not None
    assert chat.usage.prompt_tokens_details.cached_tokens == 2
    _, whole, _ = await gateway.post("/v1/completions", {"model": MODEL, "prompt": "one"})
    assert Completion.model_validate(whole, strict=True).choices[0].finish_reason == "length"
    _, stream, _ = await gateway.chat(stream=True, stream_options={"include_usage": True})
    chunks = [ChatCompletionChunk.model_validate(chunk, strict=True) for chunk in chunks_of(stream)]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    assert isinstance(chunks[-1].usage, CompletionUsage)
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_usage_comes_once_last_and_only_when_asked_for(gateway: RunningGateway, path: str) -> None:
    gateway.cluster.generate = says([*gateway.tokenizer.encode(ANSWER), 1], cached_tokens=500)
    prompt = chat_body() if "chat" in path else {"model": MODEL, "prompt": "one", "max_tokens": 60}
    _, whole, _ = await gateway.post(path, prompt)
    for options in (None, {}, {"include_usage": False}):
        _, stream, _ = await gateway.post(path, {**prompt, "stream": True, "stream_options": options})
        assert not any("usage" in chunk for chunk in chunks_of(stream))
    _, stream, _ = await gateway.post(path, {**prompt, "stream": True, "stream_options": {"include_usage": True}})
    chunks = chunks_of(stream)
    assert [index for index, chunk in enumerate(chunks) if "usage" in chunk] == [len(chunks) - 1]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    usage = whole["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"], "never more than there were"
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


async def test_limits_and_seed_travel_to_the_node(gateway: RunningGateway) -> None:
    gateway.cluster.generate = says([])
    await gateway.chat(seed=7, temperature=0, top_p=0.5, top_k=9, max_completion_tokens=3, max_tokens=5)
    await gateway.chat(ignore_eos=True)
    await gateway.post("/v1/completions", {"prompt": [5, 6], "seed": -1})
    first, second, third = (generate.sampling for generate in gateway.cluster.generates)
    assert (first.seed, first.temperature, first.top_p, first.top_k, first.max_tokens) == (7, 0.0, 0.5, 9, 3)
    assert first.stop_token_ids == (1,)
    assert second.stop_token_ids == ()
    assert second.max_tokens == 100 - len(gateway.cluster.generates[1].tokens), "a chat may fill the context"
    assert (third.max_tokens, third.seed) == (16, (1 << 63) - 1)


async def test_two_requests_without_a_seed_get_different_ones(gateway: RunningGateway) -> None:
    await gateway.chat()
    await gateway.chat()
    first, second = gateway.cluster.generates
    assert first.sampling.seed != second.sampling.seed
    assert first.request != second.request
    assert len(first.request) == 32


async def test_a_request_id_is_the_clients_label_and_never_ours(gateway: RunningGateway) -> None:
    _, _, headers = await gateway.post("/v1/chat/completions", chat_body(), headers={"X-Request-Id": "mine"})
    assert headers["x-request-id"] == "mine"
    _, _, headers = await gateway.post("/v1/chat/completions", chat_body(), headers={"X-Request-Id": "x" * 200})
    assert headers["x-request-id"] == gateway.cluster.generates[1].request
    _, _, headers = await gateway.post("/v1/chat/completions", {}, headers={"X-Request-Id": "mine"})
    assert headers["x-request-id"] == "mine", "errors are labelled too"
    assert "mine" not in [generate.request for generate in gateway.cluster.generates]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_header_says_which_path_was_taken(gateway: RunningGateway, stream: bool) -> None:
    _, _, headers = await gateway.chat(stream=stream)
    assert headers["x-baton-path"] == "prefill-decode"
    gateway.cluster.route = lambda route: Routed(address("d1"), None, "no-prefill-node")
    _, _, headers = await gateway.chat(stream=stream)
    assert headers["x-baton-path"] == "decode-only"
    gateway.cluster.generate = says(gateway.tokenizer.encode("one"), path="fallback")
    _, _, headers = await gateway.chat(stream=stream)
    assert headers["x-baton-path"] == "decode-fallback", "what happened, not what was planned"
    _, metrics = await gateway.get("/metrics")
    counts = {line for line in metrics.splitlines() if line.startswith("baton_prompts_total")}
    assert counts == {
        f'baton_prompts_total{{path="{path}"}} 1.0' for path in ("prefill-decode", "decode-only", "decode-fallback")
    }


async def test_attempts_are_counted_by_the_rule_that_routed_them(gateway: RunningGateway) -> None:
    for why in ("least-loaded", "home-faster", "home-faster"):
        gateway.cluster.route = lambda route, why=why: Routed(address("d1"), None, why)
        await gateway.chat()
    _, metrics = await gateway.get("/metrics")
    counts = {line for line in metrics.splitlines() if line.startswith("baton_routes_total")}
    assert counts == {'baton_routes_total{why="least-loaded"} 1.0', 'baton_routes_total{why="home-faster"} 2.0'}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_lost_node_is_no_news_for_the_client(gateway: RunningGateway, stream: bool) -> None:
    tokens = [*gateway.tokenizer.encode(ANSWER), 1]
    cut = len(gateway.tokenizer.encode("one two 漢字 three 🙂")) - 2  # in the middle of the emoji
    gateway.cluster.generate = in_turn(breaks(tokens[:cut], PeerLostError("gone")), says(tokens))
    _, answer, _ = await gateway.chat(stream=stream)
    text = streamed_text(chunks_of(answer)) if stream else answer["choices"][0]["message"]["content"]
    assert text == ANSWER
    first, second = gateway.cluster.generates
    assert second.tokens == first.tokens + tokens[:cut]
    assert second.sampling == first.sampling
    assert gateway.cluster.routes[1].exclude == (address("d1").incarnation,)


@pytest.mark.parametrize("cut", [2, 5, 6])
async def test_usage_and_stop_strings_are_those_of_one_answer_whatever_node_gave_it(
    gateway: RunningGateway, cut: int
) -> None:
    tokens = gateway.tokenizer.encode("0123456789")
    assert len(tokens) == 10, "so the cuts are before and in the stop string"
    first = breaks(tokens[:cut], PeerLostError("gone"), cached_tokens=3)
    gateway.cluster.generate = in_turn(first, says(tokens, cached_tokens=5))
    _, answer, _ = await gateway.chat(stop=["456"])
    assert answer["choices"][0]["message"]["content"] == "0123"
    assert answer["choices"][0]["finish_reason"] == "stop"
    usage = answer["usage"]
    assert usage["completion_tokens"] == 7, "up to the token that completed the stop string"
    assert usage["prompt_tokens_details"]["cached_tokens"] == 3, "as the first node found it"
    assert len(gateway.cluster.generates) == 2


async def test_the_official_client_works(gateway: RunningGateway) -> None:
    gateway.cluster.generate = says([*gateway.tokenizer.encode(ANSWER), 1])
    messages = [{"role": "user", "content": "Hi"}]
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        chat: Any = client.chat.completions
        assert (await chat.create(model=MODEL, messages=messages)).choices[0].message.content == ANSWER
        stream = await chat.create(model=MODEL, messages=messages, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == ANSWER
        assert [model.id async for model in client.models.list()] == [MODEL]
        with pytest.raises(openai.NotFoundError, match="does not exist here"):
            await chat.create(model="nobody", messages=messages)
        with pytest.raises(openai.BadRequestError, match="'n' is 17"):
            await chat.create(model=MODEL, messages=messages, n=17)
        gateway.cluster.generate = refuses(OverloadedError("full"))
        with pytest.raises(openai.RateLimitError, match="full"):
            await chat.create(model=MODEL, messages=messages, stream=True)
        gateway.cluster.generate = breaks(gateway.tokenizer.encode("one"), InternalError("broke in the middle"))
        stream = await chat.create(model=MODEL, messages=messages, stream=True)
        with pytest.raises(openai.APIError, match="the server failed on this request"):
            [chunk async for chunk in stream]


async def test_text_parts_are_joined_and_unknown_fields_ignored(gateway: RunningGateway) -> None:
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]
    await gateway.chat("Hi\nthere")
    neutral = {
        "n": 1, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "logit_bias": {}, "user": "me",
        "presence_penalty": 0, "frequency_penalty": 0.0, "logprobs": False, "top_logprobs": None, "stop": None,
        "seed": None, "max_tokens": None, "temperature": None, "stream": None, "stream_options": None, "store": True,
        "metadata": {"a": 1}, "service_tier": "auto", "nobody_knows": [1, 2, 3],
    }  # fmt: skip
    status, answer, _ = await gateway.chat(parts, **neutral)  # type: ignore[arg-type]
    assert status == 200, answer
    first, second = gateway.cluster.generates
    assert first.tokens == second.tokens


async def test_a_long_prompt_is_tokenised_off_the_loop_with_the_same_result(gateway: RunningGateway) -> None:
    await gateway.post("/v1/completions", {"prompt": [5, 6]})
    spaces = " " * (20 << 10)
    status, _, _ = await gateway.post("/v1/completions", json.dumps({"prompt": [5, 6]}).encode() + spaces.encode())
    assert status == 200
    assert gateway.cluster.generates[0].tokens == gateway.cluster.generates[1].tokens

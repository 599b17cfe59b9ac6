"""Every field of a request: what is understood, and for each bad input its message."""

import json
from typing import Any

import pytest

from common.errors import ErrorCode, RequestError
from common.model.tokenizer import Tokenizer
from coordinator.gateway import replies
from coordinator.gateway.openai import Asked, parse_chat, parse_completion, sampling_of, tokenize


def chat(**fields: Any) -> Asked:
    return parse_chat(json.dumps({"messages": [{"role": "user", "content": "Hi"}], **fields}).encode())


def completion(**fields: Any) -> Asked:
    return parse_completion(json.dumps({"prompt": "Hi", **fields}).encode())


def user(content: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": content}]


ROLES = "system, developer, user, assistant, tool"
BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "'messages' is null: expected array, got null"),
    ({"messages": "Hi"}, "'messages' is \"Hi\": expected array, got str"),
    ({"messages": []}, "'messages' is empty: give at least one message"),
    ({"messages": [3]}, "'messages[0]': expected object, got int"),
    ({"messages": [{"content": "Hi"}]}, "'messages[0].role' is missing"),
    ({"messages": [{"role": "robot"}]}, f"'messages[0].role': invalid enum value 'robot', expected one of {ROLES}"),
    ({"messages": user(None)}, "'messages[0].content' is missing: give a string or a list of text parts"),
    ({"messages": user(7)}, "'messages[0].content': expected str | array | null, got int"),
    ({"messages": user(["Hi"])}, "'messages[0].content[0]': expected object, got str"),
    (
        {"messages": user([{"type": "image_url", "image_url": {"url": "x"}}])},
        '\'messages[0].content[0]\' is of type "image_url": only "text" is supported',
    ),
    ({"messages": user([{"type": "text"}])}, "'messages[0].content[0].text' must be a string, not null"),
    ({"max_tokens": 0}, "'max_tokens' is 0: expected int >= 1"),
    ({"max_tokens": -5}, "'max_tokens' is -5: expected int >= 1"),
    ({"max_tokens": "8"}, "'max_tokens' is \"8\": expected int | null, got str"),
    ({"max_tokens": 1.5}, "'max_tokens' is 1.5: expected int | null, got float"),
    ({"max_tokens": True}, "'max_tokens' is true: expected int | null, got bool"),
    ({"max_completion_tokens": 0}, "'max_completion_tokens' is 0: expected int >= 1"),
    ({"temperature": -0.1}, "'temperature' is -0.1: expected float >= 0.0"),
    ({"temperature": 2.1}, "'temperature' is 2.1: expected float <= 2.0"),
    ({"temperature": "hot"}, "'temperature' is \"hot\": expected float | null, got str"),
    ({"top_p": 1.5}, "'top_p' is 1.5: expected float <= 1.0"),
    ({"top_p": -1}, "'top_p' is -1: expected float >= 0.0"),
    ({"top_k": -2}, "'top_k' is -2: expected int >= -1"),
    ({"seed": 1.5}, "'seed' is 1.5: expected int | null, got float"),
    ({"stop": 5}, "'stop' is 5: expected str | array | null, got int"),
    ({"stop": [5]}, "'stop[0]': expected str, got int"),
    ({"stop": ""}, "'stop' has an empty string, which is found everywhere: leave it out"),
    ({"stop": ["a"] * 17}, "'stop' has 17 strings: give at most 16"),
    ({"stop": "a" * 513}, "a 'stop' string has 513 characters: at most 512"),
    ({"stream": "yes"}, "'stream' is \"yes\": expected bool | null, got str"),
    ({"stream_options": []}, "'stream_options' is []: expected object | null, got array"),
    ({"stream_options": {"include_usage": 1}}, "'stream_options.include_usage': expected bool | null, got int"),
    ({"ignore_eos": "no"}, "'ignore_eos' is \"no\": expected bool | null, got str"),
    ({"model": 3}, "'model' is 3: expected str | null, got int"),
    ({"n": 0}, "'n' is 0: 1 to 16"),
    ({"best_of": 17}, "'best_of' is 17: 1 to 16"),
    ({"best_of": 2, "n": 3}, "'best_of' is 2 and 'n' 3: it must be at least that"),
    ({"best_of": 2}, "'best_of' is 2 and 'n' 1: chats have none; leave it out"),
    ({"n": 17}, "'n' is 17: 1 to 16"),
    ({"n": True}, "'n' is true: expected int | null, got bool"),
]
NOT_YET: list[tuple[str, Any, str]] = [
    ("echo", True, "false"),
    ("suffix", "end", '""'),
    ("logprobs", True, "false"),
    ("logprobs", 0, "false"),
    ("top_logprobs", 999999, "0"),
    ("tools", [{"type": "function"}], "[]"),
    ("tool_choice", "required", '"none" or "auto"'),
    ("response_format", {"type": "json_object"}, '{"type":"text"}'),
    ("logit_bias", {"5": 100}, "{}"),
    ("presence_penalty", 0.5, "0"),
    ("frequency_penalty", False, "0"),
    ("audio", {"voice": "x"}, "null"),
]
BAD_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "'prompt' is null: expected str | array, got null"),
    ({"prompt": 5}, "'prompt' is 5: expected str | array, got int"),
    ({"prompt": [True]}, "'prompt[0]': expected int | str | array, got bool"),
    ({"prompt": [1, "a"]}, "'prompt' has 2 prompts: send one a request"),
    ({"prompt": [[1], [2]]}, "'prompt' has 2 prompts: send one a request"),
]


@pytest.mark.parametrize(("fields", "message"), BAD, ids=lambda value: json.dumps(value)[:40])
def test_a_bad_chat_is_told_what_would_be_right(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    assert caught.value.message == message
    error = replies.error_body(caught.value)["error"]
    assert isinstance(error, dict)
    assert error["param"] == next(iter(fields))
    assert (error["type"], replies.status_of(caught.value)) == ("invalid_request_error", 400)


@pytest.mark.parametrize(("field", "value", "right"), NOT_YET, ids=lambda value: json.dumps(value)[:40])
def test_what_is_not_there_yet_is_refused_unless_it_makes_no_difference(field: str, value: object, right: str) -> None:
    shown = json.dumps(value, separators=(",", ":"))
    message = f"'{field}' is {shown}, which is not supported yet: leave it out or {right}"
    for ask in (chat, completion):
        with pytest.raises(RequestError) as caught:
            ask(**{field: value})
        assert caught.value.message == message
        for neutral in right.split(" or "):
            ask(**{field: json.loads(neutral)})
        ask(**{field: None})


@pytest.mark.parametrize(("fields", "message"), BAD_COMPLETIONS, ids=lambda value: json.dumps(value)[:40])
def test_a_bad_completion_is_told_what_would_be_right(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        completion(**fields)
    assert caught.value.message == message


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is not valid JSON: Input data was truncated"),
        (b"{", "the body is not valid JSON: Input data was truncated"),
        (b"{'a': 1}", "the body is not valid JSON: JSON is malformed: object keys must be strings (byte 1)"),
        (b'{"messages": "\xff"}', "the body is not valid JSON: Invalid UTF-8 encoded string"),
        (b'{"temperature": NaN}', "the body is not valid JSON: JSON is malformed: invalid character (byte 16)"),
        (b"[1]", "the body must be a JSON object, not a list"),
        (b'"Hi"', "the body must be a JSON object, not a string"),
        (b"null", "the body must be a JSON object, not null"),
        (b"[" * 100_000, "the body is nested too deeply"),
    ],
    ids=range(9),
)
def test_a_body_that_is_no_json_object_is_told_so(body: bytes, message: str) -> None:
    for parse in (parse_chat, parse_completion):
        with pytest.raises(RequestError) as caught:
            parse(body)
        assert caught.value.message == message


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(RequestError, match="not valid JSON"):
        parse_completion(b'{"prompt": "\\ud83d"}')


def test_defaults_are_openais() -> None:
    assert chat() == Asked(
        model=None,
        messages=[{"role": "user", "content": "Hi"}],
        prompt=None,
        max_tokens=None,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        seed=None,
        stop=(),
        stream=False,
        include_usage=False,
        ignore_eos=False,
    )


def test_messages_reach_the_template_as_it_expects_them() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    given = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
        {"role": "assistant"},
    ]
    assert chat(messages=given).messages == [
        {"role": "user", "content": "a\nb", "name": "me"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
        {"role": "assistant", "content": ""},
    ]


def test_the_newer_token_limit_wins() -> None:
    assert chat(max_tokens=5, max_completion_tokens=3).max_tokens == 3
    assert chat(max_tokens=5, max_completion_tokens=None).max_tokens == 5


def test_stop_strings_may_be_one_or_many() -> None:
    assert chat(stop="a").stop == ("a",)
    assert chat(stop=["a", "b", "a"]).stop == ("a", "b")
    assert chat(stop=[]).stop == ()


# --- tokens and limits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty: give at least one token"),
        ([], "the prompt is empty: give at least one token"),
        ([""], "the prompt is empty: give at least one token"),
        ([5, 321], "'prompt[1]' is 321: token ids are 0 to 320"),
        ([-1], "'prompt[0]' is -1: token ids are 0 to 320"),
        ([10**30], f"'prompt[0]' is {10**30}: token ids are 0 to 320"),
    ],
    ids=range(6),
)
def test_a_prompt_without_meaning_is_refused(tokenizer: Tokenizer, prompt: object, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        tokenize(completion(prompt=prompt), tokenizer, max_model_len=100)
    assert caught.value.message == message


def test_a_text_that_is_far_too_long_is_not_read_to_its_end(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    def encode(text: str) -> list[int]:
        read.append(len(text))
        return [5] * len(text)

    monkeypatch.setattr(tokenizer, "encode", encode)
    with pytest.raises(RequestError, match="over 100 tokens") as caught:
        tokenize(completion(prompt="x" * 1_000_000), tokenizer, max_model_len=100)
    assert caught.value.code is ErrorCode.CONTEXT_LENGTH
    assert read == [1600]


def test_a_text_of_long_tokens_is_read_to_its_end(tokenizer: Tokenizer) -> None:
    text = "<think>" * 300
    assert len(tokenize(completion(prompt=text), tokenizer, max_model_len=40)) == 300


def limits(asked: Asked, num_prompt_tokens: int) -> int:
    sampling = sampling_of(asked, num_prompt_tokens=num_prompt_tokens, max_model_len=100, eos=(1,), seed=3)
    return sampling.max_tokens


def test_an_answer_may_be_as_long_as_the_endpoint_says() -> None:
    assert limits(chat(), 40) == 60
    assert limits(completion(), 40) == 16
    assert limits(completion(), 95) == 5
    assert limits(completion(max_tokens=60), 40) == 60


@pytest.mark.parametrize(
    ("asked", "num_prompt_tokens", "message"),
    [
        (completion(), 100, "the prompt has 100 tokens and the model's context 100, which must hold the answer too"),
        (chat(max_tokens=61), 40, "the prompt has 40 tokens and 61 more are asked for, but the model's context is 100"),
        (chat(max_tokens=10**30), 40, "ask for at most 60"),
    ],
    ids=range(3),
)
def test_what_does_not_fit_is_a_context_length_error(asked: Asked, num_prompt_tokens: int, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        limits(asked, num_prompt_tokens)
    assert caught.value.code is ErrorCode.CONTEXT_LENGTH


def test_odd_ways_to_ask_for_the_best_token_are_understood() -> None:
    def drawn(**fields: Any) -> tuple[float, float, int]:
        asked = chat(**fields)
        sampling = sampling_of(asked, num_prompt_tokens=1, max_model_len=100, eos=(), seed=3)
        return sampling.temperature, sampling.top_p, sampling.top_k

    assert drawn(temperature=0) == (0.0, 1.0, 0)
    assert drawn(temperature=1e-300) == (0.0, 1.0, 0)
    assert drawn(top_p=0) == (1.0, 1.0, 1)
    assert drawn(top_k=-1) == (1.0, 1.0, 0)
    assert drawn(top_k=10**30) == (1.0, 1.0, (1 << 31) - 1)


def test_every_seed_fits_the_wire() -> None:
    for seed in (0, 7, -1, 1 << 80, -(1 << 80)):
        sampling = sampling_of(chat(seed=seed), num_prompt_tokens=1, max_model_len=100, eos=(), seed=3)
        assert 0 <= sampling.seed < 1 << 63
    assert sampling_of(chat(), num_prompt_tokens=1, max_model_len=100, eos=(), seed=3).seed == 3

"""Requests of OpenAI's HTTP API: what is understood, and what is refused by name.

Bodies are parsed once into a generic object and then into a typed one. Fields nobody knows are ignored, as
OpenAI's own clients send what servers have never heard of. Fields that are known but not served yet are accepted
at their neutral values only (`neutral`): an answer must never silently be another than the one asked for.

Reference: https://platform.openai.com/docs/api-reference
"""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta, Struct

from common.errors import ContextLengthError, ModelNotFoundError, RequestError
from common.messages import MAX_CHOICES, Priority, Sampling
from common.model.tokenizer import Tokenizer
from coordinator.gateway.neutral import NEUTRAL

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 512
DEFAULT_COMPLETION_TOKENS = 16
_SEED_MASK = (1 << 63) - 1
_GREEDY_BELOW = 1e-4
"""A temperature this low draws the best token anyway; dividing logits by it would overflow."""

_MAX_TOP_K = (1 << 31) - 1
_LONG_TOKEN_CHARS = 16
"""Hardly any text has tokens this long on average."""
_MAX_CUT_TOKENS = 64
"""Cutting a text changes the tokens of the word at the cut only."""

TokenCount = Annotated[int, Meta(ge=1)]


class InvalidField(RequestError):
    """A request is wrong in one field; `param` names it as OpenAI's error shape wants it."""

    def __init__(self, param: str | None, message: str) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLong(ContextLengthError):
    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class StreamOptions(Struct):
    include_usage: bool | None = None


MessageRole = Literal["system", "developer", "user", "assistant", "tool"]


class Message(Struct):
    role: MessageRole
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class GenerationFields(Struct, kw_only=True):
    """What both endpoints share."""

    model: str | None = None
    max_tokens: TokenCount | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    best_of: int | None = None
    priority: Priority | None = None


class ChatFields(GenerationFields, kw_only=True):
    messages: list[Message]
    max_completion_tokens: TokenCount | None = None


class CompletionFields(GenerationFields, kw_only=True):
    prompt: str | list[int | str | list[int]]


Fields = TypeVar("Fields", bound=GenerationFields)


@dataclass(frozen=True, slots=True)
class Asked:
    """One valid request. Exactly one of `messages`, `prompt` is set; `prompt` as text or as token ids."""

    model: str | None
    messages: list[dict[str, Any]] | None
    prompt: str | list[int] | None
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    ignore_eos: bool
    priority: Priority | None = None
    n: int = 1
    best_of: int = 1
    """Answers to write; the `n` best of them are shown."""

    @property
    def is_chat(self) -> bool:
        return self.messages is not None


def parse_chat(body: bytes) -> Asked:
    """RequestError says which field is wrong and what would be right."""
    fields = _convert(body, ChatFields)
    if not fields.messages:
        raise InvalidField("messages", "'messages' is empty: give at least one message")
    messages = [_message(message, f"messages[{index}]") for index, message in enumerate(fields.messages)]
    return _asked(fields, messages=messages, max_tokens=fields.max_completion_tokens or fields.max_tokens)


def parse_completion(body: bytes) -> Asked:
    """RequestError says which field is wrong and what would be right."""
    fields = _convert(body, CompletionFields)
    return _asked(fields, prompt=_prompt(fields.prompt), max_tokens=fields.max_tokens)


def check_model(asked: Asked, served: str) -> None:
    """ModelNotFoundError unless the request names the served model, or none."""
    if asked.model is not None and asked.model != served:
        raise ModelNotFoundError(f"the model '{asked.model}' does not exist here; this server has '{served}'")


def tokenize(asked: Asked, tokenizer: Tokenizer, *, max_model_len: int) -> list[int]:
    """The prompt's token ids. RequestError if there are none, one is unknown, or they cannot fit.

    Text that is certainly too long is not tokenised to its end, for that may take seconds.
    """
    if isinstance(asked.prompt, list):
        tokens = asked.prompt
        for index, token in enumerate(tokens):
            if not 0 <= token < tokenizer.vocab_size:
                raise InvalidField(
                    "prompt", f"'prompt[{index}]' is {token}: token ids are 0 to {tokenizer.vocab_size - 1}"
                )
    else:
        encode = tokenizer.encode_rendered if asked.is_chat else tokenizer.encode
        text = _prompt_text(asked, tokenizer)
        if len(text) > max_model_len * _LONG_TOKEN_CHARS:
            head = encode(text[: max_model_len * _LONG_TOKEN_CHARS])
            if len(head) > max_model_len + _MAX_CUT_TOKENS:
                raise PromptTooLong(
                    _prompt_field(asked),
                    f"the prompt has over {max_model_len} tokens, which is the model's context: shorten the prompt",
                )
        tokens = encode(text)
    if not tokens:
        raise InvalidField(_prompt_field(asked), "the prompt is empty: give at least one token")
    return tokens


def _prompt_text(asked: Asked, tokenizer: Tokenizer) -> str:
    if asked.messages is None:
        assert isinstance(asked.prompt, str)
        return asked.prompt
    try:
        return tokenizer.render_chat(asked.messages)
    except RequestError as error:
        raise InvalidField("messages", error.message) from error


def sampling_of(
    asked: Asked, *, num_prompt_tokens: int, max_model_len: int, eos: tuple[int, ...], seed: int
) -> Sampling:
    """How to draw. `seed` is used where the request has none. ContextLengthError if it cannot fit."""
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise PromptTooLong(
            _prompt_field(asked),
            f"the prompt has {num_prompt_tokens} tokens and the model's context {max_model_len}, "
            "which must hold the answer too: shorten the prompt",
        )
    max_tokens = asked.max_tokens
    if max_tokens is None:
        max_tokens = room if asked.is_chat else min(DEFAULT_COMPLETION_TOKENS, room)
    if max_tokens > room:
        raise PromptTooLong(
            _prompt_field(asked),
            f"the prompt has {num_prompt_tokens} tokens and {max_tokens} more are asked for, but the model's "
            f"context is {max_model_len}: shorten the prompt or ask for at most {room}",
        )
    return Sampling(
        max_tokens=max_tokens,
        seed=(seed if asked.seed is None else asked.seed) & _SEED_MASK,
        temperature=asked.temperature if asked.temperature >= _GREEDY_BELOW else 0.0,
        # A nucleus of nothing still holds the best token.
        top_p=asked.top_p or 1.0,
        top_k=asked.top_k if asked.top_p else 1,
        stop_token_ids=() if asked.ignore_eos else eos,
        scored=asked.best_of > asked.n,
    )


def _prompt_field(asked: Asked) -> str:
    return "messages" if asked.is_chat else "prompt"


# --- fields -------------------------------------------------------------------------------------------------


def _convert(body: bytes, kind: type[Fields]) -> Fields:
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidField(None, f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise InvalidField(None, "the body is nested too deeply") from error
    if not isinstance(fields, dict):
        raise InvalidField(None, f"the body must be a JSON object, not {_json_type(fields)}")
    for name, neutral in NEUTRAL.items():
        value = fields.get(name)
        if value is not None and not any(_same(value, allowed) for allowed in neutral):
            right = " or ".join(_shown(allowed) for allowed in neutral) or "null"
            raise InvalidField(
                name, f"'{name}' is {_shown(value)}, which is not supported yet: leave it out or {right}"
            )
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), fields) from error


def _asked(
    fields: GenerationFields,
    *,
    messages: list[dict[str, Any]] | None = None,
    prompt: str | list[int] | None = None,
    max_tokens: int | None,
) -> Asked:
    options = fields.stream_options
    n = _number("n", fields.n)
    best_of = n if fields.best_of is None else _number("best_of", fields.best_of)
    if best_of < n:
        raise InvalidField("best_of", f"'best_of' is {best_of} and 'n' {n}: it must be at least that")
    if best_of > n and (messages is not None or fields.stream):
        what = "chats have none" if messages is not None else "what is best is known at the end, so nothing is streamed"
        raise InvalidField("best_of", f"'best_of' is {best_of} and 'n' {n}: {what}; leave it out")
    return Asked(
        model=fields.model,
        messages=messages,
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=1.0 if fields.temperature is None else fields.temperature,
        top_p=1.0 if fields.top_p is None else fields.top_p,
        top_k=min(max(0, fields.top_k or 0), _MAX_TOP_K),
        seed=fields.seed,
        stop=_stop(fields.stop),
        stream=bool(fields.stream),
        include_usage=bool(options and options.include_usage),
        ignore_eos=bool(fields.ignore_eos),
        priority=fields.priority,
        n=n,
        best_of=best_of,
    )


def _number(name: str, value: int | None) -> int:
    """Of answers."""
    if value is None:
        return 1
    if not 1 <= value <= MAX_CHOICES:
        raise InvalidField(name, f"'{name}' is {value}: 1 to {MAX_CHOICES}")
    return value


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    strings = [stop] if isinstance(stop, str) else stop or []
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidField("stop", f"'stop' has {len(strings)} strings: give at most {MAX_STOP_STRINGS}")
    for string in strings:
        if not string:
            raise InvalidField("stop", "'stop' has an empty string, which is found everywhere: leave it out")
        if len(string) > MAX_STOP_CHARS:
            raise InvalidField("stop", f"a 'stop' string has {len(string)} characters: at most {MAX_STOP_CHARS}")
    return tuple(dict.fromkeys(strings))


def _prompt(prompt: str | list[int | str | list[int]]) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    tokens = [entry for entry in prompt if isinstance(entry, int)]
    if len(tokens) == len(prompt):
        return tokens
    if len(prompt) != 1:
        raise InvalidField("prompt", f"'prompt' has {len(prompt)} prompts: send one a request")
    only = prompt[0]
    assert not isinstance(only, int)
    return only


def _message(message: Message, where: str) -> dict[str, Any]:
    """As chat templates expect it: content is a string, absent fields are absent."""
    if message.content is None and not message.tool_calls and message.role != "assistant":
        raise InvalidField("messages", f"'{where}.content' is missing: give a string or a list of text parts")
    content = message.content
    if isinstance(content, list):
        content = "\n".join(_text_part(part, f"{where}.content[{index}]") for index, part in enumerate(content))
    given: dict[str, Any] = {"role": message.role, "content": "" if content is None else content}
    if message.name is not None:
        given["name"] = message.name
    if message.tool_calls:
        given["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        given["tool_call_id"] = message.tool_call_id
    return given


def _text_part(part: dict[str, Any], where: str) -> str:
    if part.get("type") != "text":
        raise InvalidField("messages", f"'{where}' is of type {_shown(part.get('type'))}: only \"text\" is supported")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidField("messages", f"'{where}.text' must be a string, not {_json_type(text)}")
    return text


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """Templates walk through arguments as an object; the API carries them as JSON text."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"])
    except msgspec.DecodeError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


# --- words --------------------------------------------------------------------------------------------------


def _invalid(message: str, fields: dict[str, Any]) -> InvalidField:
    """msgspec's "Expected `int`, got `str` - at `$.seed`" in a client's words."""
    what, _, where = message.partition(" - at `$.")
    path = where.removesuffix("`")
    missing = re.match(r"Object missing required field `(\w+)`", what)
    if missing:
        path = f"{path}.{missing[1]}" if path else missing[1]
        return InvalidField(_root(path), f"'{path}' is missing")
    what = f"{what[0].lower()}{what[1:].replace('`', '')}"
    if path.endswith(".role"):
        what = f"{what}, expected one of {', '.join(get_args(MessageRole))}"
    elif path == "priority":
        what = f"expected one of {', '.join(Priority)}"
    shown = f" is {_shown(fields[path])}" if path in fields else ""
    return InvalidField(_root(path), f"'{path}'{shown}: {what}")


def _root(path: str) -> str:
    return re.split(r"[.\[]", path, maxsplit=1)[0]


def _same(value: Any, neutral: Any) -> bool:
    """Equal in JSON's eyes: 0 and 0.0 are one number, false is none."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _shown(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 60 else f"{text[:60]}..."


def _json_type(value: Any) -> str:
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list"}
    return names.get(type(value), "an object")

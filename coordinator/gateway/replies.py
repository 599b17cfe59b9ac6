"""Response bodies of OpenAI's HTTP API: whole answers, model lists, usage, errors."""

import math
from collections.abc import Sequence

from common.errors import BatonError, ErrorCode
from common.messages import FinishReason

CLIENT_GONE = 499
"""Never sent, only counted: nobody was there to read it."""
_RETRY_AFTER_S = 1.0

_STATUS = {
    ErrorCode.INVALID_REQUEST: (400, "invalid_request_error", None),
    ErrorCode.CONTEXT_LENGTH: (400, "invalid_request_error", "context_length_exceeded"),
    ErrorCode.MODEL_NOT_FOUND: (404, "invalid_request_error", "model_not_found"),
    ErrorCode.UNAUTHORIZED: (401, "invalid_request_error", "invalid_api_key"),
    ErrorCode.OVERLOADED: (429, "rate_limit_error", "rate_limit_exceeded"),
    ErrorCode.DEADLINE: (504, "server_error", "deadline_exceeded"),
    ErrorCode.CONFIG: (500, "server_error", None),
    ErrorCode.INTERNAL: (500, "server_error", None),
}
_UNAVAILABLE = (503, "server_error", "service_unavailable")

_INTERRUPTED = "the request was interrupted on its way between two nodes"
_WORDS = {
    ErrorCode.PEER_LOST: "the node serving this request was lost",
    ErrorCode.MOVED: "the node serving this request is being drained",
    ErrorCode.CANCELLED: "the node serving this request has stopped",
    ErrorCode.INCOMPATIBLE: "the nodes that could serve this request do not fit each other",
    ErrorCode.TRANSFER: _INTERRUPTED,
    ErrorCode.STALE_BLOCK: _INTERRUPTED,
    ErrorCode.DEADLINE: "the request's deadline has passed",
    ErrorCode.CONFIG: "the server is misconfigured",
    ErrorCode.INTERNAL: "the server failed on this request",
}
"""What clients read instead of messages that name processes, addresses or our own code: those are for the log."""

PATHS = {
    "prefill": "prefill-decode",
    "home": "decode-only",
    "fallback": "decode-fallback",
    "handover": "handover",
}
"""`Tokens.path` in the words of the x-baton-path header and of the metric."""


def status_of(error: BatonError) -> int:
    return _STATUS.get(error.code, _UNAVAILABLE)[0]


def error_body(error: BatonError) -> dict[str, object]:
    _, kind, code = _STATUS.get(error.code, _UNAVAILABLE)
    param = "model" if error.code is ErrorCode.MODEL_NOT_FOUND else getattr(error, "param", None)
    return http_error_body(_WORDS.get(error.code, error.message), kind=kind, param=param, code=code)


def error_headers(error: BatonError) -> dict[str, str]:
    """Retry-After (whole seconds) where trying again later can help; how to say who one is."""
    if error.code is ErrorCode.UNAUTHORIZED:
        return {"WWW-Authenticate": "Bearer"}
    if status_of(error) not in (429, 503):
        return {}
    return {"Retry-After": str(max(1, math.ceil(error.retry_after_s or _RETRY_AFTER_S)))}


def http_error_body(
    message: str, *, kind: str = "invalid_request_error", param: str | None = None, code: str | None = None
) -> dict[str, object]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def usage(*, num_prompt_tokens: int, num_output_tokens: int, cached_tokens: int) -> dict[str, object]:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def completion(
    *,
    is_chat: bool,
    id: str,
    created: int,
    model: str,
    choices: Sequence[tuple[str, FinishReason]],
    usage: dict[str, object],
) -> dict[str, object]:
    """A whole answer; `choices` in order, each its text and how it ended."""
    kind = "chat.completion" if is_chat else "text_completion"
    shown = [_choice(index, text, finish, is_chat=is_chat) for index, (text, finish) in enumerate(choices)]
    return {"id": id, "object": kind, "created": created, "model": model, "choices": shown, "usage": usage}


def _choice(index: int, text: str, finish: FinishReason, *, is_chat: bool) -> dict[str, object]:
    choice: dict[str, object] = {"index": index, "logprobs": None, "finish_reason": finish.value}
    if is_chat:
        choice["message"] = {"role": "assistant", "content": text, "refusal": None}
    else:
        choice["text"] = text
    return choice


def model_entry(name: str, *, created: int, max_model_len: int) -> dict[str, object]:
    return {"id": name, "object": "model", "created": created, "owned_by": "baton", "max_model_len": max_model_len}

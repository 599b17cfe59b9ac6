"""What a stranger may send to the gateway, as Hypothesis strategies: requests from noise to almost right."""

import json
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from tests.hostile import NOISE, NUMBERS, TEXTS, changed, weighted
from tests.raw_http import http

_FIELDS: Sequence[str] = [
    *("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "seed"),
    *("stop", "stream", "stream_options", "ignore_eos", "n", "logprobs", "top_logprobs", "logit_bias", "user", "echo"),
    *("best_of", "suffix", "response_format", "tools"),
]
_HUGE = st.sampled_from([2**63, -(2**70), 10**400, 1e308, -1e308])
_JSON: SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, _HUGE, st.floats(), TEXTS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
_MESSAGE = st.fixed_dictionaries(
    {}, optional={"role": st.sampled_from(["user", "king", 7]), "content": _JSON, "name": _JSON, "tool_calls": _JSON}
)


def _body(model: str) -> SearchStrategy[bytes]:
    right = st.fixed_dictionaries({"model": st.just(model), "prompt": st.just("hello"), "max_tokens": st.just(1)})
    chat = st.lists(_MESSAGE, max_size=3).map(lambda found: {"model": model, "messages": found, "max_tokens": 1})
    change = st.dictionaries(st.sampled_from(_FIELDS), _JSON, max_size=3)
    objects = st.tuples(st.one_of(right, chat), change).map(lambda both: {**both[0], **both[1]})
    text = weighted((4, objects), (1, _JSON)).map(lambda value: json.dumps(value).encode())
    spoilt = st.one_of(
        NOISE,
        st.tuples(text, st.integers(0, 5_000)).map(lambda both: both[0][: both[1]]),
        st.tuples(text, st.integers(0, 5_000), st.integers(0, 255)).map(lambda three: changed(*three)),
        text.map(lambda body: b'{"model": "x", ' + body[1:]),  # a key twice
        st.sampled_from([100, 50_000]).map(lambda depth: b'{"prompt":' * depth + b"1" + b"}" * depth),
    )
    return weighted((3, text), (1, spoilt))


_HEADERS = st.lists(
    st.sampled_from(
        [
            "Content-Length: 0",
            "Content-Length: +5",
            "Content-Length: 5, 6",
            "Content-Length: 0x5",
            "Content-Length: " + "9" * 40,
            "Content-Length : 5",
            "Transfer-Encoding: chunked",
            "Transfer-Encoding: xchunked",
            "Transfer-Encoding: chunked, identity",
            "Transfer-Encoding:\tchunked",
            "Content-Encoding: gzip",
            "Content-Encoding: br",
            "Content-Type: text/plain; charset=none",
            "Expect: 100-continue",
            "Expect: a miracle",
            "Upgrade: websocket",
            "Connection: upgrade, close",
            "Connection: \xff\xfe",
            "X-Request-Id: " + "i" * 5_000,
            "X-Request-Id: a\0b",
            " folded: line",
            "no colon",
            ": nameless",
            "Host: a",
            "Authorization: Bearer " + "k" * 5_000,
        ]
    ),
    max_size=4,
)
_LINES = st.sampled_from(
    [
        "POST /v1/completions HTTP/1.1",
        "POST /v1/chat/completions HTTP/1.1",
        "POST /v1/completions HTTP/1.0",
        "GET /v1/models/%00%ff HTTP/1.1",
        "GET //../..//etc/passwd HTTP/1.1",
        "OPTIONS * HTTP/1.1",
        "CONNECT x:1 HTTP/1.1",
        "GET http://[::1 HTTP/1.1",
        "POST  /v1/completions  HTTP/1.1",
        "BREW /pot HTTP/1.1",
        "GET /cluster HTTP/1.1\r\nRange: bytes=-1",
    ]
)
_CHUNKS = st.sampled_from([b"0\r\n\r\n", b"5\r\nhello\r\n0\r\n\r\n", b"zz\r\n", b"ffffffffffffffff\r\n", b"-1\r\n\r\n"])


def http_requests(model: str) -> SearchStrategy[bytes]:
    """What one connection says to the gateway: one request or several, some of them cut short."""
    sent = st.tuples(st.sampled_from(["/v1/completions", "/v1/chat/completions"]), _body(model)).map(
        lambda both: http(both[1], both[0])
    )
    by_hand = st.tuples(_LINES, _HEADERS, st.one_of(_body(model), _CHUNKS)).map(
        lambda three: "\r\n".join([three[0], *three[1], "", ""]).encode("latin-1") + three[2]
    )
    cut = st.tuples(sent, st.integers(0, 400)).map(lambda both: both[0][: both[1]])
    one = weighted((4, sent), (2, by_hand), (1, cut), (1, NOISE))
    return st.lists(one, min_size=1, max_size=3).map(b"".join)

"""What cannot be served: the right status and OpenAI's error shape before the first event, each alone."""

import asyncio
import json
from typing import Any

import pytest

from common.errors import (
    BatonError,
    ContextLengthError,
    DeadlineError,
    InternalError,
    OverloadedError,
    PeerLostError,
    TransferError,
    UnavailableError,
)
from common.messages import Routed, View
from coordinator.gateway import replies
from tests.raw_http import exchange, http
from tests.unit.coordinator.gateway.cluster import MODEL, address, breaks, hangs, in_turn, node_view, refuses, says
from tests.unit.coordinator.gateway.conftest import WITHIN_S, RunningGateway, StartGateway, chat_body, events_of

SECRET = "tcp://127.0.0.1:40001: connection lost"
SHAPES: list[tuple[BatonError, str, int, str, str | None]] = [
    (OverloadedError("queue full", retry_after_s=2.5), "queue full", 429, "rate_limit_error", "rate_limit_exceeded"),
    (UnavailableError("no node"), "no node", 503, "server_error", "service_unavailable"),
    (PeerLostError(SECRET), "the node serving this request was lost", 503, "server_error", "service_unavailable"),
    (
        TransferError(SECRET),
        "the request was interrupted on its way between two nodes",
        503,
        "server_error",
        "service_unavailable",
    ),
    (DeadlineError(SECRET), "the request's deadline has passed", 504, "server_error", "deadline_exceeded"),
    (ContextLengthError("too long"), "too long", 400, "invalid_request_error", "context_length_exceeded"),
    (InternalError(SECRET), "the server failed on this request", 500, "server_error", None),
]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("error", "words", "status", "kind", "code"),
    SHAPES,
    ids=lambda value: type(value).__name__ if isinstance(value, BatonError) else "",
)
async def test_a_nodes_refusal_is_a_status_before_the_first_event(
    start_gateway: StartGateway,
    caplog: pytest.LogCaptureFixture,
    error: BatonError,
    words: str,
    status: int,
    kind: str,
    code: str | None,
    stream: bool,
) -> None:
    caplog.set_level("INFO")
    gateway = await start_gateway(max_attempts=1)
    gateway.cluster.generate = refuses(error)
    found, body, headers = await gateway.chat(stream=stream)
    assert (found, body) == (status, {"error": {"message": words, "type": kind, "param": None, "code": code}})
    logged = [str(vars(record)) for record in caplog.records]
    assert any(error.message in facts for facts in logged), "the log says what the client need not know"
    if status in (429, 503):
        assert int(headers["Retry-After"]) == (3 if error.retry_after_s else 1)
    else:
        assert "Retry-After" not in headers


async def test_a_coordinators_refusal_is_a_status(start_gateway: StartGateway) -> None:
    def refuse(route: object) -> Routed:
        raise UnavailableError("no decode node is ready", retry_after_s=7)

    gateway = await start_gateway(patience_s=0.1)
    gateway.cluster.route = refuse
    status, body, headers = await gateway.chat(stream=True)
    assert (status, headers["Retry-After"]) == (503, "7")
    assert body["error"]["message"] == "no decode node is ready"
    assert gateway.cluster.generates == []


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_waits_for_a_node_that_comes(start_gateway: StartGateway, stream: bool) -> None:
    gateway = await start_gateway(patience_s=60.0)

    def route(body: object) -> Routed:
        if not gateway.cluster.view.nodes:
            raise UnavailableError("no decode node is ready", retry_after_s=60)
        return Routed(address("d1"), None, "scripted")

    gateway.cluster.generate = says(gateway.tokenizer.encode("one"))
    await gateway.cluster.change(view=View(), route=route)
    asking = asyncio.create_task(gateway.chat(stream=stream))
    await gateway.cluster.until(lambda: len(gateway.cluster.routes) == 1)
    await gateway.cluster.change(view=View((node_view("d1"),)))
    async with asyncio.timeout(WITHIN_S):
        status, _, headers = await asking
    assert (status, headers["x-baton-path"], len(gateway.cluster.routes)) == (200, "decode-only", 2)


async def test_a_node_found_dead_is_not_ready_until_the_coordinator_says_something_newer(
    start_gateway: StartGateway,
) -> None:
    gateway = await start_gateway(max_attempts=1)
    gateway.cluster.generate = refuses(PeerLostError("gone"))
    assert (await gateway.chat())[0] == 503
    status, body = await gateway.get("/ready")
    assert (status, body["reason"]) == (503, f"no decode node is ready for {MODEL}: d1 is lost")
    await gateway.cluster.change(view=View((node_view("d1"),)))
    async with asyncio.timeout(WITHIN_S):
        while (await gateway.get("/ready"))[0] != 200:
            pass


@pytest.mark.parametrize("stream", [True, False])
async def test_a_deadline_is_a_504(start_gateway: StartGateway, stream: bool) -> None:
    gateway = await start_gateway(request_timeout_s=0.05)
    gateway.cluster.generate = hangs([])
    status, body, _ = await gateway.chat(stream=stream)
    assert (status, body["error"]["code"]) == (504, "deadline_exceeded")
    assert gateway.cluster.num_generating == 0


@pytest.mark.parametrize("error", [InternalError("bug"), PeerLostError("gone")])
async def test_a_stream_that_breaks_ends_in_an_error_and_no_done(
    start_gateway: StartGateway, error: BatonError
) -> None:
    gateway = await start_gateway(max_attempts=1)
    gateway.cluster.generate = breaks(gateway.tokenizer.encode("one"), error)
    status, stream, _ = await gateway.chat(stream=True)
    events = events_of(stream)
    assert status == 200
    assert json.loads(events[-1])["error"]["message"] == replies.error_body(error)["error"]["message"]  # type: ignore[index]
    assert "[DONE]" not in stream
    assert '"finish_reason":"' not in stream
    _, metrics = await gateway.get("/metrics")
    assert f'{{route="/v1/chat/completions",status="{replies.status_of(error)}"}} 1.0' in metrics, "counted as broken"


async def test_a_stream_past_its_deadline_ends_in_an_error(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(request_timeout_s=0.5)
    gateway.cluster.generate = hangs(gateway.tokenizer.encode("one"))
    _, stream, _ = await gateway.chat(stream=True)
    assert json.loads(events_of(stream)[-1])["error"]["code"] == "deadline_exceeded"


BAD_CHATS: list[tuple[dict[str, Any] | bytes, int, str | None, str | None]] = [
    ({"messages": []}, 400, "messages", None),
    ({"max_tokens": -1}, 400, "max_tokens", None),
    ({"model": "nobody"}, 404, "model", "model_not_found"),
    ({"n": 99}, 400, "n", None),
    ({"max_tokens": 99}, 400, "messages", "context_length_exceeded"),
    ({"messages": [{"role": "user", "content": "漢" * 200}]}, 400, "messages", "context_length_exceeded"),
    (b"{", 400, None, None),
    (b'{"messages": "\xff"}', 400, None, None),
]
BAD_COMPLETIONS: list[tuple[dict[str, Any], int, str | None, str | None]] = [
    ({"prompt": ""}, 400, "prompt", None),
    ({"prompt": []}, 400, "prompt", None),
    ({"prompt": [0, 321]}, 400, "prompt", None),
    ({"prompt": [-1]}, 400, "prompt", None),
    ({"prompt": ["a", "b"]}, 400, "prompt", None),
    ({"prompt": "a", "best_of": 3, "stream": True}, 400, "best_of", None),
    ({"prompt": [5] * 100}, 400, "prompt", "context_length_exceeded"),
    ({"prompt": "one", "max_tokens": 0}, 400, "max_tokens", None),
    ({"prompt": "one", "echo": True}, 400, "echo", None),
]


async def test_bad_requests_fail_alone_while_a_stream_runs_on(gateway: RunningGateway) -> None:
    """All of them, streaming and not, in the middle of one good stream."""
    go_on = asyncio.Event()
    gateway.cluster.generate = says(gateway.tokenizer.encode("one two three"), before=go_on.wait)
    good = asyncio.create_task(gateway.chat(stream=True))
    await gateway.cluster.until(lambda: gateway.cluster.num_generating == 1)
    for change, status, param, code in BAD_CHATS:
        for stream in (True, False):
            body = change if isinstance(change, bytes) else {**chat_body(), **change, "stream": stream}
            found, answer, _ = await gateway.post("/v1/chat/completions", body)
            error = answer["error"]
            assert (found, error["param"], error["code"]) == (status, param, code), (change, error)
            assert error["type"] == "invalid_request_error"
            assert error["message"]
    for fields, status, param, code in BAD_COMPLETIONS:
        found, answer, _ = await gateway.post("/v1/completions", {"model": MODEL, **fields, "stream": True})
        assert (found, answer["error"]["param"], answer["error"]["code"]) == (status, param, code), fields
    assert len(gateway.cluster.generates) == 1
    go_on.set()
    _, stream, _ = await good
    assert stream.endswith("[DONE]\n\n")


async def test_a_body_over_the_limit_is_a_413(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(max_body_bytes=1000)
    status, body, _ = await gateway.chat("x" * 2000)
    assert (status, body["error"]["message"]) == (413, "the body is larger than 1000 bytes")


async def test_a_body_announced_over_the_limit_is_a_413_before_its_first_byte(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(max_body_bytes=1000)
    reply = await exchange(gateway.url, http(b"", headers={"Content-Length": "1001"}), within_s=WITHIN_S)
    assert (reply.status, reply.document["error"]["message"]) == (413, "the body is larger than 1000 bytes")


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [("Content-Encoding", "gzip", "Can not decode"), ("Transfer-Encoding", "chunked", "chunk size")],
)
async def test_a_body_that_cannot_be_read_is_the_clients_fault(
    gateway: RunningGateway, name: str, value: str, reason: str
) -> None:
    request = http(b"zz\r\nno\r\n", headers={name: value})
    if name == "Transfer-Encoding":
        request = request.replace(b"Content-Length: 8\r\n", b"")
    reply = await exchange(gateway.url, request, within_s=WITHIN_S)
    assert (reply.status, reply.document["error"]["type"]) == (400, "invalid_request_error")
    assert reason in reply.document["error"]["message"]


@pytest.mark.parametrize(
    "noise",
    [b"\x16\x03\x01\0\xc8\x01\0\0\xc4\x03\x03" + bytes(64), b"\xff" * 300, b"GET / HTTP/9.9\r\n\r\n"],
    ids=["tls", "noise", "version"],
)
async def test_what_is_no_http_gets_the_same_shape_and_no_traceback(
    gateway: RunningGateway, caplog: pytest.LogCaptureFixture, noise: bytes
) -> None:
    reply = await exchange(gateway.url, noise, within_s=WITHIN_S)
    assert (reply.status, reply.document["error"]["type"]) == (400, "invalid_request_error")
    assert reply.document["error"]["message"].startswith("this is not a valid HTTP request: ")
    assert not [record for record in caplog.records if record.exc_info]


async def test_unknown_paths_and_methods_are_errors_in_the_same_shape(gateway: RunningGateway) -> None:
    status, body = await gateway.get("/v1/nothing")
    assert (status, body["error"]["type"]) == (404, "invalid_request_error")
    status, body = await gateway.get("/v1/completions")
    assert (status, body["error"]["message"]) == (405, "GET /v1/completions does not exist: use POST")


async def test_a_bug_in_one_request_is_its_own(gateway: RunningGateway, caplog: pytest.LogCaptureFixture) -> None:
    gateway.cluster.generate = breaks([], ValueError("surprise"))
    status, body, _ = await gateway.chat()
    assert (status, body["error"]["type"]) == (500, "server_error")
    assert "surprise" not in body["error"]["message"], "our code is our business"
    gateway.cluster.generate = breaks(gateway.tokenizer.encode("one"), ValueError("surprise"))
    _, stream, _ = await gateway.chat(stream=True)
    assert json.loads(events_of(stream)[-1])["error"]["type"] == "server_error"
    assert "surprise" in caplog.text
    gateway.cluster.generate = says([1])
    status, _, _ = await gateway.chat()
    assert status == 200


async def test_a_full_node_is_followed_by_another(gateway: RunningGateway) -> None:
    tokens = gateway.tokenizer.encode("one")
    gateway.cluster.generate = in_turn(refuses(OverloadedError("full")), says(tokens))
    await gateway.cluster.change(view=View((node_view("d1"), node_view("d2"))))
    gateway.cluster.route = lambda route: Routed(address("d2" if route.exclude else "d1"), None, "scripted")
    _, answer, _ = await gateway.chat()
    assert answer["choices"][0]["message"]["content"] == "one"
    assert gateway.cluster.routes[1].exclude == (address("d1").incarnation,)

"""`baton chat` against a small HTTP server that speaks as the gateway does."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from common.errors import ConfigError
from coordinator.cli import chat
from coordinator.cli.openai_client import ApiError, ChatApi


class FakeGateway(ThreadingHTTPServer):
    """Answers with `events` (or a status and a body), and remembers what it was asked."""

    daemon_threads = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.events: list[str] = [delta("Hel"), delta("lo"), "[DONE]"]
        self.models: list[str] = ["tiny"]
        self.refusal: tuple[int, str] | None = None


class _Answer(BaseHTTPRequestHandler):
    server: FakeGateway
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.keys.append(self.headers["authorization"])
        self._send(200, json.dumps({"data": [{"id": model} for model in self.server.models]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append(body)
        self.server.keys.append(self.headers["authorization"])
        if self.server.refusal is not None:
            self._send(*self.server.refusal)
            return
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for event in self.server.events:
            chunk = f"data: {event}\n\n".encode()
            self.wfile.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
        self.wfile.write(b"0\r\n\r\n")

    def _send(self, status: int, text: str) -> None:
        payload = text.encode()
        self.send_response(status)
        self.send_header("content-length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, format: str, *args: object) -> None:
        pass


def delta(text: str) -> str:
    return json.dumps({"choices": [{"delta": {"content": text}}]})


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    with FakeGateway() as gateway:
        thread = threading.Thread(target=gateway.serve_forever, args=(0.01,))
        thread.start()
        yield gateway
        gateway.shutdown()
        thread.join()


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> list[str | type[BaseException]]:
    """What the user types: lines, or KeyboardInterrupt for Ctrl-C and EOFError for Ctrl-D."""
    lines: list[str | type[BaseException]] = []

    def read(prompt: str) -> str:
        line = lines.pop(0)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)
    return lines


def test_one_message_is_answered_and_no_more(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    chat.main(url=gateway.url, message="hi", system="be brief", max_tokens="5", temperature="0.5", seed="3")
    assert capsys.readouterr().out == "Hello\n"
    assert gateway.asked == [
        {
            "model": "tiny",
            "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
            "stream": True,
            "max_tokens": 5,
            "temperature": 0.5,
            "seed": 3,
        }
    ]


def test_a_conversation_remembers_what_was_said(
    gateway: FakeGateway, typed: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    typed += ["hi", "", KeyboardInterrupt, "and you?", EOFError]
    chat.main(url=f"{gateway.url}/v1", model="tiny")
    assert capsys.readouterr().out.count("Hello\n") == 2
    assert [message["content"] for message in gateway.asked[1]["messages"]] == ["hi", "Hello", "and you?"]


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(
    gateway: FakeGateway, typed: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stream, stops = ChatApi.stream, iter([True, False])

    def interrupted(*arguments: Any) -> Iterator[str]:
        texts = stream(*arguments)
        yield next(texts)
        if next(stops):
            raise KeyboardInterrupt
        yield from texts

    monkeypatch.setattr(ChatApi, "stream", interrupted)
    typed += ["hi", "go on", EOFError]
    chat.main(url=gateway.url)
    assert "Hel\n(stopped)\n" in capsys.readouterr().out
    assert [message["content"] for message in gateway.asked[1]["messages"]] == ["hi", "Hel", "go on"]


def test_a_refused_question_is_told_and_forgotten(
    gateway: FakeGateway, typed: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.refusal = (400, json.dumps({"error": {"message": "too long"}}))
    typed += ["hi", "ho", EOFError]
    chat.main(url=gateway.url)
    assert capsys.readouterr().err == "\nbaton: too long (HTTP 400)\n" * 2
    assert [message["content"] for message in gateway.asked[1]["messages"]] == ["ho"]


def test_a_failed_one_shot_exits_with_1(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.refusal = (503, "not json")
    with pytest.raises(SystemExit) as left:
        chat.main(url=gateway.url, message="hi")
    assert left.value.code == 1
    assert capsys.readouterr().err == "baton: not json (HTTP 503)\n"


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([delta("Hel"), json.dumps({"error": {"message": "node lost"}})], "the answer broke off: node lost"),
        ([delta("Hel")], "the answer broke off: the gateway closed the connection"),
    ],
)
def test_an_answer_that_breaks_off_is_no_answer(gateway: FakeGateway, events: list[str], message: str) -> None:
    gateway.events = events
    texts = ChatApi(gateway.url).stream("tiny", [], {})
    assert next(texts) == "Hel"
    with pytest.raises(ApiError, match=message):
        next(texts)


def test_a_key_goes_with_every_request(gateway: FakeGateway) -> None:
    chat.main(url=gateway.url, message="hi", api_key="sk-baton-x")
    chat.main(url=gateway.url, message="hi")
    assert gateway.keys == ["Bearer sk-baton-x"] * 2 + [None] * 2


def test_a_gateway_without_models_is_told(gateway: FakeGateway) -> None:
    gateway.models = []
    with pytest.raises(ApiError, match="serves no model yet"):
        ChatApi(gateway.url).first_model()


def test_without_a_gateway_the_address_is_told() -> None:
    with pytest.raises(ApiError, match=r"no gateway at http://127.0.0.1:1 .*`baton up` starts a cluster"):
        ChatApi("http://127.0.0.1:1").first_model()


def test_a_url_that_is_none_is_a_wrong_setting() -> None:
    with pytest.raises(ConfigError, match="expected a URL such as"):
        ChatApi("127.0.0.1:8000")

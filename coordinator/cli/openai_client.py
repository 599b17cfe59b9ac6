"""The little of the OpenAI API that a terminal needs, on the standard library (aiohttp takes 250 ms to import)."""

import http.client
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

from common.errors import BatonError, ConfigError

DEFAULT_URL = "http://127.0.0.1:8000"
_TIMEOUT_S = 600.0


class ApiError(BatonError):
    """The gateway is not there, refused, or broke off; the message says which."""


class ChatApi:
    """One connection a request: closing it is how an answer is stopped."""

    def __init__(self, url: str, api_key: str = "") -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url {url!r}: expected a URL such as http://127.0.0.1:8000")
        self._url = url
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._connection_class = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port = parts.hostname, parts.port
        self._root = parts.path.rstrip("/").removesuffix("/v1")

    def first_model(self) -> str:
        with closing(self._connect()) as connection:
            answer = self._request(connection, "GET", "/v1/models")
            models = json.loads(answer.read())["data"]
        if not models:
            raise ApiError(f"the gateway at {self._url} serves no model yet")
        return str(models[0]["id"])

    def stream(self, model: str, messages: Sequence[Mapping[str, str]], options: Mapping[str, Any]) -> Iterator[str]:
        """The answer's text as it comes. ApiError also when it ends without having been finished."""
        body = {"model": model, "messages": list(messages), "stream": True, **options}
        with closing(self._connect()) as connection:
            answer = self._request(connection, "POST", "/v1/chat/completions", body)
            try:
                for event in _events(answer):
                    if "error" in event:
                        raise ApiError(f"the answer broke off: {event['error'].get('message', event['error'])}")
                    for choice in event.get("choices", ()):
                        if text := choice.get("delta", {}).get("content"):
                            yield text
            except (http.client.HTTPException, OSError) as error:
                raise ApiError(f"the answer broke off: {error}") from error

    def _connect(self) -> http.client.HTTPConnection:
        return self._connection_class(self._host, self._port, timeout=_TIMEOUT_S)

    def _request(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: object = None
    ) -> http.client.HTTPResponse:
        payload = None if body is None else json.dumps(body).encode()
        try:
            connection.request(method, self._root + path, payload, self._headers)
            answer = connection.getresponse()
            if answer.status == 200:
                return answer
            text = answer.read().decode(errors="replace")
        except (http.client.HTTPException, OSError) as error:
            raise ApiError(
                f"no gateway at {self._url} ({error}). `baton up` starts a cluster; "
                "--url or BATON_URL says where another one is"
            ) from error
        raise ApiError(f"{_error_message(text)} (HTTP {answer.status})")


def _events(answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Server-sent events up to [DONE]. ApiError if the stream ends before."""
    for line in answer:
        if not line.startswith(b"data:"):
            continue
        payload = line[len(b"data:") :].strip()
        if payload == b"[DONE]":
            return
        yield json.loads(payload)
    raise ApiError("the answer broke off: the gateway closed the connection")


def _error_message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text.strip()[:200] or "no explanation"

"""Whatever comes in by HTTP, the right status and OpenAI's error shape go out, and nobody else notices."""

import asyncio
import random
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from tests.process.cluster import BatonUp
from tests.process.questions import caller_of, is_empty
from tests.process.streams import body, read_stream
from tests.raw_http import connection, exchange, http

pytestmark = [pytest.mark.process, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="session")]

MODEL = "tiny-llama"
VOCAB_SIZE = 320
MAX_MODEL_LEN = 2048
LIMIT_BYTES = 8 << 20
CHAT_PATH = "/v1/chat/completions"


def completion(**fields: Any) -> bytes:
    return http({"model": MODEL, "prompt": "hello", "max_tokens": 4, **fields})


def chat(messages: object, **fields: Any) -> bytes:
    return http({"model": MODEL, "messages": messages, "max_tokens": 4, **fields}, CHAT_PATH)


NOT_JSON: Mapping[str, bytes] = {
    "nothing": http(b""),
    "half a body": http(b'{"model": "tiny-llama", "prompt": "hel'),
    "prose": http(b"please complete this"),
    "a list": http([1, 2, 3]),
    "null": http(b"null"),
    "invalid UTF-8": http(b'{"prompt": "\xff\xfe\xc0"}'),
    "half a surrogate pair": http(b'{"prompt": "\\ud800"}'),
    "a byte order mark": http(b'\xef\xbb\xbf{"prompt": "a"}'),
    "not a number": http(b'{"prompt": "a", "temperature": NaN}'),
    "an infinite number": http(b'{"prompt": "a", "temperature": 1e999}'),
    "nested a hundred thousand times": http(b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "bad compression": http(b"\x1f\x8bgarbage", headers={"Content-Encoding": "gzip"}),
}

WRONG_FIELD: Mapping[str, tuple[str, bytes]] = {
    "no prompt": ("prompt", http({"model": MODEL})),
    "an empty prompt": ("prompt", completion(prompt="")),
    "a prompt of no tokens": ("prompt", completion(prompt=[])),
    "a number for a prompt": ("prompt", completion(prompt=5)),
    "an object for a prompt": ("prompt", completion(prompt={"text": "hello"})),
    "several prompts": ("prompt", completion(prompt=["a", "b"])),
    "a token beyond the vocabulary": ("prompt", completion(prompt=[1, VOCAB_SIZE])),
    "a negative token": ("prompt", completion(prompt=[-1])),
    "a huge token": ("prompt", completion(prompt=[1 << 80])),
    "half a token": ("prompt", completion(prompt=[1.5])),
    "no messages": ("messages", http({"model": MODEL}, CHAT_PATH)),
    "empty messages": ("messages", chat([])),
    "text for messages": ("messages", chat("hello")),
    "a message without a role": ("messages", chat([{"content": "hello"}])),
    "a message without content": ("messages", chat([{"role": "user"}])),
    "a message of a king": ("messages", chat([{"role": "king", "content": "hello"}])),
    "a number for content": ("messages", chat([{"role": "user", "content": 7}])),
    "a picture": ("messages", chat([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])),
    "a negative limit": ("max_tokens", completion(max_tokens=-1)),
    "a limit of nothing": ("max_tokens", completion(max_tokens=0)),
    "text for a limit": ("max_tokens", completion(max_tokens="many")),
    "a negative chat limit": ("max_completion_tokens", chat([{"role": "user"}], max_completion_tokens=-5)),
    "a negative temperature": ("temperature", completion(temperature=-0.1)),
    "a fever": ("temperature", completion(temperature=100)),
    "a negative nucleus": ("top_p", completion(top_p=-1)),
    "a negative top_k": ("top_k", completion(top_k=-7)),
    "text for a seed": ("seed", completion(seed="lucky")),
    "text for a flag": ("stream", completion(stream="yes")),
    "a number for a stop string": ("stop", completion(stop=5)),
    "an empty stop string": ("stop", completion(stop="")),
    "a thousand stop strings": ("stop", completion(stop=[str(n) for n in range(1000)])),
    "a huge n": ("n", completion(n=1 << 40)),
    "a negative n": ("n", completion(n=-1)),
    "huge top_logprobs": ("top_logprobs", chat([{"role": "user", "content": "a"}], top_logprobs=10**9)),
    "a huge bias": ("logit_bias", completion(logit_bias={str(n): 100 for n in range(100_000)})),
    "text for options": ("stream_options", completion(stream=True, stream_options="usage")),
}

NOT_HTTP: Mapping[str, bytes] = {
    "TLS": b"\x16\x03\x01\0\xc8\x01\0\0\xc4\x03\x03" + bytes(200),
    "HTTP 9.9": b"GET / HTTP/9.9\r\n\r\n",
    "HTTP 2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a negative length": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\nhello",
    "two lengths": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
    "broken chunks": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "an endless header": b"GET / HTTP/1.1\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
    "an endless path": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
}

# name -> status, request
OTHERS: Mapping[str, tuple[int, bytes]] = {
    "an unknown model": (404, completion(model="gpt-0")),
    "an unknown model, streamed": (404, completion(model="gpt-0", stream=True)),
    "an unknown path": (404, http(b"", "/v2/anything", method="GET")),
    "a service of others": (404, http({"input": "hello"}, "/v1/embeddings")),
    "a path upwards": (404, http(b"", "/../../etc/passwd", method="GET")),
    "an unknown model by name": (404, http(b"", "/v1/models/%ff%fe", method="GET")),
    "GET of a completion": (405, http(b"", method="GET")),
    "DELETE of the models": (405, http(b"", "/v1/models", method="DELETE")),
    "a body over the limit": (413, http(b" " * (LIMIT_BYTES + 1))),
    "a terabyte announced": (413, http(b"", headers={"Content-Length": str(1 << 40)})),
}

TOO_LONG: Mapping[str, bytes] = {
    "tokens": completion(prompt=[5] * MAX_MODEL_LEN),
    "text": completion(prompt="z" * 1_000_000),
    "messages": chat([{"role": "user", "content": "z"}] * 5_000),
    "a greedy limit": completion(max_tokens=1 << 60),
}


async def wrongs(url: str) -> list[str]:
    """Every bad request at once; what is wrong with the replies."""
    found: list[str] = []

    async def check(name: str, request: bytes, status: int, **expected: object) -> None:
        try:
            reply = await exchange(url, request, within_s=60.0)
            error = reply.document["error"]
        except (OSError, EOFError, TimeoutError, ValueError, KeyError) as reason:
            found.append(f"{name}: {reason!r}")
            return
        right = {"type": "invalid_request_error", **expected}
        if reply.status != status or set(error) != {"message", "type", "param", "code"} or not error["message"]:
            found.append(f"{name}: {reply.status} {error}")
        elif any(error[key] != value for key, value in right.items()):
            found.append(f"{name}: {error}, wanted {right}")

    await asyncio.gather(
        *[check(name, request, 400, param=None, code=None) for name, request in (*NOT_JSON.items(), *NOT_HTTP.items())],
        *[check(name, request, 400, param=param) for name, (param, request) in WRONG_FIELD.items()],
        *[check(f"too long: {name}", r, 400, code="context_length_exceeded") for name, r in TOO_LONG.items()],
        *[check(name, request, status) for name, (status, request) in OTHERS.items()],
    )
    return found


async def test_bad_requests_are_refused_by_name_while_a_stream_runs_on_unharmed(standing_pairs: BatonUp) -> None:
    up, asked = standing_pairs, body(MODEL, "on and on", max_tokens=1000)
    pids = up.pids()
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:
        quiet = await read_stream(session, up.url, asked)
        begun = asyncio.Event()
        refusing = tasks.create_task(wrongs_once(up.url, begun))
        while not refusing.done():
            assert await read_stream(session, up.url, asked, begun=begun) == quiet
    assert refusing.result() == []
    assert up.pids() == pids
    async with caller_of(up.coordinator) as caller:
        await is_empty(caller)


async def wrongs_once(url: str, begun: asyncio.Event) -> list[str]:
    await begun.wait()
    return await wrongs(url)


async def test_noise_at_every_port_of_the_cluster_harms_nobody(standing_pairs: BatonUp) -> None:
    """Ports of calls and of blocks too: strangers lose their own connection at most."""
    before = await standing_pairs.complete()
    pids = standing_pairs.pids()
    chance = random.Random(31)
    noises = [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(64), b"\xff" * 512, chance.randbytes(4096)]
    ports = sorted(standing_pairs.footprint.ports)
    assert len(ports) >= 6, "a coordinator, a gateway, four nodes"

    async def disturb(port: int, noise: bytes) -> None:
        host = urlsplit(standing_pairs.url).hostname
        async with connection(f"http://{host}:{port}") as (reader, writer):
            writer.write(noise)
            try:
                async with asyncio.timeout(0.2):
                    await reader.read()
            except (TimeoutError, ConnectionError):
                pass

    await asyncio.gather(*[disturb(port, noise) for port in ports for noise in noises * 3])
    assert await standing_pairs.complete() == before
    assert standing_pairs.pids() == pids
    async with caller_of(standing_pairs.coordinator) as caller:
        await is_empty(caller)

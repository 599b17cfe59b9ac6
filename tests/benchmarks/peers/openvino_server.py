"""OpenAI's streamed completions over OpenVINO GenAI's ContinuousBatchingPipeline. Runs in the peer's own environment:

    python openvino_server.py MODEL_FOLDER PORT CACHE_GB

Takes what the benchmark's client sends: prompts as token ids, greedy, streamed. One thread steps the pipeline; after
each step it hands all new tokens to the event loop in one call, so that serving costs the pipeline next to nothing.
"""

import asyncio
import itertools
import json
import queue
import sys
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import openvino
import openvino_genai
from aiohttp import web

MODEL = "demo"
_CONTEXT = 4
"""Tokens before a new one that its text is decoded beside: the spelling of some depends on their neighbours."""


@dataclass(eq=False)
class Call:
    prompt: list[int]
    max_tokens: int
    ignore_eos: bool
    items: "asyncio.Queue[list[int] | None]" = field(default_factory=asyncio.Queue)
    handle: Any = None
    gone: bool = False


class Engine:
    """The pipeline and its thread."""

    def __init__(self, folder: str, cache_gb: int) -> None:
        settings = openvino_genai.SchedulerConfig()
        settings.cache_size = cache_gb
        settings.enable_prefix_caching = True
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(folder, settings, "CPU")
        self._tokenizer = self._pipeline.get_tokenizer()
        self._new: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._running: list[Call] = []
        self._ids = itertools.count()
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, call: Call) -> None:
        self._new.put(call)

    def text(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))

    def _run(self) -> None:
        while True:
            if not self._running:
                self._admit(self._new.get())
            while not self._new.empty():
                self._admit(self._new.get())
            self._pipeline.step()
            news = [(call, self._read(call)) for call in self._running]
            self._running = [call for call, (_, ended) in news if not ended]
            self._loop.call_soon_threadsafe(_deliver, news)

    def _admit(self, call: Call) -> None:
        settings = openvino_genai.GenerationConfig()
        settings.max_new_tokens = call.max_tokens
        settings.ignore_eos = call.ignore_eos
        settings.do_sample = False
        prompt = openvino.Tensor(np.array([call.prompt], dtype=np.int64))
        call.handle = self._pipeline.add_request(next(self._ids), prompt, settings)
        self._running.append(call)

    @staticmethod
    def _read(call: Call) -> tuple[list[int], bool]:
        """Its new tokens, and whether they are the last ones."""
        if call.gone:
            call.handle.cancel()
            return [], True
        tokens: list[int] = []
        while call.handle.can_read():
            for output in call.handle.read().values():
                tokens += output.generated_ids
        return tokens, call.handle.get_status() != openvino_genai.GenerationStatus.RUNNING


def _deliver(news: "list[tuple[Call, tuple[list[int], bool]]]") -> None:
    for call, (tokens, ended) in news:
        if tokens:
            call.items.put_nowait(tokens)
        if ended:
            call.items.put_nowait(None)


def _event(choices: list[dict[str, Any]], **more: Any) -> bytes:
    document = {"object": "text_completion", "model": MODEL, "choices": choices, **more}
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


def _choice(text: str, finish_reason: str | None) -> list[dict[str, Any]]:
    return [{"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}]


async def completions(request: web.Request) -> web.StreamResponse:
    engine: Engine = request.app[ENGINE]
    body = await request.json()
    call = Call(body["prompt"], body["max_tokens"], body.get("ignore_eos", False))
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    engine.submit(call)
    tokens = call.prompt[-_CONTEXT:]
    try:
        while (new := await call.items.get()) is not None:
            for token in new:
                tokens.append(token)
                window = tokens[-1 - _CONTEXT :]
                text = engine.text(window).removeprefix(engine.text(window[:-1]))
                await response.write(_event(_choice(text, None)))
        usage = {
            "prompt_tokens": len(call.prompt),
            "completion_tokens": len(tokens) - len(call.prompt[-_CONTEXT:]),
            "prompt_tokens_details": {"cached_tokens": 0},  # the pipeline does not say
        }
        await response.write(_event(_choice("", "length")) + _event([], usage=usage) + b"data: [DONE]\n\n")
    except ConnectionResetError:
        pass  # the client hung up
    finally:
        call.gone = True
    return response


async def models(request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})


async def application(folder: str, cache_gb: int) -> web.Application:
    app = web.Application(handler_args={"handler_cancellation": True})
    app[ENGINE] = Engine(folder, cache_gb)
    app.add_routes([web.get("/v1/models", models), web.post("/v1/completions", completions)])
    return app


ENGINE: "web.AppKey[Engine]" = web.AppKey("engine", Engine)

if __name__ == "__main__":
    web.run_app(application(sys.argv[1], int(sys.argv[3])), host="127.0.0.1", port=int(sys.argv[2]), print=None)

"""Where a request's tokens go: one JSON body at the end, or a stream of events as they come.

A stream's response begins with its first token (or its first sign of life), never earlier: until then a refusal
can still be an HTTP status. A slow reader costs nobody else anything: what its socket does not take waits as text,
which becomes one larger event, so that it holds back no more than the answer itself.
"""

import asyncio
import contextlib
from collections.abc import Mapping

import msgspec
from aiohttp import web

from common.clock import Clock
from common.errors import BatonError
from common.messages import FinishReason
from coordinator.gateway import replies
from coordinator.gateway.session import Session
from coordinator.gateway.stream import DONE, KEEP_ALIVE, ChunkWriter, TextStream, error_event

HIGH_WATER_BYTES = 64 << 10
"""A socket that holds more unsent bytes than this has a slow reader."""


class Envelope:
    """What surrounds the text of one answer."""

    def __init__(self, session: Session, *, is_chat: bool, created: int, label: str) -> None:
        """`label` goes into x-request-id: the client's own, or ours. `created` is Unix time in seconds."""
        self.session = session
        self.is_chat = is_chat
        self.created = created
        self.label = label
        self.id = f"{'chatcmpl' if is_chat else 'cmpl'}-{session.id}"

    @property
    def headers(self) -> dict[str, str]:
        headers = {"x-request-id": self.label}
        path = self.session.path
        if path:
            headers["x-baton-path"] = replies.PATHS.get(path, path)
        return headers

    def usage(self, text: TextStream) -> dict[str, object]:
        return replies.usage(
            num_prompt_tokens=len(self.session.prompt),
            num_output_tokens=text.num_tokens,
            cached_tokens=self.session.cached_tokens,
        )


class WholeAnswer:
    """Collects the text; `response` builds the body."""

    def __init__(self, envelope: Envelope, text: TextStream) -> None:
        self._envelope = envelope
        self._text = text
        self._pieces: list[str] = []
        self._reason = FinishReason.STOP
        self.error: BatonError | None = None

    @property
    def stopped(self) -> bool:
        return self._text.stopped

    async def deliver(self, tokens: list[int]) -> None:
        self._pieces.append(self._text.push(tokens))

    async def finish(self, reason: FinishReason) -> None:
        self._pieces.append(self._text.flush())
        self._reason = FinishReason.STOP if self._text.stopped else reason

    async def fail(self, error: BatonError) -> None:
        self.error = error

    async def response(self) -> web.Response:
        """Raises the error that the session ended with."""
        if self.error is not None:
            raise self.error
        envelope = self._envelope
        body = replies.completion(
            is_chat=envelope.is_chat,
            id=envelope.id,
            created=envelope.created,
            model=envelope.session.model,
            text="".join(self._pieces),
            finish=self._reason,
            usage=envelope.usage(self._text),
        )
        return json_response(body, headers=envelope.headers)

    def close(self) -> None:
        """Nothing is held."""


class StreamAnswer:
    """Writes events. `keep_alive_s` of silence are broken by a comment, once the request is routed."""

    def __init__(
        self,
        request: web.Request,
        envelope: Envelope,
        text: TextStream,
        *,
        include_usage: bool,
        keep_alive_s: float,
        clock: Clock,
    ) -> None:
        self._request = request
        self._envelope = envelope
        self._text = text
        self._include_usage = include_usage
        self._clock = clock
        self._chunks = ChunkWriter(
            is_chat=envelope.is_chat, id=envelope.id, created=envelope.created, model=envelope.session.model
        )
        self._is_chunked = request.version >= (1, 1)
        self._starting = asyncio.Lock()
        self._response: web.StreamResponse | None = None
        self._transport: asyncio.Transport | None = None
        self._waiting = ""
        """Text that a slow reader has yet to get."""
        self._written_s = clock.now_s()
        self._keep_alive = asyncio.create_task(self._show_signs_of_life(keep_alive_s))
        self._is_named = False
        self.error: BatonError | None = None

    @property
    def stopped(self) -> bool:
        return self._text.stopped

    async def deliver(self, tokens: list[int]) -> None:
        text = self._text.push(tokens)
        if self._transport is None:
            await self._start()
        self._write_text(text)

    async def finish(self, reason: FinishReason) -> None:
        await self._start()
        text = self._waiting + self._text.flush()
        self._waiting = ""
        if self._text.stopped:
            reason = FinishReason.STOP
        last = self._first() + (self._chunks.text(text) if text else b"") + self._chunks.finish(reason)
        if self._include_usage:
            last += self._chunks.usage(self._envelope.usage(self._text))
        self._write(last + DONE)

    async def fail(self, error: BatonError) -> None:
        self.error = error
        if self._response is not None:  # too late for a status
            waiting = self._chunks.text(self._waiting) if self._waiting else b""
            self._write(waiting + error_event(replies.error_body(error)))

    async def response(self) -> web.StreamResponse:
        """Waits until the reader has all. Raises the session's error if the response has not begun."""
        if self._response is None:
            assert self.error is not None
            raise self.error
        with contextlib.suppress(ConnectionResetError):  # readers may leave at [DONE], before the body's end
            await self._response.write_eof()
        return self._response

    def close(self) -> None:
        self._keep_alive.cancel()

    # --- writing ------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        """Send the headers, once."""
        async with self._starting:
            if self._response is not None:
                return
            headers = {
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",  # nginx would collect events
                **self._envelope.headers,
            }
            response = web.StreamResponse(headers=headers)
            if self._is_chunked:
                response.enable_chunked_encoding()
            await response.prepare(self._request)
            if self._request.transport is None:
                raise ConnectionResetError("the client has gone")
            self._response = response
            self._transport = self._request.transport

    def _write_text(self, text: str) -> None:
        assert self._transport is not None
        if self._transport.get_write_buffer_size() > HIGH_WATER_BYTES:
            self._waiting += text
            return
        text, self._waiting = self._waiting + text, ""
        events = self._chunks.text(text) if text else b""
        self._write(events if self._is_named else self._first() + events)

    def _first(self) -> bytes:
        if self._is_named:
            return b""
        self._is_named = True
        return self._chunks.first()

    def _write(self, events: bytes) -> None:
        # Straight to the transport, framed as HTTP/1.1 asks: a third of the cost of the response's own write.
        assert self._transport is not None
        self._written_s = self._clock.now_s()
        if not events:
            return
        self._transport.write(b"%x\r\n%b\r\n" % (len(events), events) if self._is_chunked else events)

    async def _show_signs_of_life(self, every_s: float) -> None:
        while True:
            silent_s = self._clock.now_s() - self._written_s
            if silent_s < every_s:
                await asyncio.sleep(every_s - silent_s)
                continue
            if self._envelope.session.routed is not None:
                try:
                    await self._start()
                except ConnectionResetError:
                    return  # the request's own task is told too
                if self._transport is not None and self._transport.get_write_buffer_size() == 0:
                    self._write(KEEP_ALIVE)
            self._written_s = self._clock.now_s()


def json_response(body: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(body), status=status, headers=headers, content_type="application/json", charset="utf-8"
    )

"""Where a request's tokens go: one JSON body at the end, or a stream of events as they come.

A stream's response begins with its first token (or its first sign of life), never earlier: until then a refusal
can still be an HTTP status. A slow reader costs nobody else anything: what its socket does not take waits as text,
which becomes one larger event, so that it holds back no more than the answer itself.
"""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence

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

    def usage(self, texts: Sequence[TextStream]) -> dict[str, object]:
        """The prompt counts once, whatever it is answered with."""
        return replies.usage(
            num_prompt_tokens=len(self.session.prompt),
            num_output_tokens=sum(text.num_tokens for text in texts),
            cached_tokens=self.session.cached_tokens,
        )


class WholeAnswer:
    """Collects the text of each choice; `response` builds the body."""

    def __init__(self, envelope: Envelope, texts: Sequence[TextStream], *, num_shown: int) -> None:
        """Of more than `num_shown` choices those are shown whose tokens were likeliest on average, in that order."""
        self._envelope = envelope
        self._num_shown = num_shown
        self._texts = texts
        self._pieces: list[list[str]] = [[] for _ in texts]
        self._reasons = [FinishReason.STOP] * len(texts)
        self.error: BatonError | None = None

    def stopped(self, choice: int) -> bool:
        return self._texts[choice].stopped

    async def deliver(self, tokens: list[int], choice: int) -> None:
        self._pieces[choice].append(self._texts[choice].push(tokens))

    async def finish(self, reason: FinishReason, choice: int) -> None:
        text = self._texts[choice]
        self._pieces[choice].append(text.flush())
        self._reasons[choice] = FinishReason.STOP if text.stopped else reason

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
            choices=[("".join(self._pieces[index]), self._reasons[index]) for index in self._shown()],
            usage=envelope.usage(self._texts),
        )
        return json_response(body, headers=envelope.headers)

    def _shown(self) -> list[int]:
        choices = self._envelope.session.choices
        if self._num_shown == len(choices):
            return [choice.index for choice in choices]
        best = sorted(choices, key=lambda choice: choice.mean_logprob, reverse=True)  # ties: the earlier one
        return [choice.index for choice in best[: self._num_shown]]

    def close(self) -> None:
        """Nothing is held."""


class _Line:
    """One choice of a stream."""

    def __init__(self, envelope: Envelope, text: TextStream, index: int) -> None:
        self.text = text
        self.chunks = ChunkWriter(
            is_chat=envelope.is_chat,
            id=envelope.id,
            created=envelope.created,
            model=envelope.session.model,
            index=index,
        )
        self.waiting = ""
        """Text that a slow reader has yet to get."""
        self.is_named = False
        self.is_ended = False

    def first(self) -> bytes:
        if self.is_named:
            return b""
        self.is_named = True
        return self.chunks.first()

    def take_waiting(self) -> str:
        text, self.waiting = self.waiting, ""
        return text


class StreamAnswer:
    """Writes events. `keep_alive_s` of silence are broken by a comment, once the request is routed."""

    def __init__(
        self,
        request: web.Request,
        envelope: Envelope,
        texts: Sequence[TextStream],
        *,
        include_usage: bool,
        keep_alive_s: float,
        clock: Clock,
    ) -> None:
        self._request = request
        self._envelope = envelope
        self._texts = texts
        self._lines = [_Line(envelope, text, index) for index, text in enumerate(texts)]
        self._include_usage = include_usage
        self._clock = clock
        self._is_chunked = request.version >= (1, 1)
        self._starting = asyncio.Lock()
        self._response: web.StreamResponse | None = None
        self._transport: asyncio.Transport | None = None
        self._written_s = clock.now_s()
        self._keep_alive = asyncio.create_task(self._show_signs_of_life(keep_alive_s))
        self.error: BatonError | None = None

    def stopped(self, choice: int) -> bool:
        return self._lines[choice].text.stopped

    async def deliver(self, tokens: list[int], choice: int) -> None:
        line = self._lines[choice]
        text = line.text.push(tokens)
        if self._transport is None:
            await self._start()
        self._write_text(line, text)

    async def finish(self, reason: FinishReason, choice: int) -> None:
        await self._start()
        line = self._lines[choice]
        line.is_ended = True
        text = line.take_waiting() + line.text.flush()
        if line.text.stopped:
            reason = FinishReason.STOP
        last = line.first() + (line.chunks.text(text) if text else b"") + line.chunks.finish(reason)
        if all(one.is_ended for one in self._lines):
            if self._include_usage:
                last += line.chunks.usage(self._envelope.usage(self._texts))
            last += DONE
        self._write(last)

    async def fail(self, error: BatonError) -> None:
        self.error = error
        if self._response is not None:  # too late for a status
            waiting = [line.chunks.text(text) for line in self._lines if (text := line.take_waiting())]
            self._write(b"".join(waiting) + error_event(replies.error_body(error)))

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

    def _write_text(self, line: _Line, text: str) -> None:
        assert self._transport is not None
        if self._transport.get_write_buffer_size() > HIGH_WATER_BYTES:
            line.waiting += text
            return
        text, line.waiting = line.waiting + text, ""
        events = line.chunks.text(text) if text else b""
        self._write(events if line.is_named else line.first() + events)

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

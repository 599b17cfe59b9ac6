"""Tokens to text on their way out: detokenising, stop strings, server-sent events.

A stop string is found where it first *completes* in the text, however the text is cut into pieces. Text is
held back only while it is the beginning of a stop string; the stop string itself is never shown.

SSE: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from collections.abc import Sequence

import msgspec

from common.messages import FinishReason
from common.model.detokenizer import Detokenizer

_encode_json = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": waiting\n\n"


class StopStrings:
    """Cuts one stream of text at the first stop string."""

    __slots__ = ("_held", "_longest", "_stops", "found")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in stops), default=0)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """The text that can be shown now. Nothing more once `found`."""
        if not self._stops:
            return text
        if self.found:
            return ""
        text = self._held + text
        cut = self._find(text)
        if cut is not None:
            self.found = True
            self._held = ""
            return text[:cut]
        keep = self._ambiguous_from(text)
        self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> int | None:
        """Where the stop string that completes first begins; of two that complete together, the longer."""
        first: tuple[int, int] | None = None  # end, start
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (first is None or (start + len(stop), start) < first):
                first = (start + len(stop), start)
        return None if first is None else first[1]

    def _ambiguous_from(self, text: str) -> int:
        """Start of the longest tail that some stop string begins with."""
        earliest = len(text)
        for stop in self._stops:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1), earliest)
            while start >= 0:
                if stop.startswith(text[start:]):
                    earliest = start
                    break
                start = text.find(stop[0], start + 1, earliest)
        return earliest


class TextStream:
    """One answer's tokens to text. After `stopped` further tokens are neither shown nor counted."""

    __slots__ = ("_detokenizer", "_silent", "_stops", "num_tokens")

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str], silent: Sequence[int] = ()) -> None:
        """`silent` are the tokens that end the answer: they have no text, special or not."""
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)
        self._silent = tuple(silent)
        self.num_tokens = 0

    @property
    def stopped(self) -> bool:
        return self._stops.found

    def push(self, tokens: Sequence[int]) -> str:
        """Text of these tokens that can be shown now."""
        shown = ""
        for token in tokens:
            if self._stops.found:
                break
            self.num_tokens += 1
            if token not in self._silent:
                shown += self._stops.push(self._detokenizer.push(token))
        return shown

    def flush(self) -> str:
        """The rest, when no more tokens come. It may still complete a stop string."""
        if self._stops.found:
            return ""
        shown = self._stops.push(self._detokenizer.flush())
        return shown if self._stops.found else shown + self._stops.flush()


class ChunkWriter:
    """The events of one choice's stream. All that does not change is encoded once; per token only its text is."""

    __slots__ = ("_choice", "_finish_head", "_finish_tail", "_is_chat", "_open", "_text_head", "_text_tail")

    def __init__(self, *, is_chat: bool, id: str, created: int, model: str, index: int = 0) -> None:
        self._is_chat = is_chat
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        head = _encode_json({"id": id, "object": kind, "created": created, "model": model})
        self._open = b"data: " + head[:-1] + b',"choices":['
        payload, end = (b'"delta":{"content":', b"}") if is_chat else (b'"text":', b"")
        self._choice = self._open + b'{"index":%d,' % index
        self._text_head = self._choice + payload
        self._text_tail = end + b',"logprobs":null,"finish_reason":null}]}\n\n'
        self._finish_head = self._choice + (b'"delta":{}' if is_chat else b'"text":""')
        self._finish_tail = b"}]}\n\n"

    def first(self) -> bytes:
        """What opens the stream: a chat names the speaker."""
        if not self._is_chat:
            return b""
        return self._choice + b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'

    def text(self, text: str) -> bytes:
        return self._text_head + _encode_json(text) + self._text_tail

    def finish(self, reason: FinishReason) -> bytes:
        return self._finish_head + b',"logprobs":null,"finish_reason":' + _encode_json(reason.value) + self._finish_tail

    def usage(self, usage: dict[str, object]) -> bytes:
        """Strict clients want `choices`, if empty, in this one too."""
        return self._open + b'],"usage":' + _encode_json(usage) + b"}\n\n"


def error_event(body: dict[str, object]) -> bytes:
    """How a stream that breaks ends. No [DONE] follows."""
    return b"data: " + _encode_json(body) + b"\n\n"

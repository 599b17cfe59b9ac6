"""Token ids to text, one token at a time: what is emitted never changes afterwards.

A token need not be a whole character (emoji and CJK are split over several), and in some vocabularies a
token's text depends on its left neighbour. So each stream keeps a little state and holds back what the
next token could still change. For any tokens, the pieces from `push` and `flush` joined are the text that
decoding all of them at once gives.

Two ways, chosen by the tokenizer:

- `ByteDetokenizer`: in a byte-level vocabulary every token is a fixed run of bytes. Whole characters are a
  table look-up; other bytes go through an incremental UTF-8 decoder, which holds back an unfinished one.
- `WindowDetokenizer`: everything else. Decode a window of the newest tokens with and without the newest
  one; the difference is its text. The window starts one emission back (left context for leading spaces)
  and ends where the text does not end in U+FFFD. Its size is bounded, so a token costs the same at any
  length. One exception to the joined text: where the byte tokens of an unfinished character follow a
  finished one at the very end, decoding all at once garbles both; here the finished one stays.
"""

import codecs
from collections.abc import Callable, Container, Sequence
from typing import Protocol

_REPLACEMENT = "\ufffd"
_MAX_HELD_TOKENS = 8
"""UTF-8 needs at most four byte tokens a character; a longer run of U+FFFD is no unfinished character."""


class Detokenizer(Protocol):
    """The text of one stream of tokens. Special tokens have none."""

    def push(self, token: int) -> str:
        """Text that this token makes certain; often all of its own, sometimes none."""
        ...

    def flush(self) -> str:
        """What was held back, at the end of the stream; nothing may be pushed after it."""
        ...


class TokenPieces(dict[int, str | bytes]):
    """Token id -> what it stands for in a byte-level vocabulary: text if its bytes are whole characters.

    Filled on use. Special and unknown ids stand for nothing.
    """

    def __init__(self, name_of: Callable[[int], str | None], special: Container[int]) -> None:
        super().__init__()
        self._name_of = name_of
        self._special = special

    def __missing__(self, token: int) -> str | bytes:
        name = None if token in self._special else self._name_of(token)
        piece: str | bytes = "" if name is None else _piece(name)
        self[token] = piece
        return piece


def _piece(name: str) -> str | bytes:
    try:
        piece = bytes([_BYTE_OF[char] for char in name])
    except KeyError:  # an added token: it stands for its own text
        return name
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return piece


class ByteDetokenizer:
    """For byte-level vocabularies."""

    __slots__ = ("_decode", "_is_between", "_pieces")

    def __init__(self, pieces: TokenPieces) -> None:
        self._pieces = pieces
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._is_between = True
        """No character is unfinished for certain: whole text needs no decoder."""

    def push(self, token: int) -> str:
        piece = self._pieces[token]
        if isinstance(piece, str):
            if self._is_between or not piece:
                return piece
            self._is_between = True
            return self._decode(piece.encode())
        self._is_between = False
        return self._decode(piece)

    def flush(self) -> str:
        return self._decode(b"", True)


class WindowDetokenizer:
    """For every other vocabulary. `context` are tokens on the left whose text is already shown."""

    __slots__ = ("_decode", "_shown", "_shown_text", "_special", "_window")

    def __init__(
        self, decode: Callable[[list[int]], str], special: Container[int], context: Sequence[int] = ()
    ) -> None:
        self._decode = decode
        self._special = special
        self._window = [token for token in context if token not in special][-_MAX_HELD_TOKENS:]
        self._shown = len(self._window)
        """How many tokens of the window have been emitted; their text is `_shown_text`."""
        self._shown_text = decode(self._window) if self._window else ""

    def push(self, token: int) -> str:
        if token in self._special:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        is_held = text.endswith(_REPLACEMENT) or len(text) <= len(self._shown_text)
        if is_held and len(self._window) - self._shown <= _MAX_HELD_TOKENS:
            return ""
        return self._emit(text)

    def flush(self) -> str:
        if len(self._window) == self._shown:
            return ""
        return self._emit(self._decode(self._window))

    def _emit(self, text: str) -> str:
        pending = self._window[self._shown :]
        # Should the newest bytes spoil what stood before them: that is shown, and stays.
        piece = text[len(self._shown_text) :] if text.startswith(self._shown_text) else self._decode(pending)
        self._window = pending
        self._shown = len(pending)
        self._shown_text = self._decode(pending)
        return piece


def _byte_alphabet() -> dict[str, int]:
    """The 256 printable characters that byte-level BPE writes bytes as (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


_BYTE_OF = _byte_alphabet()

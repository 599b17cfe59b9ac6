"""The words of the tcp transport, and a ZeroMQ socket that lives on an event loop."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from common.keys import Keys
from common.messages import BlockRef, Incarnation, KVLayout, WireError
from common.rpc.curve import REFUSALS, Doorkeeper, as_dialler, as_listener, log_stranger, refused_us
from common.rpc.sockets import monitor_of
from kv_transfer.shared import Shared

VERSION = 2
CHUNK_BYTES = 1 << 20
WINDOW_BYTES = 8 << 20
MAX_CONTROL_BYTES = 4 << 20
"""The largest Read: some 200,000 references."""

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Word(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """One message of this transport; a Chunk is followed by frames of bytes, the others stand alone."""


class Hello(Word, frozen=True):
    version: int
    owner: Incarnation
    reader: Incarnation = Incarnation("")


class Read(Word, frozen=True):
    """`read` counts the reads of one reader upwards; `secret` is the call's."""

    read: Count
    refs: tuple[BlockRef, ...]
    secret: bytes


class Credit(Word, frozen=True):
    """So many bytes of Chunks have arrived and may be followed by as many."""

    num_bytes: Count


class Cancel(Word, frozen=True):
    """The reader has no use for the rest. Not answered; what is on its way still wants its Credit."""

    read: Count


class Welcome(Word, frozen=True):
    layout: KVLayout
    num_blocks: int


class Refuse(Word, frozen=True):
    """The owner will have nothing (more) to do with this reader."""

    reason: str


class Chunk(Word, frozen=True):
    """The frames that follow go at byte `start` of the read (its blocks in order, one after the other)."""

    read: Count
    start: Count


class Verdict(Word, frozen=True):
    """Ends a read. Without an error every byte was sent and every generation held."""

    read: Count
    error: WireError | None = None


class Ping(Word, frozen=True):
    """Says nothing: sending it tells the owner whether this reader is still connected."""


OwnerHears = Hello | Read | Credit | Cancel
ReaderHears = Welcome | Refuse | Chunk | Verdict | Ping

encode = msgspec.msgpack.Encoder().encode
owner_decoder = msgspec.msgpack.Decoder(OwnerHears)
reader_decoder = msgspec.msgpack.Decoder(ReaderHears)

Bytes = bytes | memoryview

_CONTEXT: Shared[zmq.Context[zmq.Socket[bytes]]] = Shared(zmq.Context, lambda context: context.term())
_GONE = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | REFUSALS


class LoopSocket:
    """A plain ZeroMQ socket read by the running loop: no polling, no queue of ours, nothing kept at its end.

    `on_message` gets the frames of each message; `on_gone` is called when a connection has ended, after
    everything that came through it, with the reason if a listener refused us. A ROUTER is a listener.
    """

    def __init__(
        self,
        kind: int,
        *,
        keys: Keys | None,
        max_message_bytes: int,
        on_message: Callable[[list[zmq.Frame]], None],
        on_gone: Callable[[str | None], None],
    ) -> None:
        self._on_message = on_message
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._drain_due: asyncio.Handle | None = None
        self._listens = kind == zmq.ROUTER
        self._doorkeeper: Doorkeeper | None = None
        if keys is not None and self._listens:  # a context has one doorkeeper
            self._context = zmq.Context()
            self._doorkeeper = Doorkeeper(self._context, keys)
        else:
            self._context = _CONTEXT.borrow()
        self.socket = self._context.socket(kind)
        (as_listener if self._listens else as_dialler)(self.socket, keys)
        self.socket.set_hwm(0)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        self.socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, 2_000)
        self._monitor = monitor_of(self.socket, self._context, _GONE)
        self._loop.add_reader(self.socket.FD, self.drain)
        self._loop.add_reader(self._monitor.FD, self._drain_monitor)
        self._drain_monitor()  # its descriptor says nothing until it was once found empty

    @property
    def closed(self) -> bool:
        return bool(self.socket.closed)

    def send(self, frames: Sequence[Bytes], *, copy: bool = True) -> None:
        """Raises zmq.ZMQError (EHOSTUNREACH) on a mandatory ROUTER whose peer is gone; never blocks."""
        try:
            self.socket.send_multipart(frames, zmq.DONTWAIT, copy=copy)
        finally:
            # ZeroMQ's descriptor is edge-triggered and a send may eat the edge of what has arrived meanwhile.
            if self._drain_due is None:
                self._drain_due = self._loop.call_soon(self.drain)

    def drain(self) -> None:
        if self._drain_due is not None:
            self._drain_due.cancel()
            self._drain_due = None
        while not self.closed:
            try:
                frames = self.socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            self._on_message(frames)

    def _drain_monitor(self) -> None:
        gone, refusal = False, None
        while not self.closed:
            try:
                news = parse_monitor_message(self._monitor.recv_multipart(zmq.DONTWAIT))
            except zmq.Again:
                break
            gone = True
            event, value = int(news["event"]), int(news["value"])
            if not self._listens:
                refusal = refusal or refused_us(event, value)
            elif event & REFUSALS:
                log_stranger(event, value)
        if gone and not self.closed:
            self.drain()
            self._on_gone(refusal)

    def close(self) -> None:
        if self.closed:
            return
        if self._drain_due is not None:
            self._drain_due.cancel()
        self._loop.remove_reader(self.socket.FD)
        self._loop.remove_reader(self._monitor.FD)
        self.socket.monitor(None, 0)
        self._monitor.close(linger=0)
        self.socket.close(linger=0)
        if self._doorkeeper is not None:
            self._doorkeeper.close()
            self._context.term()
        else:
            _CONTEXT.give_back()


def any_port(host: str) -> str:
    """`host` as a ZeroMQ endpoint with any free port."""
    return f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*"

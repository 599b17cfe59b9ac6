"""The owner's side of the tcp transport: streams blocks out of the pool, bounded by each reader's credit."""

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import zmq

from common.errors import BatonError, TransferError
from common.keys import Trust
from common.kv_cache.memory import PoolMemory
from common.messages import BlockRef, HeldConnection, Incarnation, Offer, WireError
from kv_transfer import tcp_wire as wire
from kv_transfer.blocks import check_generations, check_readable, check_source

_MAX_READERS = 1024
_MAX_QUEUED_REFS = 1 << 20
_SWEEP_AGAIN_S = 0.25


class _Misbehaved(Exception):
    """This reader does not follow the protocol: it is dropped, nobody else notices."""


@dataclass(slots=True, eq=False)
class _Sending:
    """One Read being answered. `end` is the reader's total of sent bytes when the last one was sent."""

    read: int
    refs: tuple[BlockRef, ...]
    secret: bytes
    sent_bytes: int = 0
    end: int = 0


@dataclass(frozen=True, slots=True)
class _Part:
    ref: BlockRef
    offset: int
    num_bytes: int


@dataclass(slots=True, eq=False)
class _Reader:
    """`sending` holds reads whose bytes are still to go, the first one in progress; `arriving` those sent whole."""

    identity: bytes
    incarnation: Incarnation
    sent_bytes: int = 0
    landed_bytes: int = 0
    last_read: int = -1
    sending: deque[_Sending] = field(default_factory=deque)
    arriving: deque[_Sending] = field(default_factory=deque)

    @property
    def credit_bytes(self) -> int:
        return wire.WINDOW_BYTES - (self.sent_bytes - self.landed_bytes)

    @property
    def num_refs(self) -> int:
        return sum(len(sending.refs) for sending in (*self.sending, *self.arriving))


class TcpServer:
    def __init__(self, pool: PoolMemory, *, listen_host: str, trust: Trust) -> None:
        self._pool = pool
        self._trust = trust
        self._listen_host = listen_host
        self._readers: dict[bytes, _Reader] = {}
        self._socket: wire.LoopSocket | None = None
        self._sweep: asyncio.TimerHandle | None = None

    @property
    def num_readers(self) -> int:
        return len(self._readers)

    async def start(self) -> Offer:
        self._loop = asyncio.get_running_loop()
        self._trust.check_bind(wire.any_port(self._listen_host))
        # Blocks are looked at one by one, so their bytes must be one run each.
        if not self._pool.blocks.flags.c_contiguous:
            raise TransferError("tcp: the pool is not contiguous")
        self._socket = wire.LoopSocket(
            zmq.ROUTER,
            keys=self._trust.keys,
            max_message_bytes=wire.MAX_CONTROL_BYTES,
            on_message=self._hear,
            on_gone=self._reader_gone,
        )
        router = self._socket.socket
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.IPV6, int(":" in self._listen_host))
        try:
            router.bind(wire.any_port(self._listen_host))
        except zmq.ZMQError as error:
            await self.close()
            raise TransferError(f"tcp: cannot listen on {self._listen_host} ({error.strerror})") from error
        return Offer(transport="tcp", address=router.getsockopt_string(zmq.LAST_ENDPOINT))

    def connections(self) -> list[HeldConnection]:
        return [
            HeldConnection("tcp", reader.incarnation, len(reader.sending) + len(reader.arriving))
            for reader in self._readers.values()
        ]

    async def close(self) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        self._readers.clear()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    # --- hearing -------------------------------------------------------------------------------------

    def _hear(self, frames: list[zmq.Frame]) -> None:
        identity = frames[0].bytes
        try:
            if len(frames) != 2:
                raise _Misbehaved("a message is one frame")
            word = wire.owner_decoder.decode(frames[1].buffer)
            if isinstance(word, wire.Hello):
                self._greet(identity, word)
                return
            reader = self._readers.get(identity)
            if reader is None:
                raise _Misbehaved("say Hello first")
            self._obey(reader, word)
        except (_Misbehaved, msgspec.MsgspecError) as error:
            self._refuse(identity, str(error))

    def _greet(self, identity: bytes, hello: wire.Hello) -> None:
        if identity in self._readers:
            raise _Misbehaved("Hello was said already")
        if hello.version != wire.VERSION:
            raise _Misbehaved(f"version {hello.version} is not spoken here, {wire.VERSION} is")
        if hello.owner != self._pool.incarnation:
            raise _Misbehaved(f"incarnation {hello.owner} is gone, {self._pool.incarnation} is here")
        if len(self._readers) >= _MAX_READERS:
            raise _Misbehaved(f"{_MAX_READERS} readers are connected already")
        reader = self._readers[identity] = _Reader(identity, hello.reader)
        self._say(reader, wire.Welcome(self._pool.layout, self._pool.num_blocks))

    def _obey(self, reader: _Reader, word: wire.Read | wire.Credit | wire.Cancel) -> None:
        match word:
            case wire.Read():
                if word.read <= reader.last_read:
                    raise _Misbehaved("reads are counted upwards")
                if reader.num_refs + len(word.refs) > _MAX_QUEUED_REFS:
                    raise _Misbehaved(f"more than {_MAX_QUEUED_REFS} blocks are waiting already")
                reader.last_read = word.read
                self._accept(reader, word)
            case wire.Credit():
                if reader.landed_bytes + word.num_bytes > reader.sent_bytes:
                    raise _Misbehaved("credit for bytes that were never sent")
                reader.landed_bytes += word.num_bytes
                self._judge(reader)
            case wire.Cancel():
                for queue in (reader.sending, reader.arriving):
                    for sending in [sending for sending in queue if sending.read == word.read]:
                        queue.remove(sending)
        self._pump(reader)

    def _accept(self, reader: _Reader, read: wire.Read) -> None:
        try:
            check_source(read.refs, self._pool.num_blocks)
            check_readable(self._pool, read.refs, read.secret)
        except TransferError as error:
            self._say(reader, wire.Verdict(read.read, WireError.of(error)))
            return
        reader.sending.append(_Sending(read.read, read.refs, read.secret))

    # --- sending -------------------------------------------------------------------------------------

    def _pump(self, reader: _Reader) -> None:
        """Send what the reader's credit allows: its reads in turn, each block looked at just before."""
        while reader.sending:
            sending = reader.sending[0]
            parts = self._next_parts(sending)
            num_bytes = sum(part.num_bytes for part in parts)
            if num_bytes > reader.credit_bytes:
                return
            try:
                check_readable(self._pool, [part.ref for part in parts], sending.secret)
            except TransferError as error:
                reader.sending.popleft()
                self._say(reader, wire.Verdict(sending.read, WireError.of(error)))
                continue
            chunk = [
                self._pool.blocks[part.ref.block][part.offset : part.offset + part.num_bytes].data for part in parts
            ]
            if not self._say(reader, wire.Chunk(sending.read, sending.sent_bytes), chunk):
                return
            sending.sent_bytes += num_bytes
            reader.sent_bytes += num_bytes
            if sending.sent_bytes == len(sending.refs) * self._pool.layout.block_bytes:
                sending.end = reader.sent_bytes
                reader.arriving.append(reader.sending.popleft())

    def _next_parts(self, sending: _Sending) -> list[_Part]:
        """About CHUNK_BYTES from where `sending` stands: several small blocks or a part of one."""
        block_bytes = self._pool.layout.block_bytes
        index, offset = divmod(sending.sent_bytes, block_bytes)
        parts: list[_Part] = []
        room_bytes = wire.CHUNK_BYTES
        while index < len(sending.refs) and room_bytes > 0:
            length = min(block_bytes - offset, room_bytes)
            if parts and length < block_bytes:
                break  # a block that does not fit whole starts the next chunk
            parts.append(_Part(sending.refs[index], offset, length))
            room_bytes -= length
            index, offset = index + 1, 0
        return parts

    def _judge(self, reader: _Reader) -> None:
        """Reads whose last byte has arrived: nothing reads their blocks any more, so this check is the last word."""
        while reader.arriving and reader.arriving[0].end <= reader.landed_bytes:
            sending = reader.arriving.popleft()
            verdict = wire.Verdict(sending.read)
            try:
                check_generations(sending.refs, self._pool.generations)
            except BatonError as error:
                verdict = wire.Verdict(sending.read, WireError.of(error))
            self._say(reader, verdict)

    def _say(self, reader: _Reader, word: wire.Word, chunk: Sequence[memoryview] = ()) -> bool:
        """False if the reader is gone."""
        assert self._socket is not None
        try:
            self._socket.send([reader.identity, wire.encode(word), *chunk], copy=not chunk)
        except zmq.ZMQError:
            self._forget(reader)
            return False
        return True

    # --- losing --------------------------------------------------------------------------------------

    def _refuse(self, identity: bytes, reason: str) -> None:
        self._readers.pop(identity, None)
        assert self._socket is not None
        with suppress(zmq.ZMQError):  # it may be gone already
            self._socket.send([identity, wire.encode(wire.Refuse(reason))])

    def _forget(self, reader: _Reader) -> None:
        self._readers.pop(reader.identity, None)
        reader.sending.clear()
        reader.arriving.clear()

    def _reader_gone(self, _: str | None) -> None:
        """Some connection ended. ZeroMQ does not say whose, so ask for each; again a little later, for it may
        not have put the connection away yet."""
        self._ask_for_all()
        if self._sweep is None:
            self._sweep = self._loop.call_later(_SWEEP_AGAIN_S, self._sweep_again)

    def _sweep_again(self) -> None:
        self._sweep = None
        self._ask_for_all()

    def _ask_for_all(self) -> None:
        for reader in list(self._readers.values()):
            self._say(reader, wire.Ping())

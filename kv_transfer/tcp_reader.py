"""The reader's side of the tcp transport: asks for blocks and lands their bytes in its own pool."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future as ThreadFuture
from dataclasses import dataclass, field
from itertools import count

import msgspec
import numpy as np
import zmq

from common.errors import BatonError, PeerLostError, StaleBlockError, TransferError
from common.kv_cache.memory import PoolMemory
from common.messages import BlockId, BlockRef, Incarnation, Offer
from kv_transfer import tcp_wire as wire
from kv_transfer.base import TransferSettings
from kv_transfer.blocks import check_destination, check_layout, check_source, settled
from kv_transfer.shared import COPY_THREAD
from kv_transfer.stall import StallWatch

_CONNECT_TIMEOUT_S = 3.0


@dataclass(slots=True, eq=False)
class _Pull:
    """One read. It is over when its outcome is known and no landing touches its blocks any more."""

    read: int
    into: Sequence[BlockId]
    total_bytes: int
    over: "asyncio.Future[None]"
    received_bytes: int = 0
    num_landing: int = 0
    dropped: bool = False
    """Set by the loop, looked at by the copy thread before every copy."""
    error: BatonError | None = None


@dataclass(slots=True)
class _Landing:
    """Frames on their way into the pool: what the copy thread does between two credits."""

    num_bytes: int = 0
    pulls: dict[_Pull, None] = field(default_factory=dict)
    copies: list[tuple[_Pull, np.ndarray[tuple[int], np.dtype[np.uint8]], zmq.Frame]] = field(default_factory=list)

    def run(self) -> None:
        for pull, destination, frame in self.copies:
            if not pull.dropped:
                destination[:] = np.frombuffer(frame.buffer, np.uint8)
        self.copies.clear()


class TcpReader:
    def __init__(self, offer: Offer, *, owner: Incarnation, pool: PoolMemory, settings: TransferSettings) -> None:
        self._offer = offer
        self._owner = owner
        self._pool = pool
        self._keys = settings.trust.keys
        self._stall_timeout_s = settings.stall_timeout_s
        self._num_blocks = 0
        self._socket: wire.LoopSocket | None = None
        self._pulls: dict[int, _Pull] = {}
        self._counter = count()
        self._landing: _Landing | None = None
        self._num_landings = 0
        self._lost: BatonError | None = None
        self._watch: StallWatch | None = None

    async def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._welcome: asyncio.Future[wire.Welcome] = self._loop.create_future()
        self._idle = asyncio.Event()
        self._idle.set()
        self._watch = StallWatch(self._stall_timeout_s, self._stalled)
        self._copier = COPY_THREAD.borrow()
        self._socket = wire.LoopSocket(
            zmq.DEALER,
            keys=self._keys,
            max_message_bytes=wire.CHUNK_BYTES + wire.MAX_CONTROL_BYTES,
            on_message=self._hear,
            on_gone=self._owner_gone,
        )
        try:
            self._socket.socket.setsockopt(zmq.IPV6, int("[" in self._offer.address))
            self._socket.socket.connect(self._offer.address)
            self._say(wire.Hello(wire.VERSION, self._owner, self._pool.incarnation))
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                welcome = await self._welcome
            check_layout(self._pool.layout, welcome.layout)
        except BaseException as error:
            await self.close()
            if isinstance(error, TimeoutError):
                raise TransferError(f"tcp: nobody answers at {self._offer.address}") from error
            if isinstance(error, zmq.ZMQError):
                raise TransferError(f"tcp: cannot connect to {self._offer.address} ({error.strerror})") from error
            raise
        self._num_blocks = welcome.num_blocks

    async def read(self, refs: Sequence[BlockRef], into: Sequence[BlockId], *, secret: bytes) -> None:
        if self._lost is not None:
            raise _again(self._lost)
        if self._socket is None or self._watch is None:
            raise TransferError("tcp: the reader is not open")
        check_destination(refs, into, self._pool.num_blocks)
        check_source(refs, self._num_blocks)
        if not refs:
            return
        total_bytes = len(refs) * self._pool.layout.block_bytes
        pull = _Pull(next(self._counter), tuple(into), total_bytes, self._loop.create_future())
        self._pulls[pull.read] = pull
        self._say(wire.Read(pull.read, tuple(refs), secret))
        if self._pulls:
            self._watch.start()
        await settled(pull.over, lambda: self._give_up(pull))

    async def close(self) -> None:
        if self._socket is None:
            return
        self._lose(TransferError("tcp: the reader was closed"))
        socket, self._socket = self._socket, None
        socket.close()
        try:
            await settled(asyncio.ensure_future(self._idle.wait()), lambda: None)
        finally:
            COPY_THREAD.give_back()

    def _say(self, word: wire.OwnerHears) -> None:
        if self._socket is None or self._lost is not None:
            return
        try:
            self._socket.send([wire.encode(word)])
        except zmq.Again:  # there is no connection any more, and the monitor has not said so yet
            self._owner_gone()

    # --- hearing -------------------------------------------------------------------------------------

    def _hear(self, frames: list[zmq.Frame]) -> None:
        assert self._watch is not None
        self._watch.heard()
        try:
            word = wire.reader_decoder.decode(frames[0].buffer)
            match word:
                case wire.Welcome():
                    if not self._welcome.done():
                        self._welcome.set_result(word)
                case wire.Refuse():
                    self._lose(TransferError(f"tcp: the owner refuses, {word.reason}"))
                case wire.Chunk():
                    self._land(word, frames[1:])
                case wire.Verdict():
                    self._end(word)
                case wire.Ping():
                    pass
        except (msgspec.MsgspecError, ValueError) as error:
            self._lose(TransferError(f"tcp: the owner talks nonsense ({error})"))

    def _land(self, chunk: wire.Chunk, frames: list[zmq.Frame]) -> None:
        """Queue the frames for the copy thread; chunks of reads that were given up only earn their credit."""
        if self._landing is None:
            self._landing = _Landing()
            self._idle.clear()
            self._loop.call_soon(self._start_landing)
        self._landing.num_bytes += sum(len(frame) for frame in frames)
        pull = self._pulls.get(chunk.read)
        if pull is None or pull.dropped:
            return
        if chunk.start != pull.received_bytes:
            raise ValueError(f"bytes from {chunk.start} on instead of {pull.received_bytes}")
        if pull not in self._landing.pulls:
            self._landing.pulls[pull] = None
            pull.num_landing += 1
        block_bytes = self._pool.layout.block_bytes
        for frame in frames:
            index, offset = divmod(pull.received_bytes, block_bytes)
            if index >= len(pull.into) or offset + len(frame) > block_bytes:
                raise ValueError("more bytes than were asked for")
            destination = self._pool.blocks[pull.into[index]][offset : offset + len(frame)]
            self._landing.copies.append((pull, destination, frame))
            pull.received_bytes += len(frame)

    def _start_landing(self) -> None:
        """Everything that one turn of the loop brought goes to the copy thread as one job."""
        landing, self._landing = self._landing, None
        assert landing is not None
        self._num_landings += 1
        self._copier.submit(landing.run).add_done_callback(
            lambda done: self._loop.call_soon_threadsafe(self._landed, landing, done)
        )

    def _landed(self, landing: _Landing, done: "ThreadFuture[None]") -> None:
        done.result()
        self._num_landings -= 1
        if self._num_landings == 0 and self._landing is None:
            self._idle.set()
        self._say(wire.Credit(landing.num_bytes))
        for pull in landing.pulls:
            pull.num_landing -= 1
            self._finish(pull)

    # --- ending --------------------------------------------------------------------------------------

    def _end(self, verdict: wire.Verdict) -> None:
        pull = self._pulls.get(verdict.read)
        if pull is None:
            return
        error = verdict.error.exception() if verdict.error is not None else None
        if error is None and pull.received_bytes != pull.total_bytes:
            raise ValueError("a read was called done before its bytes were sent")
        # Whatever word the owner has for it, here it is a transfer that failed.
        if error is not None and not isinstance(error, StaleBlockError):
            error = TransferError(f"tcp: {error.message}")
        self._settle(pull, error)

    def _give_up(self, pull: _Pull) -> None:
        self._say(wire.Cancel(pull.read))
        self._settle(pull, TransferError("tcp: the read was cancelled"))

    def _settle(self, pull: _Pull, error: BatonError | None) -> None:
        """The outcome is known. Landing goes on only if it is a good one."""
        if self._pulls.pop(pull.read, None) is None:
            return
        pull.error = error
        pull.dropped = error is not None
        self._finish(pull)
        if not self._pulls and self._watch is not None:
            self._watch.stop()

    def _finish(self, pull: _Pull) -> None:
        if pull.num_landing or pull.read in self._pulls or pull.over.done():
            return
        if pull.error is None:
            pull.over.set_result(None)
        else:
            pull.over.set_exception(_again(pull.error))

    # --- losing --------------------------------------------------------------------------------------

    def _owner_gone(self, refusal: str | None = None) -> None:
        self._lose(PeerLostError(f"tcp: the owner at {self._offer.address} {refusal or 'is gone'}"))

    def _lose(self, error: BatonError) -> None:
        """Every read ends with `error`, and so will those to come."""
        if self._lost is not None:
            return
        self._lost = error
        if not self._welcome.done():
            # Nobody may be waiting any more, and the loop would complain about an unseen error.
            self._welcome.set_exception(TransferError(error.message))
            self._welcome.exception()
        for pull in list(self._pulls.values()):
            self._settle(pull, error)

    def _stalled(self) -> None:
        assert self._socket is not None and self._watch is not None
        num_heard = self._watch.num_heard
        self._socket.drain()
        if self._watch.num_heard != num_heard:
            self._watch.start()
        else:
            message = f"tcp: the owner at {self._offer.address} sent nothing for {self._stall_timeout_s:g} s"
            self._lose(PeerLostError(message))


def _again(error: BatonError) -> BatonError:
    """A fresh exception of the same kind: one object raised in several tasks would mix up their tracebacks."""
    return type(error)(error.message)

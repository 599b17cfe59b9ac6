"""The reader's side of the shm transport: maps the owner's pool and copies."""

import asyncio
import fcntl
import mmap
import os
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress

import msgspec
import numpy as np

from common.errors import PeerLostError, StaleBlockError, TransferError
from common.kv_cache.memory import PoolMemory
from common.messages import BlockId, BlockRef, Incarnation, Offer
from kv_transfer import shm_wire as wire
from kv_transfer.blocks import check_destination, check_generations, check_layout, check_source, runs, settled
from kv_transfer.shared import COPY_THREAD

_ANSWER_TIMEOUT_S = 2.0
_SHRINK_AND_GROW = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class _Mapping:
    """The owner's pool, mapped for reading only."""

    def __init__(self, fd: int, welcome: wire.Welcome, blocks_offset: int) -> None:
        num_blocks, block_bytes = welcome.num_blocks, welcome.layout.block_bytes
        blocks_end = blocks_offset + num_blocks * block_bytes
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        if seals & _SHRINK_AND_GROW != _SHRINK_AND_GROW or os.fstat(fd).st_size < blocks_end:
            raise TransferError("the owner's pool is not sealed or too small: reading it could crash this process")
        if not 0 < num_blocks * 8 <= blocks_offset:
            raise TransferError("the owner describes its pool wrongly")
        self._map = mmap.mmap(fd, blocks_end, prot=mmap.PROT_READ)
        whole = np.frombuffer(self._map, np.uint8)
        self.blocks = whole[blocks_offset:].reshape(num_blocks, block_bytes)
        self.generations = whole[: num_blocks * 8].view(np.int64)

    def close(self) -> None:
        del self.blocks, self.generations
        with suppress(BufferError):  # an error's traceback may hold the last view a little longer, and frees it then
            self._map.close()


class ShmReader:
    """Copies in the process's copy thread; the loop only waits."""

    def __init__(self, offer: Offer, *, owner: Incarnation, pool: PoolMemory) -> None:
        self._offer = offer
        self._owner = owner
        self._pool = pool
        self._connection: socket.socket | None = None
        self._mapping: _Mapping | None = None
        self._asks: set[asyncio.Future[None]] = set()
        self._asking = asyncio.Lock()
        self._copies: dict[_Copy, asyncio.Future[None]] = {}

    async def open(self) -> None:
        if self._offer.host != wire.this_host():
            raise TransferError("shm: the owner is on another host or in another network namespace")
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            connection.connect("\0" + self._offer.address)
            if not wire.peer_is_us(connection):
                raise TransferError("shm: the owner runs as another user")
            connection.send(wire.encode(wire.Hello(self._owner, self._pool.incarnation)))
            message, _ = await _answer_to(connection)
            welcome = wire.greeting_decoder.decode(message)
            if isinstance(welcome, wire.Refusal):
                raise TransferError(f"shm: refused, {welcome.reason}")
            check_layout(self._pool.layout, welcome.layout)
        except TimeoutError as error:
            connection.close()
            raise TransferError("shm: the owner does not answer") from error
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            connection.close()
            raise TransferError(f"shm: the owner cannot be reached from here ({error})") from error
        except BaseException:
            connection.close()
            raise
        self._connection, self._welcome = connection, welcome

    async def read(self, refs: Sequence[BlockRef], into: Sequence[BlockId], *, secret: bytes) -> None:
        if self._connection is None:
            raise TransferError("shm: the reader is not open")
        check_destination(refs, into, self._pool.num_blocks)
        check_source(refs, self._welcome.num_blocks)
        if self._mapping is None:
            ask = asyncio.ensure_future(self._ask(secret))
            self._asks.add(ask)
            ask.add_done_callback(self._asks.discard)
            # To its end, though the read is cancelled: an answer left behind would be taken for the next one's.
            await settled(ask, lambda: None)
        if self._connection is None or self._mapping is None:
            raise TransferError("shm: the reader was closed")
        copy = _Copy(self._mapping, self._connection, self._pool, refs, into)
        self._copies[copy] = asyncio.get_running_loop().run_in_executor(self._copier, copy.run)
        try:
            await settled(self._copies[copy], copy.stop)
        finally:
            del self._copies[copy]

    async def _ask(self, secret: bytes) -> None:
        """Have the pool mapped. StaleBlockError if the secret is not good for that; PeerLostError without an owner."""
        async with self._asking:
            if self._mapping is not None or self._connection is None:
                return
            try:
                self._connection.send(wire.encode(wire.Ask(secret)))
                message, fds = await _answer_to(self._connection)
                self._mapping = self._map(message, fds)
            except (OSError, ValueError, msgspec.MsgspecError) as error:  # OSError: TimeoutError is one
                connection, self._connection = self._connection, None
                if connection is not None:
                    connection.close()
                raise PeerLostError(f"shm: the owner is gone, stuck or talks nonsense ({error!r})") from error
            self._copier = COPY_THREAD.borrow()

    def _map(self, message: bytes, fds: list[int]) -> _Mapping:
        try:
            answer = wire.answer_decoder.decode(message)
            if isinstance(answer, wire.Refusal):
                raise StaleBlockError(f"shm: refused, {answer.reason}")
            if len(fds) != 1:
                raise ValueError("no memory came")
            return _Mapping(fds[0], self._welcome, answer.blocks_offset)
        finally:
            for fd in fds:
                os.close(fd)

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        for copy in self._copies:
            copy.stop()
        if connection is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # which answers every Ask
        ended = asyncio.gather(*self._asks, *self._copies.values(), return_exceptions=True)
        try:
            await settled(ended, lambda: None)
        finally:
            mapping, self._mapping = self._mapping, None
            if mapping is not None:
                mapping.close()
                COPY_THREAD.give_back()
            if connection is not None:
                connection.close()


async def _answer_to(connection: socket.socket) -> tuple[bytes, list[int]]:
    """The next message with its descriptors, which the caller closes. TimeoutError, OSError; ValueError at the end."""
    async with asyncio.timeout(_ANSWER_TIMEOUT_S):
        await _readable(connection)
    message, fds, _, _ = socket.recv_fds(connection, wire.MAX_MESSAGE_BYTES, 4)
    if not message:
        raise ValueError("the owner hung up")
    return message, fds


async def _readable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(connection.fileno(), lambda: None if ready.done() else ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(connection.fileno())


class _Copy:
    """One read, run in the copy thread. Checks all before, copies, checks all after."""

    def __init__(
        self,
        source: _Mapping,
        connection: socket.socket,
        pool: PoolMemory,
        refs: Sequence[BlockRef],
        into: Sequence[BlockId],
    ) -> None:
        self._source = source
        self._connection = connection
        self._pool = pool
        self._refs = refs
        self._into = into
        self._stopped = threading.Event()

    def stop(self) -> None:
        self._stopped.set()

    def run(self) -> None:
        self._check_owner_lives()
        check_generations(self._refs, self._source.generations)
        theirs, ours = self._source.blocks, self._pool.blocks
        for source, destination, length in runs(self._refs, self._into):
            if self._stopped.is_set():
                raise TransferError("shm: the read was ended")
            # numpy gives up the interpreter's lock for the copy
            ours[destination : destination + length] = theirs[source : source + length]
        check_generations(self._refs, self._source.generations)
        self._check_owner_lives()

    def _check_owner_lives(self) -> None:
        """The owner says nothing after its grant, so anything readable is its end. Asked of the kernel directly:
        the loop may not have got round to noticing."""
        try:
            self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError as error:
            raise PeerLostError(f"shm: the owner is gone ({error})") from error
        raise PeerLostError("shm: the owner is gone")

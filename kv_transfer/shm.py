"""Blocks between processes of one host: the reader maps the owner's pool for reading and copies.

The owner hands its sealed memfd over an abstract unix socket; neither has a name in any file system, so a
kill -9 leaves nothing. The connection stays open for as long as the reader lives: its end is how the death of
the owner is seen. The mapping itself outlives the owner (the seals rule out SIGBUS), but what a dead owner
left in it is not trusted.
"""

import asyncio
import fcntl
import mmap
import os
import secrets
import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np

from common.errors import PeerLostError, TransferError
from common.kv_cache.memory import PoolMemory
from common.messages import BlockId, BlockRef, Incarnation, KVLayout, Offer
from kv_transfer.blocks import check_destination, check_generations, check_layout, check_source, runs, settled
from kv_transfer.shared import COPY_THREAD

_HELLO_TIMEOUT_S = 2.0
_MAX_MESSAGE_BYTES = 1 << 16
_MAX_READERS = 1024
_SHRINK_AND_GROW = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class _Hello(msgspec.Struct, frozen=True, tag=True):
    """Reader -> owner, first and only."""

    owner: Incarnation


class _Grant(msgspec.Struct, frozen=True, tag=True):
    """Owner -> reader, with the memfd attached."""

    layout: KVLayout
    num_blocks: int
    blocks_offset: int


class _Refusal(msgspec.Struct, frozen=True, tag=True):
    reason: str


_hello_decoder = msgspec.msgpack.Decoder(_Hello)
_answer_decoder = msgspec.msgpack.Decoder(_Grant | _Refusal)


def this_host() -> str:
    """Equal in two processes that can reach each other's abstract sockets: one boot, one network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/net')}"


def _peer_is_us(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _pid, uid, _gid = struct.unpack("3i", credentials)
    return bool(uid == os.geteuid())


class ShmTransport:
    name = "shm"

    def serve(self, pool: PoolMemory, *, listen_host: str = "127.0.0.1") -> "ShmServer":
        return ShmServer(pool)

    def reader(self, offer: Offer, *, owner: Incarnation, pool: PoolMemory) -> "ShmReader":
        return ShmReader(offer, owner=owner, pool=pool)


class ShmServer:
    """Hands the pool's memfd to whoever runs as the same user and knows the incarnation."""

    def __init__(self, pool: PoolMemory) -> None:
        self._pool = pool
        self._listener: socket.socket | None = None
        self._readers: dict[socket.socket, asyncio.TimerHandle] = {}

    async def start(self) -> Offer:
        if self._pool.fd < 0:
            raise TransferError("shm: the pool is not in host memory")
        name = f"baton-kv-{secrets.token_hex(16)}"
        self._loop = asyncio.get_running_loop()
        # SEQPACKET keeps message boundaries, so there is nothing to reassemble.
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listener.bind("\0" + name)
        self._listener.listen(128)
        self._loop.add_reader(self._listener.fileno(), self._accept)
        return Offer(transport="shm", address=name, host=this_host())

    async def close(self) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
        for connection in list(self._readers):
            self._drop(connection)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # it hung up again, or we are out of descriptors: the next readiness event tries again
        connection.setblocking(False)
        if len(self._readers) >= _MAX_READERS or not _peer_is_us(connection):
            connection.close()
            return
        self._readers[connection] = self._loop.call_later(_HELLO_TIMEOUT_S, self._drop, connection)
        self._loop.add_reader(connection.fileno(), self._greet, connection)

    def _greet(self, connection: socket.socket) -> None:
        """The one message of a reader; anything after it, its hang-up included, ends the connection."""
        try:
            message = connection.recv(_MAX_MESSAGE_BYTES)
            if not message or self._readers[connection].cancelled():
                self._drop(connection)
                return
            self._answer(connection, _hello_decoder.decode(message))
        except (OSError, msgspec.MsgspecError):
            self._drop(connection)

    def _answer(self, connection: socket.socket, hello: _Hello) -> None:
        if hello.owner != self._pool.incarnation:
            reason = f"incarnation {hello.owner} is gone, {self._pool.incarnation} is here"
            connection.send(msgspec.msgpack.encode(_Refusal(reason)))
            self._drop(connection)
            return
        grant = _Grant(self._pool.layout, self._pool.num_blocks, self._pool.blocks_offset)
        socket.send_fds(connection, [msgspec.msgpack.encode(grant)], [self._pool.fd])
        self._readers[connection].cancel()

    def _drop(self, connection: socket.socket) -> None:
        self._readers.pop(connection).cancel()
        self._loop.remove_reader(connection.fileno())
        connection.close()


class _Mapping:
    """The owner's pool, mapped for reading only."""

    def __init__(self, fd: int, grant: _Grant) -> None:
        blocks_end = grant.blocks_offset + grant.num_blocks * grant.layout.block_bytes
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        if seals & _SHRINK_AND_GROW != _SHRINK_AND_GROW or os.fstat(fd).st_size < blocks_end:
            raise TransferError("the owner's pool is not sealed or too small: reading it could crash this process")
        if not 0 < grant.num_blocks * 8 <= grant.blocks_offset:
            raise TransferError("the owner describes its pool wrongly")
        self._map = mmap.mmap(fd, blocks_end, prot=mmap.PROT_READ)
        whole = np.frombuffer(self._map, np.uint8)
        self.blocks = whole[grant.blocks_offset :].reshape(grant.num_blocks, grant.layout.block_bytes)
        self.generations = whole[: grant.num_blocks * 8].view(np.int64)

    @property
    def num_blocks(self) -> int:
        return len(self.generations)

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
        self._copies: dict[_Copy, asyncio.Future[None]] = {}

    async def open(self) -> None:
        if self._offer.host != this_host():
            raise TransferError("shm: the owner is on another host or in another network namespace")
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            connection.connect("\0" + self._offer.address)
            if not _peer_is_us(connection):
                raise TransferError("shm: the owner runs as another user")
            connection.send(msgspec.msgpack.encode(_Hello(self._owner)))
            async with asyncio.timeout(_HELLO_TIMEOUT_S):
                await _readable(connection)
            self._mapping = self._map(connection)
        except TimeoutError as error:
            connection.close()
            raise TransferError("shm: the owner does not answer") from error
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            connection.close()
            raise TransferError(f"shm: the owner cannot be reached from here ({error})") from error
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        self._copier = COPY_THREAD.borrow()

    def _map(self, connection: socket.socket) -> _Mapping:
        message, fds, _, _ = socket.recv_fds(connection, _MAX_MESSAGE_BYTES, 4)
        try:
            if not message:
                raise TransferError("shm: the owner hung up")
            answer = _answer_decoder.decode(message)
            if isinstance(answer, _Refusal):
                raise TransferError(f"shm: refused, {answer.reason}")
            if len(fds) != 1:
                raise TransferError("shm: the owner sent no memory")
            check_layout(self._pool.layout, answer.layout)
            return _Mapping(fds[0], answer)
        finally:
            for fd in fds:
                os.close(fd)

    async def read(self, refs: Sequence[BlockRef], into: Sequence[BlockId]) -> None:
        if self._connection is None or self._mapping is None:
            raise TransferError("shm: the reader is not open")
        check_destination(refs, into, self._pool.num_blocks)
        check_source(refs, self._mapping.num_blocks)
        copy = _Copy(self._mapping, self._connection, self._pool, refs, into)
        self._copies[copy] = asyncio.get_running_loop().run_in_executor(self._copier, copy.run)
        try:
            await settled(self._copies[copy], copy.stop)
        finally:
            del self._copies[copy]

    async def close(self) -> None:
        if self._connection is None or self._mapping is None:
            return
        connection, self._connection = self._connection, None
        mapping, self._mapping = self._mapping, None
        for copy in self._copies:
            copy.stop()
        ended = asyncio.gather(*self._copies.values(), return_exceptions=True)
        try:
            await settled(ended, lambda: None)
        finally:
            mapping.close()
            connection.close()
            COPY_THREAD.give_back()


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

"""The owner's side of the shm transport: hands out the pool's memfd."""

import asyncio
import errno
import secrets
import socket
from dataclasses import dataclass

import msgspec

from common import telemetry
from common.errors import TransferError
from common.kv_cache.memory import PoolMemory
from common.messages import HeldConnection, Incarnation, Offer
from kv_transfer import shm_wire as wire

sparing = telemetry.Sparing(telemetry.logger(__name__))

_HELLO_TIMEOUT_S = 2.0
_MAX_READERS = 1024
_REST_S = 0.1
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(slots=True)
class _Visitor:
    """`deadline` is its time for a Hello; None once it has said it, and then `reader` is who it is."""

    deadline: asyncio.TimerHandle | None
    reader: Incarnation | None = None
    has_mapped: bool = False


class ShmServer:
    """Hands the pool's memfd to whoever runs as the same user, knows the incarnation and has a call's secret."""

    def __init__(self, pool: PoolMemory) -> None:
        self._pool = pool
        self._listener: socket.socket | None = None
        self._resting: asyncio.TimerHandle | None = None
        self._readers: dict[socket.socket, _Visitor] = {}

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
        return Offer(transport="shm", address=name, host=wire.this_host())

    def connections(self) -> list[HeldConnection]:
        return [HeldConnection("shm", one.reader) for one in self._readers.values() if one.reader is not None]

    async def close(self) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
        if self._resting is not None:
            self._resting.cancel()
            self._resting = None
        for connection in list(self._readers):
            self._drop(connection)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _EXHAUSTED:
                self._rest(error)
            return  # else it hung up again
        connection.setblocking(False)
        if len(self._readers) >= _MAX_READERS or not wire.peer_is_us(connection):
            connection.close()
            return
        self._readers[connection] = _Visitor(self._loop.call_later(_HELLO_TIMEOUT_S, self._drop, connection))
        self._loop.add_reader(connection.fileno(), self._hear, connection)

    def _rest(self, error: OSError) -> None:
        """Who waits to be accepted keeps the listener readable: do not ask again before there may be room."""
        assert self._listener is not None
        sparing.warning("no reader is let in for now", transport="shm", error=str(error), again_in_s=_REST_S)
        self._loop.remove_reader(self._listener.fileno())
        self._resting = self._loop.call_later(_REST_S, self._resume)

    def _resume(self) -> None:
        assert self._listener is not None
        self._resting = None
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def _hear(self, connection: socket.socket) -> None:
        """A Hello, then Asks until one is granted. Anything else, its hang-up included, ends the connection."""
        try:
            self._answer(connection, wire.question_decoder.decode(connection.recv(wire.MAX_MESSAGE_BYTES)))
        except (OSError, msgspec.MsgspecError):
            self._drop(connection)

    def _answer(self, connection: socket.socket, question: wire.Hello | wire.Ask) -> None:
        visitor, pool = self._readers[connection], self._pool
        match question:
            case wire.Hello() if visitor.deadline is not None and question.owner != pool.incarnation:
                reason = f"incarnation {question.owner} is gone, {pool.incarnation} is here"
                connection.send(wire.encode(wire.Refusal(reason)))
                self._drop(connection)
            case wire.Hello() if visitor.deadline is not None:
                connection.send(wire.encode(wire.Welcome(pool.layout, pool.num_blocks)))
                visitor.deadline.cancel()
                visitor.deadline, visitor.reader = None, question.reader
            case wire.Ask() if visitor.deadline is None and not visitor.has_mapped:
                if pool.grants.knows(question.secret):
                    socket.send_fds(connection, [wire.encode(wire.Grant(pool.blocks_offset))], [pool.fd])
                    visitor.has_mapped = True
                else:
                    connection.send(wire.encode(wire.Refusal("no open call has this secret")))
            case _:
                self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        visitor = self._readers.pop(connection)
        if visitor.deadline is not None:
            visitor.deadline.cancel()
        self._loop.remove_reader(connection.fileno())
        connection.close()

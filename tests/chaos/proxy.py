"""A TCP proxy before each process: where links are cut and swallowed without touching a socket of Baton."""

import asyncio
import socket
import struct
from contextlib import suppress

_PIECE_BYTES = 1 << 16
_RESET = struct.pack("ii", 1, 0)  # lingering for 0 s: a close is a reset


class Proxy:
    """Forwards every connection to `target` (a port on the loopback) until told otherwise."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._server: asyncio.Server | None = None
        self._open = asyncio.Event()  # not set: bytes wait, connections stand
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        """The port that it listens on."""
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    def cut(self) -> int:
        """Reset every connection; how many there were. New ones are let through."""
        connections = [task for task in self._tasks if not task.done()]
        for task in connections:
            task.cancel()
        return len(connections)

    def swallow(self) -> None:
        """A partition: nothing passes either way and nobody is told."""
        self._open.clear()

    def heal(self) -> None:
        self._open.set()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.heal()
        self.cut()
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        ends = [writer]
        try:
            await self._open.wait()
            there, onwards = await asyncio.open_connection("127.0.0.1", self._target)
            ends.append(onwards)
            await self._first_to_end(self._pump(reader, onwards), self._pump(there, writer))
        except (OSError, asyncio.CancelledError):
            pass  # nobody there, or cut: either way both ends are reset below
        finally:
            for end in ends:
                with suppress(OSError):  # closed already
                    end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(_PIECE_BYTES):
            await self._open.wait()
            writer.write(piece)
            await writer.drain()

    async def _first_to_end(self, *pumps: object) -> None:
        tasks = [asyncio.ensure_future(pump) for pump in pumps]  # type: ignore[call-overload]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            for task in tasks:
                with suppress(asyncio.CancelledError, OSError):
                    await task

"""Plain ZeroMQ sockets, read by the running loop."""

import asyncio
from collections.abc import Callable

import zmq

_MESSAGES_A_TURN = 128  # then the rest of the loop has its turn


class SocketReader:
    """Hands on every message of a socket. The descriptor signals edges only, hence `recheck` after each send."""

    def __init__(self, sock: zmq.Socket[bytes], on_message: Callable[[list[bytes]], None]) -> None:
        self._sock = sock
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._fd = int(sock.getsockopt(zmq.FD))
        self._is_closed = False
        self._loop.add_reader(self._fd, self._turn)
        self._loop.call_soon(self._turn)  # an edge from before we watched

    def drain(self, limit: int | None = None) -> bool:
        """True once the socket is dry."""
        while limit is None or limit > 0:
            if self._is_closed:
                return True
            try:
                parts = self._sock.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return True
            self._on_message(parts)
            limit = None if limit is None else limit - 1
        return False

    def recheck(self) -> None:
        if int(self._sock.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self._turn)

    def close(self) -> None:
        """Closes the socket too."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._fd)
            self._sock.close(linger=0)

    def _turn(self) -> None:
        if not self.drain(_MESSAGES_A_TURN):
            self._loop.call_soon(self._turn)


def monitor_of(
    sock: "zmq.Socket[bytes]", context: "zmq.Context[zmq.Socket[bytes]]", events: int
) -> "zmq.Socket[bytes]":
    """Hears of `events` of `sock`, for `parse_monitor_message`. Say `sock.monitor(None, 0)` before you close it."""
    watch = f"inproc://watch-{id(sock)}"
    sock.monitor(watch, events)
    monitor = context.socket(zmq.PAIR)
    monitor.setsockopt(zmq.RCVHWM, 0)  # at a mark ZeroMQ's own thread would wait for us
    monitor.connect(watch)
    return monitor

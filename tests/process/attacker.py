"""A stranger at every door of a cluster: says what it is told to, waits for a first answer, and hangs up."""

import contextlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import zmq

from common.messages import View

ANSWER_S = 0.05
"""Enough for an answer, if there is to be one."""


@dataclass(frozen=True, slots=True)
class Doors:
    """`calls` and `reads` speak ZeroMQ, `mappings` are names of unix sockets, `ports` all that listens on tcp."""

    http: str
    calls: tuple[str, ...]
    reads: tuple[str, ...]
    mappings: tuple[str, ...]
    ports: tuple[int, ...]

    @classmethod
    def of(cls, *, url: str, coordinator: str, view: View, ports: Sequence[int]) -> "Doors":
        offers = [offer for node in view.nodes for offer in node.card.offers]

        def offered(transport: str) -> tuple[str, ...]:
            return tuple(offer.address for offer in offers if offer.transport == transport)

        nodes = [node.card.address for node in view.nodes]
        gateways = [gateway.address for gateway in view.gateways]
        return cls(url, (coordinator, *gateways, *nodes), offered("tcp"), offered("shm"), tuple(sorted(ports)))


class Attacker:
    """Blocking, for a thread of its own; `num_messages` counts what was said. Use it as a context manager."""

    def __init__(self, doors: Doors) -> None:
        self.doors = doors
        self.num_messages = 0
        self._context = zmq.Context()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.destroy(linger=0)

    def say_zmq(self, addresses: Sequence[str], messages: Sequence[Sequence[bytes]]) -> None:
        """All messages on one connection to each address."""
        dealers = [self._context.socket(zmq.DEALER) for _ in addresses]
        poller = zmq.Poller()
        for dealer, address in zip(dealers, addresses, strict=True):
            dealer.connect(address)
            poller.register(dealer, zmq.POLLIN)
            for parts in messages:
                if parts:
                    dealer.send_multipart(parts)
                    self.num_messages += 1
        poller.poll(int(ANSWER_S * 1000))
        for dealer in dealers:
            dealer.close(linger=200)

    def say_tcp(self, ports: Sequence[int], said: bytes) -> None:
        """The same bytes on a connection to each port; then it listens for a moment."""
        for port in ports:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0) as stream:
                self.num_messages += 1
                stream.sendall(said)
                stream.settimeout(ANSWER_S / 10)
                stream.recv(1 << 16)

    def say_http(self, said: bytes) -> None:
        """Everything on one connection, read to its end or to the first silence."""
        port = urlsplit(self.doors.http).port
        assert port is not None
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0) as stream:
            self.num_messages += 1
            stream.sendall(said)
            stream.settimeout(ANSWER_S)
            while stream.recv(1 << 16):
                pass

    def say_unix(self, messages: Sequence[bytes]) -> None:
        for name in self.doors.mappings:
            with (
                contextlib.suppress(OSError),
                socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stream,
            ):
                stream.settimeout(ANSWER_S)
                stream.connect("\0" + name)
                for message in messages:
                    self.num_messages += 1
                    stream.send(message)
                stream.recv(1 << 16)

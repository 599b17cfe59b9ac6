"""Calls over ZeroMQ: a DEALER per link on the caller's side, one ROUTER per server.

Sockets are plain ones, read dry whenever their descriptor becomes readable, so one loop (asyncio or uvloop)
serves them all without a thread of ours. A connection that breaks is never rebuilt behind our back
(RECONNECT_IVL -1): the lifecycle decides. A DEALER's monitor says when its peer goes; a ROUTER learns it
from the next message that cannot be routed, at the latest from the next Beat.
"""

import contextlib
import os
import socket
import stat
from collections.abc import Mapping

import zmq
from zmq.utils.monitor import parse_monitor_message

from common.clock import Clock, SystemClock
from common.config import LinkConfig
from common.errors import ConfigError, PeerLostError
from common.keys import Trust
from common.messages import Incarnation, NodeId, RequestBody
from common.rpc.base import Handler
from common.rpc.call import LinkTimes
from common.rpc.client import ClientEndpoint
from common.rpc.curve import REFUSALS, Doorkeeper, as_dialler, as_listener, log_stranger, refused_us
from common.rpc.endpoint import MAX_MESSAGE_BYTES, Ticker, WireEvents
from common.rpc.server import ServerEndpoint
from common.rpc.sockets import SocketReader, monitor_of

_MAX_SOCKETS = 65_536  # a link takes three; libzmq's own limit of 1,023 would be a few hundred links
_GONE = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | REFUSALS


class DealerWire:
    """`endpoint.Wire`: one connection to one server."""

    def __init__(self, network: "ZmqNetwork", address: str, events: WireEvents) -> None:
        context = network.acquire()
        self._network = network
        self._events = events
        self._is_closed = False
        self._sock = network.socket(context, zmq.DEALER, address)
        self._sock.setsockopt(zmq.RECONNECT_IVL, -1)
        as_dialler(self._sock, network.trust.keys)
        self._reader = SocketReader(self._sock, self._received)
        self._monitor = SocketReader(monitor_of(self._sock, context, _GONE), self._watched)
        try:
            self._sock.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise PeerLostError(f"cannot dial {address!r}: {os.strerror(error.errno or 0)}") from error

    def send(self, payload: bytes) -> None:
        if self._is_closed:
            raise PeerLostError("the connection is closed")
        try:
            self._sock.send(payload, zmq.NOBLOCK)
        except zmq.ZMQError as error:  # EAGAIN: without a high-water mark only a lost connection blocks
            raise PeerLostError("the connection is gone") from error
        self._reader.recheck()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._sock.monitor(None, 0)
        self._monitor.close()
        self._reader.close()
        self._network.release()

    def _received(self, parts: list[bytes]) -> None:
        if len(parts) == 1:
            self._events.received(parts[0])
        else:
            self._events.disconnected(f"a message of {len(parts)} parts")

    def _watched(self, parts: list[bytes]) -> None:
        news = parse_monitor_message(parts)
        event, value = int(news["event"]), int(news["value"])
        self._reader.drain()  # what the peer still said counts
        if not self._is_closed:
            was_never_there = event == zmq.EVENT_CLOSED
            lost = "cannot be reached" if was_never_there else "connection lost"
            self._events.disconnected(refused_us(event, value) or lost)


class RouterListener:
    """`endpoint.Listener`: every connection of one server."""

    def __init__(self, network: "ZmqNetwork", address: str, server: ServerEndpoint, ticker: Ticker) -> None:
        network.trust.check_bind(address)
        _refuse_taken_path(address)
        self._network = network
        self._server = server
        self._ticker = ticker
        self._is_closed = False
        context = network.acquire()
        self._sock = network.socket(context, zmq.ROUTER, address)
        self._sock.setsockopt(zmq.ROUTER_MANDATORY, 1)
        as_listener(self._sock, network.trust.keys)
        try:
            self._sock.bind(address)
        except zmq.ZMQError as error:
            self._sock.close(linger=0)
            network.release()
            raise _bind_error(address, error) from error
        self._address = self._sock.getsockopt_string(zmq.LAST_ENDPOINT)
        self._reader = SocketReader(self._sock, self._received)
        self._monitor = SocketReader(monitor_of(self._sock, context, REFUSALS), self._refused)

    @property
    def address(self) -> str:
        return self._address

    def send(self, peer: bytes, payload: bytes) -> None:
        if self._is_closed:
            raise PeerLostError("the server is closed")
        try:
            self._sock.send_multipart((peer, payload), zmq.NOBLOCK)
        except zmq.ZMQError as error:  # EHOSTUNREACH: the peer has gone
            raise PeerLostError("connection lost") from error
        self._reader.recheck()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._ticker.stop()
        self._sock.monitor(None, 0)
        self._monitor.close()
        self._reader.close()
        self._network.release()
        self._network.forget_server(self._server)

    def _received(self, parts: list[bytes]) -> None:
        if len(parts) == 2:
            self._server.received(parts[0], parts[1])
        else:
            self._server.disconnected(parts[0], f"a message of {len(parts)} parts")

    def _refused(self, parts: list[bytes]) -> None:
        news = parse_monitor_message(parts)
        log_stranger(int(news["event"]), int(news["value"]))


class ZmqNetwork:
    """`base.Network` over ZeroMQ. Its context lives while any of its sockets does."""

    def __init__(
        self, *, clock: Clock | None = None, times: LinkTimes | None = None, trust: Trust | None = None
    ) -> None:
        self.trust = trust or Trust()
        self._clock = clock or SystemClock()
        self._times = times or LinkTimes()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._doorkeeper: Doorkeeper | None = None
        self._num_users = 0
        self._clients: dict[ClientEndpoint, Ticker] = {}
        self._servers: dict[ServerEndpoint, None] = {}

    @classmethod
    def of(cls, links: LinkConfig) -> "ZmqNetwork":
        """As the settings say. ConfigError if the keys they name cannot be used."""
        times = LinkTimes(
            beat_s=links.beat_s,
            lost_after_s=links.lost_after_s,
            connect_timeout_s=0.75 * links.lost_after_s,
            accept_timeout_s=1.25 * links.lost_after_s,
        )
        return cls(times=times, trust=Trust.of(links))

    def client(self, *, node: NodeId, incarnation: Incarnation) -> ClientEndpoint:
        client = ClientEndpoint(
            node=node,
            incarnation=incarnation,
            dial=lambda address, events: DealerWire(self, address, events),
            clock=self._clock,
            times=self._times,
            arm=lambda due_s: ticker.arm(due_s),
            on_closed=lambda: self._forget_client(client),
        )
        ticker = self._clients[client] = Ticker(self._clock, client.tick, lambda: client.due_s)
        return client

    async def serve(
        self,
        address: str,
        handlers: Mapping[type[RequestBody], Handler],
        *,
        node: NodeId,
        incarnation: Incarnation,
    ) -> ServerEndpoint:
        server = ServerEndpoint(
            handlers,
            node=node,
            incarnation=incarnation,
            clock=self._clock,
            times=self._times,
            arm=lambda due_s: ticker.arm(due_s),
        )
        ticker = Ticker(self._clock, server.tick, lambda: server.due_s)
        server.attach(RouterListener(self, address, server, ticker))
        self._servers[server] = None
        return server

    async def close(self) -> None:
        """Close every client and server that is still open; leaves no thread, socket or descriptor."""
        for client in list(self._clients):
            await client.close()
        for server in list(self._servers):
            await server.close()

    # --- for its wires and listeners ------------------------------------------------------------------------

    def acquire(self) -> "zmq.Context[zmq.Socket[bytes]]":
        if self._context is None:
            self._context = zmq.Context()
            self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
            if self.trust.keys is not None:
                self._doorkeeper = Doorkeeper(self._context, self.trust.keys)
        self._num_users += 1
        return self._context

    def release(self) -> None:
        self._num_users -= 1
        if self._num_users == 0 and self._context is not None:
            if self._doorkeeper is not None:
                self._doorkeeper.close()
                self._doorkeeper = None
            self._context.term()  # every socket is closed and nothing lingers, so this does not wait
            self._context = None

    def socket(self, context: "zmq.Context[zmq.Socket[bytes]]", kind: int, address: str) -> "zmq.Socket[bytes]":
        sock = context.socket(kind)
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.SNDHWM, 0)  # at a mark libzmq would drop or block; lifecycles and Beats bound us
        sock.setsockopt(zmq.RCVHWM, 0)
        sock.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        sock.setsockopt(zmq.HANDSHAKE_IVL, int(self._times.connect_timeout_s * 1000))
        sock.setsockopt(zmq.TCP_MAXRT, int(self._times.lost_after_s * 1000))  # frees what a silent peer never takes
        sock.setsockopt(zmq.IPV6, int("[" in address))
        return sock

    def forget_server(self, server: ServerEndpoint) -> None:
        self._servers.pop(server, None)

    def _forget_client(self, client: ClientEndpoint) -> None:
        ticker = self._clients.pop(client, None)
        if ticker is not None:
            ticker.stop()


def _refuse_taken_path(address: str) -> None:
    """libzmq takes an ipc path from whoever listens there, so ask first. A dead process's path is free."""
    path = address.removeprefix("ipc://")
    if path == address or path.startswith("@"):
        return
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise ConfigError(f"cannot listen on {address!r}: {path} is a file; choose another path")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError:
            return
    raise _in_use(address)


def _bind_error(address: str, error: zmq.ZMQError) -> ConfigError:
    if error.errno == zmq.EADDRINUSE:
        return _in_use(address)
    return ConfigError(
        f"cannot listen on {address!r}: {os.strerror(error.errno or 0)}; "
        "an address of this host is expected, like tcp://127.0.0.1:7070 or ipc:///run/baton.sock"
    )


def _in_use(address: str) -> ConfigError:
    return ConfigError(
        f"cannot listen on {address!r}: it is in use; stop the process that holds it or choose another address "
        "(port 0 takes any free one)"
    )

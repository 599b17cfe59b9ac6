"""Calls inside one process, for tests: the same endpoints and the same encoded frames over wires with faults.

Time is the injected clock's. With a `ManualClock`, messages without delay arrive by themselves and everything
else (delays, Beats, deadlines) happens inside `await network.advance(seconds)`, in the order of its due time:
same seed, same history. A *process* is whatever carries one incarnation.
"""

import asyncio
from collections.abc import Mapping
from itertools import count
from math import inf

from common.clock import Clock, ManualClock
from common.errors import ConfigError, PeerLostError
from common.messages import Incarnation, NodeId, RequestBody
from common.rpc.base import Handler
from common.rpc.call import LinkTimes
from common.rpc.carrier import Carrier, Connection, Envelope, Faults, Process
from common.rpc.client import ClientEndpoint
from common.rpc.endpoint import Ticker, WireEvents
from common.rpc.server import ServerEndpoint

__all__ = ["Faults", "MemoryNetwork"]

_FIRST_PORT = 40_000
_BLIND_TURNS = 50  # on a loop that does not show whether anything is ready
_MOST_TURNS = 100_000


class MemoryWire:
    """`endpoint.Wire`. Without a connection nobody listens there."""

    def __init__(self, network: "MemoryNetwork", connection: Connection | None) -> None:
        self._network = network
        self._connection = connection

    def send(self, payload: bytes) -> None:
        if self._connection is None:
            return
        if not self._connection.is_open:
            raise PeerLostError("the connection is gone")
        self._network.carrier.carry(Envelope(self._connection, True, payload))

    def close(self) -> None:
        if self._connection is not None:
            self._network.disconnect(self._connection, to_server=True)


class MemoryListener:
    """`endpoint.Listener`."""

    def __init__(self, network: "MemoryNetwork", address: str, process: Process, server: ServerEndpoint) -> None:
        self._network = network
        self._address = address
        self.process = process
        self.server = server

    @property
    def address(self) -> str:
        return self._address

    def send(self, peer: bytes, payload: bytes) -> None:
        connection = self._network.connections.get(peer)
        if connection is None or not connection.is_open:
            raise PeerLostError("connection lost")
        self._network.carrier.carry(Envelope(connection, False, payload))

    def close(self) -> None:
        self._network.unlisten(self)


class MemoryNetwork:
    """`base.Network` in memory. Faults are drawn from `seed`."""

    def __init__(self, *, clock: Clock | None = None, times: LinkTimes | None = None, seed: int = 0) -> None:
        self.clock = clock or ManualClock()
        self.carrier = Carrier(self.clock, seed=seed, arm=self._arm)
        self.connections: dict[bytes, Connection] = {}
        self._times = times or LinkTimes()
        self._processes: dict[Incarnation, Process] = {}
        self._listeners: dict[str, MemoryListener] = {}
        self._ports = count(_FIRST_PORT)
        self._peers = count()
        # A clock that runs by itself needs a timer; a manual one is driven by `advance`.
        runs = not isinstance(self.clock, ManualClock)
        self._ticker = Ticker(self.clock, self._turn, lambda: self.due_s) if runs else None

    # --- base.Network -------------------------------------------------------------------------------------

    def client(self, *, node: NodeId, incarnation: Incarnation) -> ClientEndpoint:
        process = self._process(incarnation)
        client = ClientEndpoint(
            node=node,
            incarnation=incarnation,
            dial=lambda address, events: self._dial(process, address, events),
            clock=self.clock,
            times=self._times,
            arm=self._arm,
            on_closed=lambda: process.clients.remove(client) if client in process.clients else None,
        )
        process.clients.append(client)
        return client

    async def serve(
        self,
        address: str,
        handlers: Mapping[type[RequestBody], Handler],
        *,
        node: NodeId,
        incarnation: Incarnation,
    ) -> ServerEndpoint:
        scheme, _, rest = address.partition("://")
        if scheme not in ("tcp", "ipc") or not rest:
            raise ConfigError(f"cannot listen on {address!r}: tcp://host:port or ipc://path is expected")
        if scheme == "tcp" and rest.endswith((":0", ":*")):
            address = f"{address[:-1]}{next(self._ports)}"
        if address in self._listeners:
            raise ConfigError(f"cannot listen on {address!r}: it is in use; choose another address")
        process = self._process(incarnation)
        server = ServerEndpoint(
            handlers, node=node, incarnation=incarnation, clock=self.clock, times=self._times, arm=self._arm
        )
        self._listeners[address] = MemoryListener(self, address, process, server)
        server.attach(self._listeners[address])
        process.servers.append(server)
        return server

    async def close(self) -> None:
        """Close everything that is still open; what is under way is forgotten."""
        for process in list(self._processes.values()):
            for endpoint in process.endpoints:
                await endpoint.close()
        self.carrier.clear()
        self.connections.clear()
        if self._ticker is not None:
            self._ticker.stop()

    def listens(self, address: str) -> bool:
        """Whether a process that lives is to be called there."""
        return address in self._listeners

    # --- faults -------------------------------------------------------------------------------------------

    def set_faults(self, faults: Faults, *between: Incarnation) -> None:
        """Faults of the links between two processes, both ways; without any named, of all the others."""
        if between:
            self.carrier.pair_faults[frozenset(between)] = faults
        else:
            self.carrier.faults = faults

    def freeze(self, incarnation: Incarnation) -> None:
        """Its timers stand still, what it sends is held, what comes for it waits. (Its own tasks still run.)"""
        self._processes[incarnation].is_frozen = True

    def unfreeze(self, incarnation: Incarnation) -> None:
        self._processes[incarnation].is_frozen = False
        self.carrier.release_held()

    def partition(self, one: Incarnation, other: Incarnation) -> None:
        """Nothing passes between the two until `heal`, and nobody is told."""
        self.carrier.partitions[frozenset((one, other))] = None

    def heal(self, one: Incarnation, other: Incarnation) -> None:
        self.carrier.partitions.pop(frozenset((one, other)), None)
        self.carrier.release_held()

    def cut(self, one: Incarnation, other: Incarnation) -> None:
        """Break every link between the two: what is under way is lost, and both ends notice."""
        for connection in list(self.connections.values()):
            if connection.pair == {one, other}:
                self.carrier.lose(connection)
                self.disconnect(connection, to_server=True)
                self.carrier.end(connection, to_server=False, why="connection lost")

    def kill(self, victim: Incarnation | str, *, silently: bool = False) -> None:
        """End a process, named by its incarnation or an address it listens on, as kill -9 would.

        What it sent still arrives, then its peers see their connections break; with `silently` (a host
        that lost power) they do not. Its handlers are cancelled, for they run in our loop.
        """
        listener = self._listeners.get(victim)
        process = self._processes[Incarnation(victim)] if listener is None else listener.process
        process.is_dead = True
        for connection in list(self.connections.values()):
            if process not in (connection.client, connection.server):
                continue
            if silently:
                connection.is_open = False
            else:
                self.disconnect(connection, to_server=connection.client is process)
        for endpoint in process.endpoints:
            endpoint.abort("the process was killed")
        self._listeners = {a: found for a, found in self._listeners.items() if found.process is not process}

    # --- time ---------------------------------------------------------------------------------------------

    @property
    def due_s(self) -> float:
        """When something happens next."""
        return min(self.carrier.due_s, min((endpoint.due_s for endpoint in self._awake()), default=inf))

    async def advance(self, seconds: float) -> None:
        """Move a ManualClock on, stopping wherever something is due, and let the loop settle each time."""
        assert isinstance(self.clock, ManualClock), "only a manual clock can be advanced"
        end_s = self.clock.now_s() + seconds
        await self.settle()
        while self.due_s <= end_s:
            self.clock.advance(max(self.due_s - self.clock.now_s(), 0.0))
            self._turn(self.clock.now_s())
            await self.settle()
        self.clock.advance(max(end_s - self.clock.now_s(), 0.0))
        await self.settle()

    async def settle(self) -> None:
        """Let every task run until none is ready and no message is due."""
        ready = getattr(asyncio.get_running_loop(), "_ready", None)
        for turn in range(_MOST_TURNS):
            await asyncio.sleep(0)
            if not ready and not self.carrier.wake_is_due and (ready is not None or turn >= _BLIND_TURNS):
                return
        raise RuntimeError("the loop never settles: a task is always ready")

    def _turn(self, now_s: float) -> None:
        for endpoint in self._awake():
            if endpoint.due_s <= now_s:
                endpoint.tick(now_s)
        self.carrier.wake()

    def _awake(self) -> list[ClientEndpoint | ServerEndpoint]:
        awake = [process for process in self._processes.values() if not process.is_frozen and not process.is_dead]
        return [endpoint for process in awake for endpoint in process.endpoints]

    def _arm(self, due_s: float) -> None:
        if self._ticker is not None:
            self._ticker.arm(due_s)

    # --- for its wires and listeners ------------------------------------------------------------------------

    def disconnect(self, connection: Connection, *, to_server: bool) -> None:
        """One end gives the connection up; the other one is told. Idempotent."""
        self.connections.pop(connection.peer, None)
        if connection.is_open:
            self.carrier.end(connection, to_server=to_server, why="connection lost")

    def unlisten(self, listener: MemoryListener) -> None:
        if self._listeners.get(listener.address) is listener:
            del self._listeners[listener.address]
        for connection in list(self.connections.values()):
            if connection.endpoint is listener.server:
                self.disconnect(connection, to_server=False)
        if listener.server in listener.process.servers:
            listener.process.servers.remove(listener.server)

    def _dial(self, process: Process, address: str, events: WireEvents) -> MemoryWire:
        if "://" not in address:
            raise PeerLostError(f"cannot dial {address!r}: Invalid argument")
        listener = self._listeners.get(address)
        if listener is None:
            asyncio.get_running_loop().call_soon(events.disconnected, "cannot be reached")
            return MemoryWire(self, None)
        peer = str(next(self._peers)).encode()
        connection = Connection(peer, process, listener.process, events, listener.server)
        self.connections[peer] = connection
        return MemoryWire(self, connection)

    def _process(self, incarnation: Incarnation) -> Process:
        process = self._processes.setdefault(incarnation, Process(incarnation))
        assert not process.is_dead, "a killed process comes back as another incarnation"
        return process

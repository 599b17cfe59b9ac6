"""What moves messages between in-process endpoints (`memory`), late, twice, out of order, or not at all."""

import asyncio
import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from math import inf

from common.clock import Clock
from common.messages import Incarnation
from common.rpc.client import ClientEndpoint
from common.rpc.endpoint import WireEvents
from common.rpc.server import ServerEndpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What becomes of a message. `drop`, `duplicate` and `reorder` are probabilities.

    It arrives after `delay_s` plus up to `jitter_s`, behind those sent before it; a reordered one comes
    `late_s` later and others overtake it.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    late_s: float = 0.05


@dataclass(slots=True, eq=False)
class Process:
    """One incarnation: what runs in it, and what was done to it."""

    incarnation: Incarnation
    clients: list[ClientEndpoint] = field(default_factory=list)
    servers: list[ServerEndpoint] = field(default_factory=list)
    is_frozen: bool = False
    is_dead: bool = False

    @property
    def endpoints(self) -> list[ClientEndpoint | ServerEndpoint]:
        return [*self.clients, *self.servers]


@dataclass(slots=True, eq=False)
class Connection:
    """One link's wire. `arrivals_s` keeps order: the newest due time per direction (to the client, to the server)."""

    peer: bytes
    client: Process
    server: Process
    events: WireEvents
    endpoint: ServerEndpoint
    is_open: bool = True
    arrivals_s: list[float] = field(default_factory=lambda: [-inf, -inf])

    @property
    def pair(self) -> frozenset[Incarnation]:
        return frozenset((self.client.incarnation, self.server.incarnation))


@dataclass(slots=True, eq=False)
class Envelope:
    """A message under way; `payload` None is the end of the connection, with its reason."""

    connection: Connection
    to_server: bool
    payload: bytes | None
    why: str = ""
    sender_slept: bool = False

    @property
    def sender(self) -> Process:
        return self.connection.client if self.to_server else self.connection.server

    @property
    def receiver(self) -> Process:
        return self.connection.server if self.to_server else self.connection.client

    def arrive(self) -> None:
        connection = self.connection
        if self.receiver.is_dead:
            return
        if self.to_server and self.payload is None:
            connection.endpoint.disconnected(connection.peer, self.why)
        elif self.to_server and self.payload is not None:
            connection.endpoint.received(connection.peer, self.payload)
        elif self.payload is None:
            connection.events.disconnected(self.why)
        else:
            connection.events.received(self.payload)


class Carrier:
    """Messages under way, in the order of their due times. Those with no delay arrive in the loop's next turn."""

    def __init__(self, clock: Clock, *, seed: int, arm: Callable[[float], None]) -> None:
        self.faults = Faults()
        self.pair_faults: dict[frozenset[Incarnation], Faults] = {}
        self.partitions: dict[frozenset[Incarnation], None] = {}
        self.wake_is_due = False
        self._clock = clock
        self._random = random.Random(seed)
        self._arm = arm
        self._under_way: list[tuple[float, int, Envelope]] = []
        self._held: list[tuple[float, int, Envelope]] = []
        self._order = count()

    @property
    def due_s(self) -> float:
        return self._under_way[0][0] if self._under_way else inf

    def carry(self, envelope: Envelope) -> None:
        connection, side = envelope.connection, envelope.to_server
        faults = self.pair_faults.get(connection.pair, self.faults)
        envelope.sender_slept = envelope.sender.is_frozen
        for _ in range(1 + (self._random.random() < faults.duplicate)):
            if self._random.random() < faults.drop:
                continue
            due_s = self._clock.now_s() + faults.delay_s + self._random.random() * faults.jitter_s
            if self._random.random() < faults.reorder:
                due_s += faults.late_s
            else:
                due_s = connection.arrivals_s[side] = max(due_s, connection.arrivals_s[side])
            self._push(due_s, envelope)

    def end(self, connection: Connection, *, to_server: bool, why: str) -> None:
        """One side's end of the connection is gone; the other learns it after what was sent before."""
        connection.is_open = False
        due_s = max(self._clock.now_s(), connection.arrivals_s[to_server])
        self._push(due_s, Envelope(connection, to_server, None, why))

    def lose(self, connection: Connection) -> None:
        """Forget what is under way on a connection."""
        self._under_way = [entry for entry in self._under_way if entry[2].connection is not connection]
        heapq.heapify(self._under_way)
        self._held = [entry for entry in self._held if entry[2].connection is not connection]

    def clear(self) -> None:
        self._under_way.clear()
        self._held.clear()

    def release_held(self) -> None:
        """Some process woke up or some partition healed: look at what waits again."""
        held, self._held = self._held, []
        for entry in held:
            heapq.heappush(self._under_way, entry)
        self.wake()

    def wake(self) -> None:
        if not self.wake_is_due:
            self.wake_is_due = True
            asyncio.get_running_loop().call_soon(self._deliver)

    def _push(self, due_s: float, envelope: Envelope) -> None:
        heapq.heappush(self._under_way, (due_s, next(self._order), envelope))
        if due_s <= self._clock.now_s():
            self.wake()
        else:
            self._arm(due_s)

    def _deliver(self) -> None:
        self.wake_is_due = False
        while self.due_s <= self._clock.now_s():
            entry = heapq.heappop(self._under_way)
            if self._is_held(entry[2]):
                self._held.append(entry)
            else:
                entry[2].arrive()

    def _is_held(self, envelope: Envelope) -> bool:
        slept = envelope.sender_slept and envelope.sender.is_frozen
        return slept or envelope.receiver.is_frozen or envelope.connection.pair in self.partitions

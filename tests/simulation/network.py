"""The in-memory network, with every process's part of the work done in that process (`virtual_time`)."""

import asyncio
import heapq
from collections.abc import Mapping
from contextvars import Context
from typing import TypeVar

from common.messages import Incarnation, NodeId, RequestBody
from common.rpc.base import Handler
from common.rpc.call import LinkTimes
from common.rpc.carrier import Carrier, Envelope, Faults, Process
from common.rpc.client import ClientEndpoint
from common.rpc.endpoint import Ticker
from common.rpc.memory import MemoryNetwork
from common.rpc.server import ServerEndpoint
from tests.simulation.virtual_time import PROCESS, VirtualLoop

_NO_FAULTS = Faults()
_OUTSIDE = Context()
E = TypeVar("E", ClientEndpoint, ServerEndpoint)


class SimulatedCarrier(Carrier):
    """The wire goes on while processes sleep. What arrives is the receiver's work."""

    num_arrived = 0

    def carry(self, envelope: Envelope) -> None:
        if self.pair_faults or self.faults != _NO_FAULTS:
            super().carry(envelope)
            return
        connection, side = envelope.connection, envelope.to_server
        envelope.sender_slept = envelope.sender.is_frozen
        due_s = connection.arrivals_s[side] = max(self._clock.now_s(), connection.arrivals_s[side])
        self._push(due_s, envelope)

    def wake(self) -> None:
        if not self.wake_is_due:
            self.wake_is_due = True
            asyncio.get_running_loop().call_soon(self._deliver, context=_OUTSIDE)

    def _deliver(self) -> None:
        self.wake_is_due = False
        while self.due_s <= self._clock.now_s():
            entry = heapq.heappop(self._under_way)
            if self._is_held(entry[2]):
                self._held.append(entry)
                continue
            self.num_arrived += 1
            outside = PROCESS.set(entry[2].receiver)
            try:
                entry[2].arrive()
            finally:
                PROCESS.reset(outside)


class SimulatedNetwork(MemoryNetwork):
    """Each endpoint has a timer in its own process, so that it stands still with it."""

    def __init__(self, *, loop: VirtualLoop, times: LinkTimes, seed: int) -> None:
        super().__init__(clock=loop, times=times, seed=seed)
        self._loop = loop
        self.carrier = SimulatedCarrier(loop, seed=seed, arm=self._deliver_at)

    def client(self, *, node: NodeId, incarnation: Incarnation) -> ClientEndpoint:
        return self._ticking(super().client(node=node, incarnation=incarnation))

    async def serve(
        self,
        address: str,
        handlers: Mapping[type[RequestBody], Handler],
        *,
        node: NodeId,
        incarnation: Incarnation,
    ) -> ServerEndpoint:
        return self._ticking(await super().serve(address, handlers, node=node, incarnation=incarnation))

    @property
    def num_arrived(self) -> int:
        """Messages, and ends of connections."""
        assert isinstance(self.carrier, SimulatedCarrier)
        return self.carrier.num_arrived

    def process(self, incarnation: Incarnation) -> Process:
        return self._process(incarnation)

    def process_or_none(self, incarnation: Incarnation) -> Process | None:
        return self._processes.get(incarnation)

    def forget(self, incarnation: Incarnation) -> None:
        """A process that ended by itself."""
        self._processes.pop(incarnation, None)

    def thaw(self, process: Process) -> None:
        self.unfreeze(process.incarnation)
        self._loop.resume(process)

    def half_cut(self, one: Incarnation, other: Incarnation) -> None:
        """Break every link between the two. The callee notices; the caller does when it next sends."""
        for connection in list(self.connections.values()):
            if connection.pair == {one, other}:
                self.carrier.lose(connection)
                self.disconnect(connection, to_server=True)

    def half_open(self, one: Incarnation, other: Incarnation) -> None:
        """The callee loses every link between the two, and nothing that it says reaches the caller for now."""
        self.set_faults(Faults(drop=1.0), one, other)
        for connection in list(self.connections.values()):
            if connection.pair == {one, other}:
                caller = PROCESS.set(connection.server)
                try:
                    connection.endpoint.disconnected(connection.peer, "connection lost")
                finally:
                    PROCESS.reset(caller)

    def is_cut_off(self, one: Incarnation, other: Incarnation) -> bool:
        return frozenset((one, other)) in self.carrier.partitions

    def heal_all(self) -> None:
        self.carrier.partitions.clear()
        self.carrier.pair_faults.clear()
        self.carrier.release_held()

    def _ticking(self, endpoint: E) -> E:
        endpoint.arm = Ticker(self._loop, endpoint.tick, lambda: endpoint.due_s).arm
        return endpoint

    def _deliver_at(self, due_s: float) -> None:
        self._loop.call_at(due_s, self.carrier.wake, context=_OUTSIDE)

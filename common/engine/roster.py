"""Who runs and who waits, each in the order of their turns. Pure.

waiting: neither place nor blocks      ready: blocks (a lease's), no place      running: both
"""

from bisect import insort
from collections.abc import Iterator
from operator import attrgetter

from common.engine.request import EngineRequest, Status
from common.messages import BlockId, RequestId

_by_turn = attrgetter("turn")


class Roster:
    """Every request of a scheduler, by id and by what it has. Keeps places and status, touches no block."""

    def __init__(self, max_running: int) -> None:
        self.max_running = max_running
        self.requests: dict[RequestId, EngineRequest] = {}
        self.running: list[EngineRequest] = []
        self.ready: list[EngineRequest] = []
        self.waiting: dict[RequestId, EngineRequest] = {}
        """Their order is the scheduler's business (`fair`)."""

    @property
    def full(self) -> bool:
        return len(self.running) >= self.max_running

    def add(self, request: EngineRequest) -> None:
        """With blocks, or a share of one, it is ready, else it waits."""
        request.status = Status.WAITING
        self.requests[request.id] = request
        if request.held_blocks:
            insort(self.ready, request, key=_by_turn)
        else:
            self.waiting[request.id] = request

    def seat_ready(self) -> None:
        while self.ready and not self.full:
            self._seat(self.ready.pop(0))

    def seat_waiting(self, request: EngineRequest) -> None:
        """One that waits takes a place; its blocks are the caller's to give."""
        del self.waiting[request.id]
        self._seat(request)

    def latest_after(self, request: EngineRequest) -> EngineRequest | None:
        """Whose blocks `request`, which runs, may take: one that only waits for a place, else one of a later turn.

        Never one with `keep_blocks`: its blocks are promised.
        """
        for other in reversed(self.ready):
            if not other.keep_blocks:
                return other
        for other in reversed(self.running):
            if other is request:
                return None
            if not other.keep_blocks:
                return other
        return None

    def send_back(self, request: EngineRequest) -> None:
        """To the waiting; its blocks are gone already."""
        (self.running if request.status is Status.RUNNING else self.ready).remove(request)
        request.status = Status.WAITING
        self.waiting[request.id] = request

    def remove(self, request: EngineRequest) -> None:
        """For good, its blocks still in its table."""
        del self.requests[request.id]
        if request.status is Status.RUNNING:
            self.running.remove(request)
        elif self.waiting.pop(request.id, None) is None:
            self.ready.remove(request)
        request.status = Status.ENDED

    def _seat(self, request: EngineRequest) -> None:
        request.status = Status.RUNNING
        insort(self.running, request, key=_by_turn)

    def held(self) -> Iterator[tuple[str, RequestId, list[BlockId]]]:
        """As `Scheduler.held`."""
        for kind, requests in (("running", self.running), ("ready", self.ready), ("waiting", [*self.waiting.values()])):
            yield from ((kind, request.id, request.held_blocks) for request in requests)

    def check_invariants(self) -> None:
        queues = (self.running, self.ready, list(self.waiting.values()))
        assert sorted(map(id, self.requests.values())) == sorted(id(one) for queue in queues for one in queue)
        for queue in (self.running, self.ready):
            turns = [request.turn for request in queue]
            assert turns == sorted(set(turns)), "out of order"
        assert len(self.running) <= self.max_running
        assert all(request.status is Status.RUNNING for request in self.running)
        assert all(request.status is Status.WAITING and request.held_blocks for request in self.ready)
        assert all(request.num_computed < len(request.tokens) for request in self.requests.values())
        for request in self.waiting.values():
            assert request.status is Status.WAITING
            assert not request.held_blocks
            assert request.num_computed == 0

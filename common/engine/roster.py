"""Who runs and who waits, each in order of arrival. Pure.

waiting: neither place nor blocks      ready: blocks (a lease's), no place      running: both
"""

from bisect import insort
from collections import deque
from operator import attrgetter

from common.engine.request import EngineRequest, Status
from common.messages import RequestId

_by_arrival = attrgetter("arrival")


class Roster:
    """Every request of a scheduler, by id and by what it has. Keeps places and status, touches no block."""

    def __init__(self, max_running: int) -> None:
        self.max_running = max_running
        self.requests: dict[RequestId, EngineRequest] = {}
        self.running: list[EngineRequest] = []
        self.ready: list[EngineRequest] = []
        self.waiting: deque[EngineRequest] = deque()

    @property
    def full(self) -> bool:
        return len(self.running) >= self.max_running

    def add(self, request: EngineRequest) -> None:
        """With blocks it is ready, else it waits."""
        request.status = Status.WAITING
        self.requests[request.id] = request
        insort(self.ready if request.blocks else self.waiting, request, key=_by_arrival)

    def seat_ready(self) -> None:
        while self.ready and not self.full:
            self._seat(self.ready.pop(0))

    def seat_waiting(self) -> EngineRequest:
        """The one that waits longest takes a place; its blocks are the caller's to give."""
        request = self.waiting.popleft()
        self._seat(request)
        return request

    def latest_after(self, request: EngineRequest) -> EngineRequest | None:
        """Whose blocks `request`, which runs, may take: one that only waits for a place, else one that came later.

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
        insort(self.waiting, request, key=_by_arrival)

    def remove(self, request: EngineRequest) -> None:
        """For good, its blocks still in its table."""
        del self.requests[request.id]
        if request.status is Status.RUNNING:
            self.running.remove(request)
        elif request.blocks:
            self.ready.remove(request)
        else:
            self.waiting.remove(request)
        request.status = Status.ENDED

    def _seat(self, request: EngineRequest) -> None:
        request.status = Status.RUNNING
        insort(self.running, request, key=_by_arrival)

    def check_invariants(self) -> None:
        queues = (self.running, self.ready, list(self.waiting))
        assert sorted(map(id, self.requests.values())) == sorted(id(one) for queue in queues for one in queue)
        for queue in queues:
            arrivals = [request.arrival for request in queue]
            assert arrivals == sorted(set(arrivals)), "out of order"
        assert len(self.running) <= self.max_running
        assert all(request.status is Status.RUNNING for request in self.running)
        assert all(request.status is Status.WAITING and request.blocks for request in self.ready)
        for request in self.waiting:
            assert request.status is Status.WAITING
            assert not request.blocks
            assert request.num_computed == 0

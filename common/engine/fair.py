"""Who is next where requests wait for blocks, and whose prompts a step computes. Pure.

    add ──> class ──> tenant ──> arrival ──┐
    put_back ──> turn ─────────────────────┴──> first

Whoever has had least goes first: among the priority classes that wait, then among the tenants of that class, then
by arrival. With one class and one tenant that is the order of arrival, whatever was served.

1. A meter for each class, and in it for each tenant, counts what was served (`charge`): tokens computed for prompts,
   tokens reserved room for. What a cache had costs nothing.
2. A token counts 1 on the meter of class high, 4 of normal, 16 of low: of two classes that always wait, the higher
   has four times as much. So nobody starves, and no flood of one class drowns another.
3. Who had nothing waiting has saved nothing up: its meter moves to where that of the last one served stood before it
   was served (start-time fair queueing: Goyal, Vin and Cheng, 1996). A newcomer is ahead of whoever was just served,
   and of two tenants that always wait neither gets ahead by more than was charged at once.
4. A class that had nothing waiting also begins behind, by `HEAD_START_TOKENS` more than the class high: it lets higher
   ones pass first, but waits for no more than about 4 (normal) or 16 (low) times that of them.
5. What has had its turn already and lost its blocks (`put_back`) comes before all others, by its turn.
"""

from bisect import insort
from typing import Generic, TypeVar

from common.messages import Origin, Priority, RequestId

Key = TypeVar("Key")
Rank = tuple[int, int, int]

_WEIGHTS = {Priority.HIGH: 1, Priority.NORMAL: 4, Priority.LOW: 16}
_CLASSES = {priority: place for place, priority in enumerate(_WEIGHTS)}
HEAD_START_TOKENS = 512
"""About one step."""


class Meters(Generic[Key]):
    """What each of several was served. One integer for everybody ever charged; tenants are few."""

    def __init__(self) -> None:
        self._served: dict[Key, int] = {}
        self._now = 0
        """Where the meter of the last one served stood before."""

    def enter(self, key: Key, *, behind: int = 0) -> None:
        """Rules 3 and 4, for one that had nothing waiting."""
        self._served[key] = max(self.served(key), self._now + behind)

    def served(self, key: Key) -> int:
        return self._served.get(key, 0)

    def charge(self, key: Key, amount: int) -> None:
        before = self.served(key)
        self._now = max(self._now, before)
        self._served[key] = before + amount


class FairQueue:
    """Ids that wait for blocks, each under its origin. Knows nothing of what they are."""

    def __init__(self) -> None:
        self._origins: dict[RequestId, Origin] = {}
        self._returned: list[tuple[int, RequestId]] = []
        self._waiting: dict[Priority, dict[bytes, dict[RequestId, None]]] = {}  # nothing in it is empty
        self._classes: Meters[Priority] = Meters()
        self._tenants: dict[Priority, Meters[bytes]] = {priority: Meters() for priority in Priority}

    def __len__(self) -> int:
        return len(self._origins)

    def add(self, id: RequestId, origin: Origin) -> None:
        """At the end of its tenant's."""
        assert id not in self._origins
        self._origins[id] = origin
        priority, tenant = origin.priority, origin.tenant
        if priority not in self._waiting:
            self._classes.enter(priority, behind=(_WEIGHTS[priority] - 1) * HEAD_START_TOKENS)
        tenants = self._waiting.setdefault(priority, {})
        if tenant not in tenants:
            self._tenants[priority].enter(tenant)
        tenants.setdefault(tenant, {})[id] = None

    def put_back(self, id: RequestId, origin: Origin, *, turn: int) -> None:
        assert id not in self._origins
        self._origins[id] = origin
        insort(self._returned, (turn, id))

    def remove(self, id: RequestId) -> None:
        """It has its blocks, or wants none any more. No-op if it does not wait."""
        origin = self._origins.pop(id, None)
        if origin is None:
            return
        tenants = self._waiting.get(origin.priority, {})
        ids = tenants.get(origin.tenant, {})
        if id not in ids:
            self._returned = [entry for entry in self._returned if entry[1] != id]
            return
        del ids[id]
        if not ids:
            del tenants[origin.tenant]
        if not tenants:
            del self._waiting[origin.priority]

    @property
    def ids(self) -> list[RequestId]:
        return list(self._origins)

    def origin(self, id: RequestId) -> Origin:
        return self._origins[id]

    @property
    def first(self) -> RequestId | None:
        """Who is to have blocks next; None if nobody waits."""
        if self._returned:
            return self._returned[0][1]
        if not self._waiting:
            return None
        priority = min(self._waiting, key=self._class_rank)
        tenants = self._waiting[priority]
        return next(iter(tenants[min(tenants, key=self._tenants[priority].served)]))

    def rank(self, origin: Origin) -> Rank:
        """Lower goes first."""
        return *self._class_rank(origin.priority), self._tenants[origin.priority].served(origin.tenant)

    def charge(self, origin: Origin, num_tokens: int) -> None:
        """So many were served to this class and tenant."""
        self._classes.charge(origin.priority, num_tokens * _WEIGHTS[origin.priority])
        self._tenants[origin.priority].charge(origin.tenant, num_tokens)

    def _class_rank(self, priority: Priority) -> tuple[int, int]:
        return self._classes.served(priority), _CLASSES[priority]

    def check_invariants(self) -> None:
        waiting = {
            id: Origin(tenant, priority)
            for priority, tenants in self._waiting.items()
            for tenant, ids in tenants.items()
            for id in ids
        }
        assert all(tenants and all(tenants.values()) for tenants in self._waiting.values()), "an empty one is kept"
        assert self._returned == sorted(self._returned)
        returned = {id: self._origins[id] for _, id in self._returned}
        assert waiting | returned == self._origins and len(waiting) + len(returned) == len(self._origins)

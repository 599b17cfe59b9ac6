"""Who is next where requests wait for blocks, and whose prompts a step computes. Pure.

    add ──> class ──> tenant ──> policy ──┐
    put_back ──> turn ────────────────────┴──> first

Whoever has had least goes first: among the priority classes that wait, then among the tenants of that class, then
as the policy orders that tenant's (`policy`). With one class, one tenant and the policy fcfs that is the order of
arrival, whatever was served.

1. A meter for each class, and in it for each tenant, counts what was served (`charge`): tokens computed for prompts,
   tokens reserved room for. What a cache had costs nothing.
2. A token counts 1 on the meter of class high, 4 of normal, 16 of low: of two classes that always wait, the higher
   has four times as much. So nobody starves, and no flood of one class drowns another. Under the policy `priority`
   it is 1, 16 and 256: a higher class goes first but for a sixteenth, which keeps the lower one from starving.
3. Who had nothing waiting has saved nothing up: its meter moves to where that of the last one served stood before it
   was served (start-time fair queueing: Goyal, Vin and Cheng, 1996). A newcomer is ahead of whoever was just served,
   and of two tenants that always wait neither gets ahead by more than was charged at once.
4. A class that had nothing waiting also begins behind, by `HEAD_START_TOKENS` more than the class high: it lets higher
   ones pass first, but waits for no more than about 4 (normal) or 16 (low) times that of them (`priority`: 16 or 256).
5. What has had its turn already and lost its blocks (`put_back`) comes before all others, by its turn.
"""

from bisect import insort
from typing import Generic, TypeVar

from common.engine.policy import Line, Policy, Ticket
from common.messages import Origin, Priority, RequestId

Key = TypeVar("Key")
Rank = tuple[int, int, int]

_SHARES = {Priority.HIGH: 1, Priority.NORMAL: 4, Priority.LOW: 16}
_STRICT = {Priority.HIGH: 1, Priority.NORMAL: 16, Priority.LOW: 256}
_CLASSES = {priority: place for place, priority in enumerate(_SHARES)}
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

    def __init__(self, policy: Policy = "fcfs") -> None:
        self._weights = _STRICT if policy == "priority" else _SHARES
        self._origins: dict[RequestId, Origin] = {}
        self._returned: list[tuple[int, RequestId]] = []
        self._waiting: dict[Priority, dict[bytes, Line]] = {}  # nothing in it is empty
        self._classes: Meters[Priority] = Meters()
        self._tenants: dict[Priority, Meters[bytes]] = {priority: Meters() for priority in Priority}

    def __len__(self) -> int:
        return len(self._origins)

    def add(self, id: RequestId, origin: Origin, ticket: Ticket | None = None) -> None:
        """Into its tenant's line, by its ticket; at the end without one."""
        assert id not in self._origins
        self._origins[id] = origin
        priority, tenant = origin.priority, origin.tenant
        if priority not in self._waiting:
            self._classes.enter(priority, behind=(self._weights[priority] - 1) * HEAD_START_TOKENS)
        tenants = self._waiting.setdefault(priority, {})
        if tenant not in tenants:
            self._tenants[priority].enter(tenant)
        tenants.setdefault(tenant, Line()).add(id, ticket or Ticket())

    def put_back(self, id: RequestId, origin: Origin, *, turn: int) -> None:
        assert id not in self._origins
        self._origins[id] = origin
        insort(self._returned, (turn, id))

    def serve(self, id: RequestId) -> None:
        """It has its blocks."""
        line = self._line(id)
        if line is not None:
            line.serve(id)
        self._forget(id, line)

    def remove(self, id: RequestId) -> None:
        """It wants no blocks any more. No-op if it does not wait."""
        if id in self._origins:
            line = self._line(id)
            if line is not None:
                line.remove(id)
            self._forget(id, line)

    def _line(self, id: RequestId) -> Line | None:
        """The line that it stands in; none if it came back."""
        origin = self._origins[id]
        line = self._waiting.get(origin.priority, {}).get(origin.tenant)
        return line if line is not None and id in line else None

    def _forget(self, id: RequestId, line: Line | None) -> None:
        origin = self._origins.pop(id)
        if line is None:
            self._returned = [entry for entry in self._returned if entry[1] != id]
        elif not line:
            del self._waiting[origin.priority][origin.tenant]
            if not self._waiting[origin.priority]:
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
        return tenants[min(tenants, key=self._tenants[priority].served)].first

    def rank(self, origin: Origin) -> Rank:
        """Lower goes first."""
        return *self._class_rank(origin.priority), self._tenants[origin.priority].served(origin.tenant)

    def charge(self, origin: Origin, num_tokens: int) -> None:
        """So many were served to this class and tenant."""
        self._classes.charge(origin.priority, num_tokens * self._weights[origin.priority])
        self._tenants[origin.priority].charge(origin.tenant, num_tokens)

    def _class_rank(self, priority: Priority) -> tuple[int, int]:
        return self._classes.served(priority), _CLASSES[priority]

    def check_invariants(self) -> None:
        waiting = {
            id: Origin(tenant, priority)
            for priority, tenants in self._waiting.items()
            for tenant, line in tenants.items()
            for id in line.ids
        }
        for line in (line for tenants in self._waiting.values() for line in tenants.values()):
            line.check_invariants()
        assert all(tenants and all(tenants.values()) for tenants in self._waiting.values()), "an empty one is kept"
        assert self._returned == sorted(self._returned)
        returned = {id: self._origins[id] for _, id in self._returned}
        assert waiting | returned == self._origins and len(waiting) + len(returned) == len(self._origins)

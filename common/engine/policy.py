"""In what order the requests of one tenant and class are served. Pure: no clock, waiting is counted in tokens.

    fcfs       by arrival
    shortest   fewest tokens to compute first
    deadline   earliest deadline first, those without one behind all that have one
    priority   by arrival; what it changes is how far a class goes before another (`fair`)

1. A policy orders one line: one tenant's requests of one class. What tenants get of each other is not its business.
2. Equal urgency goes by arrival.
3. Nobody starves. Whoever came later and goes first has passed those that it left behind, by all its tokens. A
   request lets `patience(its tokens)` pass; from then on it is aged: before all that are not, by arrival. So
   later comers pass it by less than its patience and one prompt of theirs, however many they are.
4. That goes on while it runs: a prompt that is computed in many steps is passed by those that take its place in one.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass
from math import inf
from typing import Literal

from common.messages import RequestId

Policy = Literal["fcfs", "shortest", "priority", "deadline"]

LEAST_PATIENCE_TOKENS = 8192
"""About sixteen steps."""
_PATIENCE = 4
"""Times its own length: who asks for more can wait for more."""


def patience(num_tokens: int) -> int:
    """Tokens of later comers that a request of so many lets pass."""
    return max(LEAST_PATIENCE_TOKENS, _PATIENCE * num_tokens)


@dataclass(slots=True, eq=False)
class Ticket:
    """What a request shows in line: lower `urgency` goes first, `num_tokens` is what it takes when it is served."""

    urgency: float = 0.0
    num_tokens: int = 0
    patience: float = inf
    passed: int = 0
    """Tokens of later comers that went first."""

    @property
    def is_aged(self) -> bool:
        return self.passed >= self.patience


def ticket(policy: Policy, *, num_tokens: int, deadline_s: float) -> Ticket:
    """For a request that has so many tokens to compute (or to make room for)."""
    urgency = {"shortest": float(num_tokens), "deadline": deadline_s}.get(policy, 0.0)
    return Ticket(urgency, num_tokens, patience(num_tokens))


class Line:
    """Those of one tenant and class that wait."""

    def __init__(self) -> None:
        self._tickets: dict[RequestId, tuple[int, Ticket]] = {}  # by arrival
        self._order: list[tuple[float, int, RequestId]] = []  # those that are not aged, the next one first
        self._aged: list[tuple[int, RequestId]] = []
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, id: RequestId) -> bool:
        return id in self._tickets

    @property
    def ids(self) -> list[RequestId]:
        return list(self._tickets)

    @property
    def first(self) -> RequestId:
        return self._aged[0][1] if self._aged else self._order[0][2]

    def add(self, id: RequestId, ticket: Ticket) -> None:
        self._arrivals += 1
        self._tickets[id] = self._arrivals, ticket
        self._place(id, self._arrivals, ticket)

    def remove(self, id: RequestId) -> Ticket:
        """It leaves without having been served."""
        arrival, ticket = self._tickets.pop(id)
        self._unplace(id, arrival, ticket)
        return ticket

    def serve(self, id: RequestId) -> None:
        """It leaves for its blocks, past all that came earlier (rule 3)."""
        passing = self._tickets[id][1].num_tokens
        for other, (arrival, ticket) in self._tickets.items():
            if other == id:
                break
            was_aged = ticket.is_aged
            ticket.passed += passing
            if ticket.is_aged and not was_aged:
                self._order.remove((ticket.urgency, arrival, other))
                self._place(other, arrival, ticket)
        self.remove(id)

    def _place(self, id: RequestId, arrival: int, ticket: Ticket) -> None:
        if ticket.is_aged:
            insort(self._aged, (arrival, id))
        else:
            insort(self._order, (ticket.urgency, arrival, id))

    def _unplace(self, id: RequestId, arrival: int, ticket: Ticket) -> None:
        if ticket.is_aged:
            self._aged.remove((arrival, id))
        else:
            del self._order[bisect_left(self._order, (ticket.urgency, arrival, id))]

    def check_invariants(self) -> None:
        placed = [*((arrival, id) for _, arrival, id in self._order), *self._aged]
        assert sorted(placed) == sorted((arrival, id) for id, (arrival, _) in self._tickets.items())
        assert self._order == sorted(self._order) and self._aged == sorted(self._aged)
        assert all(self._tickets[id][1].is_aged for _, id in self._aged)
        assert not any(self._tickets[id][1].is_aged for _, _, id in self._order)

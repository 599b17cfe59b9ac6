"""Running prompts in the order in which a step computes them, and who passes whom in it. Pure.

Between flows (a tenant's requests of one class) `fair` decides, within one the policy.
"""

from collections.abc import Callable, Iterable
from math import inf

from common.engine.fair import Rank
from common.engine.policy import Policy
from common.engine.request import EngineRequest
from common.messages import Origin

Place = tuple[int, float, float]


class RunningPrompts:
    """Those that the step has given nothing yet."""

    def __init__(self, policy: Policy, requests: Iterable[EngineRequest]) -> None:
        self._flows: dict[Origin, list[EngineRequest]] = {}
        for request in requests:
            if policy == "shortest":
                request.ticket.urgency = request.num_uncomputed
            self._flows.setdefault(request.origin, []).append(request)
        if policy != "fcfs":
            for flow in self._flows.values():
                flow.sort(key=_place)

    def head(self, rank: Callable[[Origin], Rank]) -> EngineRequest | None:
        """Who goes first of those that run."""
        least = min(self._flows, key=rank, default=None)
        return None if least is None else self._flows[least][0]

    def take(self, request: EngineRequest) -> None:
        """The head of its flow has its chunk."""
        flow = self._flows[request.origin]
        assert flow.pop(0) is request
        if not flow:
            del self._flows[request.origin]

    def pass_by(self, request: EngineRequest, num_tokens: int) -> None:
        """`request` had so many tokens of the step before those that are left: rule 4 of `policy`."""
        for other in self._flows.get(request.origin, ()):
            if other.turn < request.turn:
                other.ticket.passed += num_tokens


def goes_before(waiting: EngineRequest, running: EngineRequest | None, rank: Callable[[Origin], Rank]) -> bool:
    """Whether the first of all that wait is to be admitted before the head of those that run has its chunk."""
    if running is None:
        return True
    if waiting.origin != running.origin:
        return rank(waiting.origin) < rank(running.origin)
    return _place(waiting) < _place(running)


def _place(request: EngineRequest) -> Place:
    turn = inf if request.is_waiting else request.turn
    return (0, turn, 0) if request.ticket.is_aged else (1, request.ticket.urgency, turn)

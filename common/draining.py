"""Taking a node out of service without losing a request: no new work, and what runs moves or finishes.

    SERVING ──Drain──> DRAINING ──nothing left──> drained: the process may end
       ^                  │  └──timeout_s──> what is left is evicted
       └──the Drain call ends early──┘

Draining belongs to the Drain call like everything else belongs to a call: whoever gives it up, and so ends it
before the node is empty, has the node back in service. What had moved by then has moved.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from common import telemetry
from common.clock import Clock
from common.errors import MovedError, UnavailableError
from common.messages import Drain, DrainProgress, NodeId
from common.rpc.base import IncomingCall

log = telemetry.logger(__name__)


class Work(Protocol):
    """One call that a node works on."""

    def leave(self) -> None:
        """The node is being drained: go on elsewhere if that can be had, else finish."""
        ...

    def evict(self) -> None:
        """The time is over: end with MovedError, now."""
        ...


class Draining:
    """Counts a node's work, and ends it when asked to. Belongs to the event loop."""

    def __init__(self, node: NodeId, clock: Clock) -> None:
        self._node = node
        self._clock = clock
        self._work: dict[Work, None] = {}
        self._changed = asyncio.Event()
        self.is_draining = False
        self.drained = asyncio.Event()
        """Set when a Drain call has run to its end: the process may go."""

    @contextmanager
    def admitted(self, work: Work) -> Iterator[None]:
        """Count `work` while inside. MovedError if the node takes no more."""
        if self.is_draining:
            raise MovedError(f"{self._node} is being drained")
        self._work[work] = None
        try:
            yield
        finally:
            del self._work[work]
            self._changed.set()

    async def drain(self, call: IncomingCall) -> None:
        """The handler of Drain. Ends well when nothing is left; UnavailableError if somebody drains it already."""
        assert isinstance(call.body, Drain)
        if self.is_draining:
            raise UnavailableError(f"{self._node} is being drained already")
        self.is_draining = True
        log.info("draining", calls=len(self._work), timeout_s=call.body.timeout_s)
        try:
            for work in list(self._work):
                work.leave()
            await self._empty(call, until_s=self._clock.now_s() + call.body.timeout_s)
            log.info("drained")
            self.drained.set()
        finally:
            self.is_draining = self.drained.is_set()

    async def _empty(self, call: IncomingCall, *, until_s: float) -> None:
        num_evicted = 0
        while self._work:
            call.send(DrainProgress(num_calls=len(self._work), num_evicted=num_evicted))
            left_s = until_s - self._clock.now_s()
            if left_s <= 0 and not num_evicted:
                num_evicted = len(self._work)
                log.warning("drain timeout", evicted=num_evicted)
                for work in list(self._work):
                    work.evict()
                continue
            await self._next_change(None if num_evicted else left_s)
        call.send(DrainProgress(num_calls=0, num_evicted=num_evicted))

    async def _next_change(self, within_s: float | None) -> None:
        self._changed.clear()
        try:
            async with asyncio.timeout(within_s):
                await self._changed.wait()
        except TimeoutError:
            pass

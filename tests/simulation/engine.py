"""The real engine, stepped on the loop in place of its thread: a step takes virtual time, nothing else changes."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from common.clock import Clock
from common.engine.events import Command, Event
from common.engine.loop import Engine
from common.engine.request import StepPlan
from tests.simulation.virtual_time import PROCESS, context_of

STEP_S = 0.004
TOKEN_S = 0.0015


class _Ahead:
    """The engine's clock: inside a step it runs ahead of the loop's by the step's cost."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.by_s = 0.0

    def now_s(self) -> float:
        return self._clock.now_s() + self.by_s


class SteppedEngine(Engine):
    """Commands posted during a step wait for its end, and what it brought is told then, as by the thread."""

    def __init__(self, *, deliver: Callable[[Sequence[Event]], None], clock: Clock, **settings: Any) -> None:
        self._ahead = _Ahead(clock)
        self._tell = deliver
        self._untold: list[Sequence[Event]] = []
        self._loop = asyncio.get_running_loop()
        self._context = context_of(PROCESS.get())
        self._turn_is_due = False
        self._is_running = False
        super().__init__(deliver=self._deliver_in_time, clock=self._ahead, **settings)

    def spend(self, plan: StepPlan) -> None:
        """The runner's `before_step`."""
        self._ahead.by_s += STEP_S + TOKEN_S * plan.num_tokens

    def start(self) -> None:
        self._is_running = True
        self._turn_after(0.0)

    def stop(self) -> None:
        self._is_running = False

    def post(self, command: Command) -> None:
        super().post(command)
        if self._is_running and not self._turn_is_due:
            self._turn_after(0.0)

    def _turn_after(self, seconds: float) -> None:
        self._turn_is_due = True
        if seconds:
            self._loop.call_later(seconds, self._take_turn, context=self._context)
        else:
            self._loop.call_soon(self._take_turn, context=self._context)

    def _take_turn(self) -> None:
        self._turn_is_due = False
        if not self._is_running:
            return
        untold, self._untold = self._untold, []
        for events in untold:
            self._tell(events)
        did = self.step()
        spent_s, self._ahead.by_s = self._ahead.by_s, 0.0
        if did or self._untold:
            self._turn_after(spent_s)

    def _deliver_in_time(self, events: Sequence[Event]) -> None:
        if self._ahead.by_s or self._untold:
            self._untold.append(events)
        else:
            self._tell(events)

"""An event loop whose time is a number: it jumps to the next timer when nothing is ready.

Production code runs on it unchanged: its sleeps and timeouts cost nothing, and the same program does the same
things in the same order. Every callback belongs to the *process* it was scheduled by (a context variable): one
that is frozen does nothing until it is thawed, as after SIGSTOP; one that is dead does nothing ever again, not
even its `finally` blocks, as after kill -9.
"""

import asyncio
import heapq
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from itertools import count
from math import inf
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from common.rpc.carrier import Process

PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)
"""Whose code is running; None is the world outside."""

T = TypeVar("T")
_LAST_TURNS = 50


class DeadlockError(Exception):
    """Nobody is ready and no timer is set, or time is up: whoever waits would wait for ever."""


def context_of(process: Process | None) -> Context:
    context = copy_context()
    context.run(PROCESS.set, process)
    return context


async def pause(seconds: float) -> None:
    """Let virtual time pass."""
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()
    timer = loop.call_later(seconds, lambda: over.done() or over.set_result(None))
    try:
        await over
    finally:
        timer.cancel()


class VirtualLoop(asyncio.BaseEventLoop):
    """Timers with equal times fire in the order in which they were set."""

    def __init__(self, *, limit_s: float = inf) -> None:
        super().__init__()
        self._now_s = 0.0
        self._limit_s = limit_s
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._order = count()
        self._stashed: dict[Process, list[asyncio.Handle]] = {}
        self._owners: WeakKeyDictionary[asyncio.Task[Any], Process | None] = WeakKeyDictionary()

    def time(self) -> float:
        return self._now_s

    now_s = time  # a `common.clock.Clock` too

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._order), timer))
        return timer

    def run_in_executor(self, executor: object, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """There are no threads here: done at once."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    # --- processes --------------------------------------------------------------------------------------

    def start(self, process: Process | None, work: Coroutine[Any, Any, T], name: str = "") -> "asyncio.Task[T]":
        """A task of that process."""
        return self.create_task(work, name=name or None, context=context_of(process))

    def create_task(
        self, work: Coroutine[Any, Any, T], *, name: str | None = None, context: Context | None = None
    ) -> "asyncio.Task[T]":
        task: asyncio.Task[T] = asyncio.Task(work, loop=self, name=name, context=context)
        self._owners[task] = PROCESS.get() if context is None else context.get(PROCESS)
        return task

    def owner_of(self, task: "asyncio.Task[Any]") -> Process | None:
        return self._owners.get(task)

    def bury(self) -> None:
        """The end: every task is cancelled, those of dead processes too, for what a coroutine holds must be closed."""
        self.set_exception_handler(lambda *_: None)
        self._limit_s = inf
        for process in (*self._stashed, *self._owners.values()):
            if process is not None:
                process.is_dead = process.is_frozen = False
        for process in list(self._stashed):
            self.resume(process)
        tasks = asyncio.all_tasks(self)
        for task in tasks:
            task.cancel()
        for _ in range(_LAST_TURNS):
            self.call_soon(self.stop)
            self.run_forever()
        for task in tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        self.close()

    def resume(self, process: Process) -> None:
        """What waited while the process was frozen runs now, in the order in which it was due."""
        self._ready.extend(self._stashed.pop(process, ()))

    # --- what the base class needs ----------------------------------------------------------------------

    def _run_once(self) -> None:
        ready, timers = self._ready, self._timers
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        if not ready and not self._stopping:
            if not timers:
                raise DeadlockError(f"nothing is ready and nothing is due: {self._who_waits()}")
            self._now_s = max(self._now_s, timers[0][0])
            if self._now_s > self._limit_s:
                raise DeadlockError(f"not done by {self._limit_s} s: {self._who_waits()}")
        while timers and timers[0][0] <= self._now_s:
            ready.append(heapq.heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle.cancelled():
                continue
            process = handle._context.get(PROCESS)
            if process is not None and (process.is_frozen or process.is_dead):
                self._stashed.setdefault(process, []).append(handle)
                continue
            handle._run()

    def _who_waits(self) -> list[str]:
        return [f"{task.get_name()} at {_place(task)}" for task in asyncio.all_tasks(self)]

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass  # it is skipped when its time comes

    def _write_to_self(self) -> None:
        pass  # nobody sleeps outside of `_run_once`

    def _process_events(self, event_list: object) -> None:
        pass


def _place(task: "asyncio.Task[Any]") -> str:
    """The innermost coroutine that waits, and those that wait for it."""
    places, waiting = [], task.get_coro()
    while (frame := getattr(waiting, "cr_frame", None)) is not None:
        places.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        waiting = getattr(waiting, "cr_await", None)
    return " < ".join(reversed(places))

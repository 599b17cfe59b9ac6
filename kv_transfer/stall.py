"""Telling a peer that stands still from one that is slow, and from ourselves standing still."""

import asyncio
from collections.abc import Callable

_PAUSE_S = 0.5


class StallWatch:
    """Calls `on_stall` when nothing was heard for `timeout_s` while something is awaited.

    If our own loop was held up (a stopped process, a long stall), what came meanwhile has not been heard yet:
    the watch then starts anew instead of blaming the peer.
    """

    def __init__(self, timeout_s: float, on_stall: Callable[[], None]) -> None:
        self.timeout_s = timeout_s
        self.num_heard = 0
        self._on_stall = on_stall
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Something is awaited from now on. Idempotent."""
        if self._timer is None:
            self._restart()

    def stop(self) -> None:
        """Nothing is awaited any more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def heard(self) -> None:
        self.num_heard += 1
        if self._timer is not None:
            self._restart()

    def _restart(self) -> None:
        self.stop()
        due_s = self._loop.time() + self.timeout_s
        self._timer = self._loop.call_at(due_s, self._due, due_s)

    def _due(self, due_s: float) -> None:
        self._timer = None
        if self._loop.time() - due_s > _PAUSE_S:
            self._restart()
            return
        self._on_stall()

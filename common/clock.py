"""Time and chance, handed in wherever a shell needs them, so that tests own both."""

import os
import time
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float:
        """Seconds on a clock that never goes back; only differences mean anything."""
        ...


class SystemClock:
    def now_s(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves when told to."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        self._now_s += seconds


def new_id() -> str:
    """128 random bits as 32 hex digits: incarnations and request ids."""
    return os.urandom(16).hex()

"""Who starts and stops nodes. A launcher keeps each child running until it is told to stop it.

A launcher reports what happens (`ChildDied`) and decides nothing else: which children there are is its
caller's business, whether a node is fit to serve is the coordinator's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from common.errors import BatonError


class LaunchError(BatonError):
    """A child cannot be started, or dies as often as it is started; the message has its last log lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """One process to keep running. `command` lacks what the launcher adds (`--parent-pipe`)."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildDied:
    """A child ended that nobody had told to. `status` is its exit code, or minus the signal that killed it.

    `restart_in_s` is None when the launcher gave up.
    """

    name: str
    pid: int
    status: int
    restart_in_s: float | None
    last_lines: tuple[str, ...]


class Launcher(Protocol):
    """Starts and stops nodes."""

    async def start(self, child: ChildSpec) -> None:
        """Start it and restart it whenever it dies. LaunchError if its program cannot be run or its name is taken."""
        ...

    async def stop(self, name: str) -> None:
        """Ask it to end, end it after a grace, and return once it is gone. Unknown names are ignored."""
        ...

    def pids(self) -> dict[str, int]:
        """The children that run now, by name; one that waits for its restart is missing."""
        ...

    def settle(self) -> None:
        """The start-up is over: from now on a child that keeps dying is restarted for ever, ever more slowly."""
        ...

    async def failed(self) -> None:
        """Wait for a child that the launcher gives up on, and raise its LaunchError; else wait for ever."""
        ...

    async def close(self) -> None:
        """Stop every child and leave nothing behind."""
        ...

"""Stand-in children, and a mailbox they write their pids into: tests wait for letters, never for time."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from coordinator.launcher.base import ChildDied, ChildSpec
from coordinator.launcher.local import LocalLauncher
from coordinator.launcher.restarts import RestartPolicy

_CHILD = Path(__file__).with_name("child.py")


class Mailbox:
    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path)
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)  # a writer of our own: never end of file
        self._lines: asyncio.Queue[list[int]] = asyncio.Queue()
        asyncio.get_running_loop().add_reader(self._fd, self._read)

    def _read(self) -> None:
        for line in os.read(self._fd, 65536).decode().splitlines():
            self._lines.put_nowait([int(word) for word in line.split()])

    async def next_pids(self) -> list[int]:
        return await asyncio.wait_for(self._lines.get(), 60)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)


@pytest.fixture
async def mailbox(tmp_path: Path) -> AsyncIterator[Mailbox]:
    box = Mailbox(tmp_path / "mailbox")
    yield box
    box.close()


@pytest.fixture
def spec(mailbox: Mailbox) -> Callable[[str, str], ChildSpec]:
    def make(name: str, mode: str) -> ChildSpec:
        return ChildSpec(name=name, command=(sys.executable, "-I", "-S", str(_CHILD), str(mailbox.path), mode))

    return make


@pytest.fixture
def deaths() -> asyncio.Queue[ChildDied]:
    return asyncio.Queue()


@pytest.fixture
async def launcher(tmp_path: Path, deaths: asyncio.Queue[ChildDied]) -> AsyncIterator[LocalLauncher]:
    policy = RestartPolicy(first_delay_s=0.001, max_delay_s=0.001)
    made = LocalLauncher(log_dir=tmp_path, on_death=deaths.put_nowait, policy=policy, grace_s=5.0)
    yield made
    await made.close()
    assert made.pids() == {}

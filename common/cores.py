"""Which cores of this host a process may use, and which of its neighbours' it may borrow while they rest.

Every node has a place in one file of the host, of which only the locks mean anything: it stays empty, and the kernel
drops a process's locks however the process ends. Of a place's bytes

    [0, threads)         are locked by its node for as long as it lives: the cores that it owns
    _WORKS               by its node while it has something to compute
    _BORROWED + i        by whoever computes on its i-th core while it rests

The place behind the last is nobody's: its cores are those that no node owns. A step takes what it can get and looks at
`_WORKS` before each of its pieces of work (csrc/workers.h), so that an owner which comes back shares its core for a
piece at most, well under a millisecond.

With more threads than cores on the host nobody borrows: a resting node's core is in use all the same.
"""

import fcntl
import os
import stat
import struct
import tempfile
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

NOBODY = -1
"""In place of an owner's byte: the core is nobody's."""

_PLACES = 64
_STRIDE = 4096
_WORKS = 1024
_BORROWED = 2048
_MOST_THREADS = 1024
_FLOCK = "@hhqqi4x"  # struct flock: type, whence, start, length, pid


def usable_cores(*, root: Path = Path("/")) -> int:
    """The cores this process may keep busy: where it may run, and no more than its control groups let it have.

    `root` is where `proc` and `sys` are."""
    cores = len(os.sched_getaffinity(0))
    for quota, period in _quotas(root):
        cores = min(cores, quota // period)
    return max(1, cores)


def _quotas(root: Path) -> Sequence[tuple[int, int]]:
    """(microseconds, in so many) of all groups that this process is in, versions 1 and 2."""
    found = []
    for folder, is_second in _groups(root):
        with suppress(OSError, ValueError):  # not there, or "max"
            if is_second:
                quota, period = map(int, (folder / "cpu.max").read_text().split())
            else:
                quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            if quota > 0 and period > 0:
                found.append((quota, period))
    return found


def _groups(root: Path) -> Sequence[tuple[Path, bool]]:
    """Folders that may hold a limit, and whether they are version 2's. In a container paths may start elsewhere."""
    with suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        folders: dict[tuple[Path, bool], None] = {}
        for line in lines:
            _, controllers, path = line.split(":", 2)
            is_second = controllers == ""
            if not is_second and "cpu" not in controllers.split(","):
                continue
            mount = root / "sys/fs/cgroup" / ("" if is_second else controllers)
            inner = mount / path.lstrip("/")
            for folder in (inner, *inner.parents):
                if folder.is_relative_to(mount):
                    folders[folder, is_second] = None
        return list(folders)
    return []


class Lendable(NamedTuple):
    """A neighbour's core, or nobody's: the byte to lock for its use, and the one that its owner locks."""

    core: int
    owner: int


class HostCores:
    """This node's place. For one thread. OSError if the file cannot be had, or all places are taken."""

    def __init__(self, threads: int, *, cores: int, path: Path | None = None) -> None:
        """`cores`: what this process may use of the host, `threads` of them all the time."""
        self._threads = min(threads, _MOST_THREADS)
        self._cores = cores
        self.fd = _opened(path or Path(tempfile.gettempdir()) / f"baton-cores-{os.geteuid()}")
        self.close = weakref.finalize(self, os.close, self.fd)
        """Gives the place up."""
        self._works = False
        self._place = self._take_place()

    def work(self) -> None:
        """From now on this node's cores are its own."""
        if not self._works:
            self._works = self.lock(self._place + _WORKS, 1)

    def rest(self) -> None:
        """Until `work` others may use them."""
        if self._works:
            self._call(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, self._place + _WORKS, 1)
            self._works = False

    def lendable(self) -> list[Lendable]:
        """The others' cores, busy or not. Some 60 microseconds."""
        owned = {place: threads for place in _places() if place != self._place and (threads := self._owned(place))}
        unowned = self._cores - self._threads - sum(owned.values())
        if unowned < 0:
            return []
        found = [
            Lendable(place + _BORROWED + i, place + _WORKS) for place, threads in owned.items() for i in range(threads)
        ]
        return found + [Lendable(_PLACES * _STRIDE + _BORROWED + i, NOBODY) for i in range(unowned)]

    def _take_place(self) -> int:
        for place in _places():
            if self.lock(place, self._threads):
                return place
        raise OSError(f"all {_PLACES} places are taken")

    def _owned(self, place: int) -> int:
        kind, _, _, length, _ = self._call(fcntl.F_OFD_GETLK, fcntl.F_WRLCK, place, _MOST_THREADS)
        return 0 if kind == fcntl.F_UNLCK else length

    def lock(self, start: int, length: int) -> bool:
        """Some bytes of the file. False if somebody else has one of them."""
        try:
            self._call(fcntl.F_OFD_SETLK, fcntl.F_WRLCK, start, length)
        except BlockingIOError:
            return False
        return True

    def _call(self, command: int, kind: int, start: int, length: int) -> tuple[int, ...]:
        """OSError where the file system has no such locks."""
        argument = struct.pack(_FLOCK, kind, os.SEEK_SET, start, length, 0)
        return struct.unpack(_FLOCK, fcntl.fcntl(self.fd, command, argument))


def _places() -> range:
    return range(0, _PLACES * _STRIDE, _STRIDE)


def _opened(path: Path) -> int:
    """A folder that everybody may write to can hold somebody else's file of this name, or a link."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        os.close(fd)
        raise PermissionError(f"{path} is somebody else's")
    return fd

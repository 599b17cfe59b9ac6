"""What a tree of processes has on this machine, by name, so that a test can show that all of it is gone."""

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path

import psutil


@dataclass(slots=True)
class Footprint:
    """Grows with every `take`; `remains` says what of it is still there."""

    processes: dict[int, psutil.Process] = field(default_factory=dict)
    ports: set[int] = field(default_factory=set)
    unix_sockets: set[str] = field(default_factory=set)
    shm_files: set[str] = field(default_factory=set)

    def take(self, root: int) -> list[psutil.Process]:
        """Record the process `root` and everything below it; returns what is below."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(root)
            below = process.children(recursive=True)
            for each in (process, *below):
                self.processes[each.pid] = each
                with contextlib.suppress(psutil.NoSuchProcess, OSError):
                    self._take_one(each)
            return below
        return []

    def _take_one(self, process: psutil.Process) -> None:
        self.ports |= {
            socket.laddr.port for socket in process.net_connections("inet") if socket.status == psutil.CONN_LISTEN
        }
        files = Path(f"/proc/{process.pid}/maps").read_text().split()
        inodes = set()
        for entry in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                target = os.readlink(entry)
                files.append(target)
                inodes.add(target.removeprefix("socket:[").removesuffix("]"))
        self.shm_files |= {name for name in files if name.startswith("/dev/shm/")}
        self.unix_sockets |= {name for inode, name in _bound_unix_sockets() if inode in inodes}

    def remains(self) -> list[str]:
        """Everything recorded that still exists, in words."""
        bound = {name for _, name in _bound_unix_sockets()}
        return [
            *(f"process {pid}: {' '.join(_command(each))}" for pid, each in self.processes.items() if _alive(each)),
            *(f"listening port {port}" for port in sorted(self.ports & _listening_ports())),
            *(f"unix socket {name}" for name in sorted(self.unix_sockets & bound)),
            *(f"file {name}" for name in sorted(self.unix_sockets | self.shm_files) if Path(name).exists()),
        ]


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.NoSuchProcess:
        return []


def _listening_ports() -> set[int]:
    """From /proc: psutil would look into every process of the machine."""
    ports = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for line in Path(table).read_text().splitlines()[1:]:
                _, local, _, state, *_ = line.split()
                if state == "0A":
                    ports.add(int(local.rpartition(":")[2], 16))
    return ports


def _bound_unix_sockets() -> list[tuple[str, str]]:
    """(inode, name) of every unix socket that has a name; abstract ones begin with "@"."""
    lines = (line.split(maxsplit=7) for line in Path("/proc/net/unix").read_text().splitlines()[1:])
    return [(fields[6], fields[7]) for fields in lines if len(fields) > 7]

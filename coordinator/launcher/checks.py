"""What is looked at before anything is started, so that what is missing is said at once and with its remedy."""

import contextlib
import os
import platform
import shutil
import socket
from pathlib import Path

import psutil

from common.errors import ConfigError

# An empty runtime with torch and transformers imported, private to each node; the rest of the cluster.
_NODE_BYTES = 400 << 20
_CONTROL_BYTES = 250 << 20
_COMPILERS = ("g++", "c++", "clang++")


def require_free_port(host: str, port: int) -> None:
    """ConfigError, naming who has the port where that can be seen."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except PermissionError as error:
            raise ConfigError(f"port {port} on {host} is not for everybody; choose one above 1023") from error
        except OSError as error:
            raise ConfigError(
                f"port {port} on {host} is in use{_holder(port)}; choose another one: "
                f"make up PORT={_suggestion(port)} or baton up --port {_suggestion(port)} ({error.strerror})"
            ) from error


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def require_memory(*, weight_bytes: int, pool_bytes: int, num_nodes: int, available_bytes: int | None = None) -> None:
    """ConfigError unless the cluster fits. Weights count once: nodes on one host share their pages."""
    needed = weight_bytes + num_nodes * (pool_bytes + _NODE_BYTES) + _CONTROL_BYTES
    available = available_memory() if available_bytes is None else available_bytes
    if needed > available:
        raise ConfigError(
            f"too little memory: {num_nodes} nodes need about {_gb(needed)} (weights {_gb(weight_bytes)}, each node "
            f"{_gb(pool_bytes + _NODE_BYTES)}), {_gb(available)} are free; close something, set a smaller "
            "--kv-cache-memory, start fewer nodes (--prefill 0) or choose a smaller model"
        )


def require_disk(folder: Path, needed_bytes: int) -> None:
    """ConfigError unless the file system of `folder` has that much left."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed_bytes > free:
        raise ConfigError(
            f"too little disk: {folder} needs {_gb(needed_bytes)}, {_gb(free)} are free; make room or set BATON_CACHE "
            "to a folder on another disk"
        )


def available_memory() -> int:
    """Bytes this process may still take: the machine's, or what its control group (a container) leaves."""
    available = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # no limit reads "max"
        limit = int((group / "memory.max").read_text())
        available = min(available, limit - int((group / "memory.current").read_text()))
    return max(0, available)


def usable_cores() -> int:
    """The cores this process may run on."""
    return len(os.sched_getaffinity(0))


def notes(attention: str, *, cpu_flags: frozenset[str] | None = None, compiler: str | None = "look") -> list[str]:
    """What is slower here than it could be, each with what it means and what would help."""
    if attention == "reference":
        return ["The reference attention was asked for: right, but slow."]
    found = next(filter(None, map(shutil.which, _COMPILERS)), None) if compiler == "look" else compiler
    if found is None and attention == "auto":
        return [
            "No C++ compiler (g++): the reference attention is used, which is right but slow. "
            "On Debian or Ubuntu: apt-get install g++"
        ]
    flags = _cpu_flags() if cpu_flags is None else cpu_flags
    if platform.machine() == "x86_64" and "avx512f" not in flags:
        if "avx2" in flags:
            return ["This CPU has no AVX-512: the AVX2 attention kernel is used, with half the vector width."]
        return ["This CPU has neither AVX-512 nor AVX2: plain vector code is used, which is slow."]
    return []


def _cpu_flags() -> frozenset[str]:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return frozenset(line.partition(":")[2].split())
    return frozenset()


def _holder(port: int) -> str:
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f" by process {connection.pid} ({psutil.Process(connection.pid).name()})"
    return ""


def _suggestion(port: int) -> int:
    return port + 1 if port < 65535 else 8000


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"

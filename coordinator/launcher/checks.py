"""What is looked at before anything is started, so that what is missing is said at once and with its remedy."""

import contextlib
import json
import os
import platform
import shlex
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil

from common.errors import ConfigError
from common.model import store

# An empty runtime with torch and transformers imported, private to each node; the rest of the cluster.
_NODE_BYTES = 350 << 20
_CONTROL_BYTES = 200 << 20
_AUTO_POOL_BYTES = 512 << 20
_COMPILERS = ("g++", "c++", "clang++")
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


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


@contextlib.contextmanager
def reserved_port(host: str, port: int = 0) -> Iterator[int]:
    """Keep a port (0: any free one) for a child to listen on. OSError if somebody listens or another `baton up` has it.

    Two of them can bind the same port as long as neither listens, and must: connections of a cluster that ended a
    moment ago still linger there. So they keep apart by a name, which goes with its process.
    """
    with contextlib.ExitStack() as held:
        holder = held.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
        if port:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, port))
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port = int(holder.getsockname()[1])
        held.enter_context(socket.socket(socket.AF_UNIX)).bind(f"\0baton-port-{port}")
        yield port


def weight_bytes(folder: Path, dtype: str) -> tuple[int, int]:
    """Bytes of the model's weights that nodes on one host share, and that each has for itself.

    Weights are mapped from the files as they are; in another type than the files' each node makes its own.
    """
    stored = sum(path.stat().st_size for path in store.weight_files(folder))
    config = json.loads((folder / "config.json").read_text())
    stored_dtype = config.get("dtype") or config.get("torch_dtype") or dtype
    if stored_dtype == dtype:
        return stored, 0
    return 0, stored * _ITEM_BYTES.get(dtype, 4) // _ITEM_BYTES.get(stored_dtype, 4)


def require_memory(
    *, shared_bytes: int, private_bytes: int, pool_bytes: int, num_nodes: int, available_bytes: int | None = None
) -> None:
    """ConfigError unless the cluster fits: `shared_bytes` of weights once, `private_bytes` and a pool for each node.

    `pool_bytes` 0 stands for the nodes' own choice, which adapts to the machine.
    """
    available = available_memory() if available_bytes is None else available_bytes
    each = private_bytes + (pool_bytes or min(_AUTO_POOL_BYTES, available // 10)) + _NODE_BYTES
    needed = shared_bytes + num_nodes * each + _CONTROL_BYTES
    if needed > available:
        raise ConfigError(
            f"too little memory: {num_nodes} nodes need about {_gb(needed)} (each {_gb(each)}, weights they share "
            f"{_gb(shared_bytes)}), {_gb(available)} are free; close something, set a smaller --kv-cache-memory, "
            "start fewer nodes (--prefill 0) or choose a smaller model"
        )


def available_memory() -> int:
    """Bytes this process may still take: the machine's, or what its control group (a container) leaves."""
    available = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # no limit reads "max"
        limit = int((group / "memory.max").read_text())
        available = min(available, limit - int((group / "memory.current").read_text()))
    return max(0, available)


def find_compiler() -> str | None:
    """The C++ compiler that the native kernels would be built with."""
    chosen = shlex.split(os.environ.get("CXX", ""))[:1]
    return next(filter(None, map(shutil.which, chosen or _COMPILERS)), None)


def notes(attention: str, *, cpu_flags: frozenset[str] | None = None, has_compiler: bool | None = None) -> list[str]:
    """What is slower here than it could be, each with what it means and what would help."""
    if attention == "reference":
        return ["The reference attention was asked for: right, but slow."]
    if has_compiler is None:
        has_compiler = find_compiler() is not None
    if not has_compiler and attention == "auto":
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

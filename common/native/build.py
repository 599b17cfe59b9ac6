"""Compiles our C++ at first use and caches the library: same source, compiler, flags and CPU, same file.

`python -m common.native.build` does it ahead of time, which installing does (deploy/venv.sh).
"""

import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from common.errors import ConfigError

_FLAGS = (
    *("-std=c++17", "-O3", "-shared", "-fPIC", "-pthread", "-fvisibility=hidden"),
    "-ffp-contract=off",  # the kernel says itself where a multiplication and an addition round once
)
_NATIVE = {"x86_64": ("-march=native",), "aarch64": ("-mcpu=native",)}
SOURCES = Path(__file__).parent / "csrc"

_COMPILERS = ("g++", "c++", "clang++")
_COMPILE_TIMEOUT_S = 300.0


def library(source: Path, *, extra_flags: tuple[str, ...] = ()) -> Path:
    """The shared library built from `source` (and the headers beside it), compiled unless it is in the cache.

    Processes that start together build once: the others wait for the first. ConfigError, with what to do, if
    there is no compiler, it fails, or the cache cannot be written.
    """
    command = [*compiler(), *_FLAGS, *_NATIVE.get(platform.machine(), ()), *extra_flags]
    target = cache_dir() / f"{source.stem}-{_digest(source, command)}.so"
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_suffix(".lock")):
            if not target.exists():
                _compile(source, command, target)
    except OSError as error:
        raise ConfigError(
            f"cannot write compiled kernels to {target.parent} ({error}); set BATON_CACHE to a writable folder"
        ) from error
    return target


def unavailable(load: Callable[[], object]) -> str | None:
    """Why `load`, which opens a `library`, fails on this machine, or None."""
    try:
        load()
    except ConfigError as error:
        return error.message
    except OSError as error:
        return f"the compiled kernels do not load: {error}"
    return None


def compiler() -> list[str]:
    """The C++ compiler's command: $CXX, else the first of g++, c++, clang++. ConfigError if there is none."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    if chosen:
        if shutil.which(chosen[0]) is None:
            raise ConfigError(f"CXX={chosen[0]!r} is not an executable; unset it or name a C++ compiler")
        return chosen
    for name in _COMPILERS:
        if shutil.which(name):
            return [name]
    raise ConfigError(
        "no C++ compiler for the native attention kernel; install g++ (Debian, Ubuntu: apt install g++; "
        "Fedora: dnf install gcc-c++) or use `--attention reference`, which works everywhere and is slow"
    )


def cache_dir() -> Path:
    """Where compiled kernels are kept: $BATON_CACHE/kernels, else ~/.cache/baton/kernels."""
    base = os.environ.get("BATON_CACHE")
    return (Path(base) if base else Path.home() / ".cache" / "baton") / "kernels"


def _digest(source: Path, command: list[str]) -> str:
    digest = hashlib.sha256()
    for path in sorted([source, *source.parent.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    version = subprocess.run([command[0], "--version"], capture_output=True, check=False, timeout=60).stdout
    for part in (*command, version.decode(errors="replace"), platform.machine(), _cpu()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:20]


def _cpu() -> str:
    """What `native` depends on: a home folder may be shared by machines of different kinds."""
    keys = ("model name", "flags", "CPU implementer", "CPU part", "Features")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(keys)))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released by the kernel when its holder dies
        yield


def _compile(source: Path, command: list[str], target: Path) -> None:
    handle, partial = tempfile.mkstemp(dir=target.parent, prefix=target.stem, suffix=".partial")
    os.close(handle)
    try:
        run = [*command, str(source), "-o", partial]
        try:
            result = subprocess.run(run, capture_output=True, text=True, check=False, timeout=_COMPILE_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise ConfigError(f"compiling {source.name} took over {_COMPILE_TIMEOUT_S:.0f} s: {error.cmd}") from error
        if result.returncode != 0:
            raise ConfigError(
                f"compiling {source.name} failed; try another compiler (CXX=...) or `--attention reference`, "
                f"which is slow\n$ {shlex.join(run)}\n{result.stderr.strip()[-2000:]}"
            )
        Path(partial).chmod(0o755)
        os.replace(partial, target)  # atomic: nobody loads half a file
    finally:
        Path(partial).unlink(missing_ok=True)


def main() -> None:
    """Compile everything that is not in the cache yet, side by side. Without a compiler it says so and that is all."""
    started = time.monotonic()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = [pool.submit(library, source) for source in sorted(SOURCES.glob("*.cpp"))]
        try:
            paths = [future.result() for future in futures]
        except ConfigError as error:
            print(f"baton: no compiled kernels yet: {error.message}", file=sys.stderr)
            return
    print(
        f"baton: {len(paths)} kernel libraries for this CPU in {paths[0].parent} ({time.monotonic() - started:.0f} s)"
    )


if __name__ == "__main__":
    main()

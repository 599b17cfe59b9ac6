"""Proportional memory of processes, with one file's pages apart: strangers on the machine may map it too."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes. `own` is the proportional set without the file, `of_file` how much of the file is mapped and resident."""

    own: int
    of_file: int


def memory_of(process: psutil.Process, file: Path) -> Memory:
    maps = process.memory_maps(grouped=False)
    ours = [one for one in maps if one.path == str(file)]
    return Memory(sum(one.pss for one in maps) - sum(one.pss for one in ours), sum(one.rss for one in ours))


def maps_library(process: psutil.Process, name: str) -> bool:
    """Whether a file of this name (`libtorch`) is mapped."""
    return name in Path(f"/proc/{process.pid}/maps").read_text()


@asynccontextmanager
async def empty_runtime(*modules: str) -> AsyncIterator[psutil.Process]:
    """A child that has imported `modules` and holds still: what a process pays before it does anything."""
    program = f"import sys, {', '.join(modules)}; print(flush=True); sys.stdin.read()"
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-c", program),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        assert await child.stdout.readline() == b"\n"
        yield psutil.Process(child.pid)
    finally:
        child.stdin.close()
        await child.wait()

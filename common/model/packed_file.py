"""One file that holds a prepared model: a recipe and every array of it, mapped rather than read.

    magic | length of the header | header (JSON) | arrays, each at a multiple of ALIGNMENT

Processes on one host that map the same file share its pages. Alignment is what the kernels like (a tile never
straddles a cache line); a safetensors file promises 8 bytes only.
"""

import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from common.errors import ConfigError
from common.native.abi import Array

ALIGNMENT = 4096
_MAGIC = b"BATONPK1"


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    offset: int


class _Header(msgspec.Struct, frozen=True):
    about: msgspec.Raw
    arrays: dict[str, _Entry]


def write(path: Path, about: Any, arrays: Mapping[str, Array]) -> None:
    """Write `path` through a neighbour and one rename, so that nobody sees half a file. OSError as usual."""
    entries, offset = {}, 0
    for name, array in arrays.items():
        entries[name] = _Entry(array.dtype.str, array.shape, offset)
        offset += _aligned(array.nbytes)
    header = msgspec.json.encode({"about": about, "arrays": entries})
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(_MAGIC + len(header).to_bytes(8, "little") + header)
            start = _aligned(file.tell())
            for name, array in arrays.items():
                file.seek(start + entries[name].offset)
                file.write(np.ascontiguousarray(array).data)
            file.truncate(start + offset)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read(path: Path, about: Any) -> tuple[Any, dict[str, Array]]:
    """What was written as `about` (decoded as that type), and the arrays, mapped; nobody must write to them.

    ConfigError if the file is not whole.
    """
    with path.open("rb") as file:
        start = file.read(16)
        size = int.from_bytes(start[8:], "little")
        if start[:8] != _MAGIC or 16 + size > path.stat().st_size:
            raise ConfigError(f"{path} is no prepared model; delete it and start again")
        header = msgspec.json.decode(file.read(size), type=_Header)
        # Private, for numpy wants memory it could write to; unwritten pages stay the file's, shared with all
        mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    arrays: dict[str, Array] = {}
    for name, entry in header.arrays.items():
        count = int(np.prod(entry.shape))
        at = _aligned(16 + size) + entry.offset
        if at + count * np.dtype(entry.dtype).itemsize > len(mapped):
            raise ConfigError(f"{path} is not whole; delete it and start again")
        arrays[name] = np.frombuffer(mapped, entry.dtype, count, at).reshape(entry.shape)
    return msgspec.json.decode(header.about, type=about), arrays


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT

"""A pool's bytes: one sealed memfd holding the generations, then the blocks.

Nothing has a name in the file system, so kill -9 leaves nothing behind. Readers on the same host get the
file descriptor over a unix socket and can map it for reading only (sealed against later writable maps).
"""

import fcntl
import mmap
import os
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from common.errors import ConfigError
from common.kv_cache.grants import Grants
from common.messages import Incarnation, KVLayout

_PAGE = mmap.PAGESIZE
_MADV_POPULATE_WRITE = 23  # Linux 5.14; absent from the mmap module
_F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; absent from fcntl
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """A pool as bytes. `fd` is the memfd behind both arrays (-1 when the pool is not host memory).

    `generations[b]` moves before block `b` is first overwritten; reading one is atomic. In the file the
    generations come first and the blocks start at `blocks_offset`. `grants` says who may read what.
    """

    incarnation: Incarnation
    layout: KVLayout
    blocks: npt.NDArray[np.uint8]  # [num_blocks, block_bytes]
    generations: npt.NDArray[np.int64]  # [num_blocks]
    fd: int = -1
    blocks_offset: int = 0
    grants: Grants = field(default_factory=Grants)

    @property
    def num_blocks(self) -> int:
        return int(self.generations.shape[0])


def allocate(layout: KVLayout, num_blocks: int, incarnation: Incarnation) -> PoolMemory:
    """Reserve and touch every page now: first touch is slow, and a later lack of memory would be fatal.

    The file descriptor lives until the process ends. ConfigError if the machine lacks the memory.
    """
    blocks_offset = -(-num_blocks * 8 // _PAGE) * _PAGE
    size = blocks_offset + num_blocks * layout.block_bytes
    fd = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        view = mmap.mmap(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        try:
            view.madvise(_MADV_POPULATE_WRITE)
        except OSError as error:
            if error.errno == 12:  # ENOMEM
                raise
            np.frombuffer(view, np.uint8).fill(0)
    except OSError as error:
        os.close(fd)
        raise ConfigError(
            f"kv_cache_memory: cannot reserve {size / 2**20:.0f} MiB for {num_blocks} blocks ({error}); "
            "set a smaller kv_cache_memory or free memory"
        ) from error
    whole = np.frombuffer(view, np.uint8)
    return PoolMemory(
        incarnation=incarnation,
        layout=layout,
        blocks=whole[blocks_offset:].reshape(num_blocks, layout.block_bytes),
        generations=whole[: num_blocks * 8].view(np.int64),
        fd=fd,
        blocks_offset=blocks_offset,
    )


def allocate_host_tier(layout: KVLayout, size: int) -> npt.NDArray[np.uint8]:
    """Places for the blocks that `size` bytes hold, [num_blocks, block_bytes], touched. ConfigError if it lacks."""
    try:
        tier = np.empty((size // layout.block_bytes, layout.block_bytes), np.uint8)
        tier.fill(0)
    except MemoryError as error:
        raise ConfigError(f"kv_host_memory: cannot reserve {size / 2**20:.0f} MiB; set it smaller") from error
    return tier

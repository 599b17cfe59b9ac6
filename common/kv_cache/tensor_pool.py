"""The pool as a tensor, in host memory or on a device."""

import numpy as np
import torch

from common.errors import ConfigError
from common.kv_cache.memory import PoolMemory, allocate
from common.messages import Incarnation, KVLayout


def open_pool(
    layout: KVLayout, num_blocks: int, incarnation: Incarnation, device: torch.device
) -> tuple[PoolMemory, torch.Tensor]:
    """The pool's bytes and a tensor [num_blocks, block_elements] over them.

    On a GPU the blocks live in the tensor alone: `PoolMemory.blocks` is then empty and `fd` -1.
    ConfigError if the memory is not there.
    """
    dtype = getattr(torch, layout.dtype)
    if device.type == "cpu":
        memory = allocate(layout, num_blocks, incarnation)
        return memory, torch.from_numpy(memory.blocks).view(dtype)
    try:
        pool = torch.zeros(num_blocks, layout.block_elements, dtype=dtype, device=device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"kv_cache_memory: {device} lacks {num_blocks * layout.block_bytes / 2**20:.0f} MiB; set it smaller"
        ) from error
    blocks = np.empty((0, layout.block_bytes), np.uint8)
    return PoolMemory(incarnation, layout, blocks, np.zeros(num_blocks, np.int64)), pool


def open_host_tier(layout: KVLayout, size: int, device: torch.device) -> torch.Tensor:
    """As `memory.allocate_host_tier`, [num_blocks, block_elements]; pinned where a GPU copies to and from it."""
    num_blocks, dtype = size // layout.block_bytes, getattr(torch, layout.dtype)
    try:
        return torch.empty(num_blocks, layout.block_elements, dtype=dtype, pin_memory=device.type == "cuda").zero_()
    except RuntimeError as error:
        raise ConfigError(f"kv_host_memory: cannot reserve {size / 2**20:.0f} MiB; set it smaller") from error

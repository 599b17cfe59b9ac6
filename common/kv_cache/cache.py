"""The pool as tensors: how many blocks the machine can give, and one tensor over the pool's bytes."""

from pathlib import Path

import numpy as np
import psutil
import torch

from common.config import EngineConfig
from common.errors import ConfigError
from common.kv_cache.memory import PoolMemory, allocate
from common.messages import Incarnation, KVLayout

_AUTO_BYTES = 512 << 20
_AUTO_SHARE = 0.1  # of what is free now: a host runs several nodes and other things
_MAX_SHARE = 0.5  # what one long sequence may take beyond that
_AUTO_TOKENS = 2048  # one sequence of this length should fit
_DEVICE_SHARE = 0.8  # of a GPU's free memory: nothing else wants it


def num_pool_blocks(config: EngineConfig, layout: KVLayout, *, max_model_len: int, device: torch.device) -> int:
    """Blocks of the pool: what `kv_cache_memory` holds, or a share of the machine sized to be a good neighbour.

    ConfigError if that is less than one block.
    """
    if config.kv_cache_memory:
        budget, source = config.kv_cache_memory, "kv_cache_memory"
    elif device.type == "cuda":
        budget, source = int(torch.cuda.mem_get_info(device)[0] * _DEVICE_SHARE), "free GPU memory"
    else:
        available = available_bytes()
        wanted_blocks = -(-min(max_model_len, _AUTO_TOKENS) // layout.block_size)
        wanted = min(wanted_blocks * layout.block_bytes, int(available * _MAX_SHARE))
        budget, source = max(min(_AUTO_BYTES, int(available * _AUTO_SHARE)), wanted), "free memory"
    num_blocks = budget // layout.block_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"kv_cache_memory: {budget} bytes ({source}) hold no block; one block of {layout.block_size} tokens of "
            f"this model takes {layout.block_bytes} bytes"
        )
    return num_blocks


def available_bytes() -> int:
    """Memory that can be had without swapping, within the container's limit if there is one."""
    available = int(psutil.virtual_memory().available)
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return available
    return available if limit == "max" else max(0, min(available, int(limit) - used))


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

"""How many blocks a machine can give to a pool."""

from pathlib import Path

import psutil

from common.config import EngineConfig
from common.errors import ConfigError
from common.messages import KVLayout

_AUTO_BYTES = 512 << 20
_AUTO_SHARE = 0.1  # of what is free now: a host runs several nodes and other things
_MAX_SHARE = 0.5  # what one long sequence may take beyond that
_AUTO_TOKENS = 2048  # one sequence of this length should fit
_DEVICE_SHARE = 0.8  # of a GPU's free memory: nothing else wants it


def num_pool_blocks(
    config: EngineConfig, layout: KVLayout, *, max_model_len: int, device_bytes: int | None = None
) -> int:
    """Blocks of the pool: what `kv_cache_memory` holds, or a share of the machine sized to be a good neighbour.

    `device_bytes` are those that a GPU has free. ConfigError if all that is less than one block.
    """
    if config.kv_cache_memory:
        budget, source = config.kv_cache_memory, "kv_cache_memory"
    elif device_bytes is not None:
        budget, source = int(device_bytes * _DEVICE_SHARE), "free GPU memory"
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

"""The pool's size and its tensor."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from common.config import EngineConfig
from common.errors import ConfigError
from common.kv_cache import cache
from common.kv_cache.cache import num_pool_blocks
from common.kv_cache.host_tier import copy_rows
from common.kv_cache.memory import allocate_host_tier
from common.kv_cache.tensor_pool import open_host_tier, open_pool
from common.messages import BlockId, Incarnation, KVLayout, LayerKV

LAYOUT = KVLayout(16, "float32", 4, (LayerKV(3, 64, 64),) * 30)  # 737,280 bytes a block
CPU = torch.device("cpu")


def blocks(available: int, monkeypatch: pytest.MonkeyPatch, *, memory: int = 0, max_model_len: int = 8192) -> int:
    monkeypatch.setattr(cache, "available_bytes", lambda: available)
    config = EngineConfig(kv_cache_memory=memory)
    return num_pool_blocks(config, LAYOUT, max_model_len=max_model_len)


def test_a_pool_takes_what_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert blocks(0, monkeypatch, memory=10 * LAYOUT.block_bytes + 5) == 10


def test_the_default_is_a_tenth_of_free_memory_up_to_512_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    assert blocks(64 << 30, monkeypatch) == (512 << 20) // LAYOUT.block_bytes
    assert blocks(3 << 30, monkeypatch) == int((3 << 30) * 0.1) // LAYOUT.block_bytes


def test_one_sequence_of_2048_tokens_fits_while_half_of_free_memory_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert blocks(400 << 20, monkeypatch) == 128
    assert blocks(100 << 20, monkeypatch) == (50 << 20) // LAYOUT.block_bytes
    assert blocks(400 << 20, monkeypatch, max_model_len=100) == (40 << 20) // LAYOUT.block_bytes


def test_a_pool_without_room_for_a_block_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="737280 bytes"):
        blocks(0, monkeypatch, memory=737_279)


def test_the_machine_has_memory_to_give() -> None:
    assert cache.available_bytes() > 1 << 20


@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("bfloat16", 2)])
def test_the_tensor_lies_over_the_pools_own_bytes(dtype: str, itemsize: int) -> None:
    layout = KVLayout(4, dtype, itemsize, (LayerKV(2, 8, 8), LayerKV(1, 4, 2)))
    memory, pool = open_pool(layout, 5, Incarnation("0" * 32), CPU)
    assert pool.shape == (5, layout.block_elements)
    assert pool.dtype == getattr(torch, dtype)
    pool[3] = 1.5
    assert np.array_equal(memory.blocks[3], pool[3].view(torch.uint8).numpy())
    assert not memory.blocks[[0, 1, 2, 4]].any()


def test_a_host_tier_holds_the_blocks_that_its_bytes_are_good_for() -> None:
    layout = KVLayout(4, "bfloat16", 2, (LayerKV(2, 8, 8),))
    for size, num_blocks in ((0, 0), (layout.block_bytes - 1, 0), (3 * layout.block_bytes + 5, 3)):
        assert open_host_tier(layout, size, CPU).shape == (num_blocks, layout.block_elements)
        assert allocate_host_tier(layout, size).shape == (num_blocks, layout.block_bytes)


def test_a_host_tier_that_cannot_be_had_is_refused() -> None:
    for allocate in (allocate_host_tier, lambda layout, size: open_host_tier(layout, size, CPU)):
        with pytest.raises(ConfigError, match="kv_host_memory"):
            allocate(LAYOUT, 1 << 62)


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_blocks_are_copied_between_pool_and_host_in_order(make: Callable[[list[list[int]]], Any]) -> None:
    pool, host = make([[1, 1], [2, 2]]), make([[3, 3]])
    copy_rows(pool, host, [(BlockId(0), BlockId(1)), (BlockId(2), BlockId(0)), (BlockId(1), BlockId(2))])
    assert (pool.tolist(), host.tolist()) == ([[3, 3], [1, 1]], [[1, 1]])

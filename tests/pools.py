"""Pools and references for tests that move blocks."""

from collections.abc import Callable

import numpy as np
import pytest
import zmq

from common.clock import new_id
from common.keys import KeyPair, Keys, Trust
from common.kv_cache.memory import PoolMemory, allocate
from common.messages import BlockId, BlockRef, Generation, Incarnation, KVLayout, LayerKV, RequestId
from kv_transfer import ucx
from kv_transfer.base import TransferSettings, Transport
from kv_transfer.memory import MemoryTransport
from kv_transfer.shm import ShmTransport
from kv_transfer.tcp import TcpTransport
from kv_transfer.ucx import UcxTransport

NUM_BLOCKS = 64
SMALL = KVLayout(block_size=4, dtype="float32", itemsize=4, layers=(LayerKV(2, 8, 8),) * 3)
LARGE = KVLayout(block_size=16, dtype="float32", itemsize=4, layers=(LayerKV(2, 64, 64),) * 4)
HUGE = KVLayout(block_size=16, dtype="float32", itemsize=4, layers=(LayerKV(8, 128, 128),) * 20)  # 2.5 MiB a block
GENERATION = Generation(7)
SECRET = b"one open call's"
"""Opens every block of an `owned_pool`."""

WITH_KEYS = TransferSettings(
    trust=Trust(keys=Keys(server=KeyPair(*zmq.curve_keypair()), client=KeyPair(*zmq.curve_keypair())))
)
MAKE: dict[str, Callable[[], Transport]] = {
    "memory": MemoryTransport,
    "shm": ShmTransport,
    "tcp": TcpTransport,
    "tcp and keys": lambda: TcpTransport(WITH_KEYS),
    "ucx": UcxTransport,
}


def made(name: str) -> Transport:
    if name == "ucx" and (reason := ucx.available()) is not None:
        pytest.skip(reason)
    return MAKE[name]()


def owned_pool(layout: KVLayout = SMALL, num_blocks: int = NUM_BLOCKS) -> PoolMemory:
    pool = allocate(layout, num_blocks, Incarnation(new_id()))
    pool.blocks[:] = np.arange(layout.block_bytes) % 251  # a period that is no power of two: shifts show
    np.add(pool.blocks, np.arange(num_blocks, dtype=np.uint8)[:, None], out=pool.blocks)
    pool.generations[:] = GENERATION
    pool.grants.grant(SECRET, refs(*range(num_blocks)), request=RequestId("the test's"))
    return pool


def own_pool(layout: KVLayout = SMALL) -> PoolMemory:
    return allocate(layout, NUM_BLOCKS, Incarnation(new_id()))


def refs(*blocks: int, generation: int = GENERATION) -> list[BlockRef]:
    return [BlockRef(BlockId(block), Generation(generation)) for block in blocks]


def ids(*blocks: int) -> list[BlockId]:
    return [BlockId(block) for block in blocks]

"""The contract of `kv_transfer.base` when the owner is another process: one that may die or freeze."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio

from common.errors import PeerLostError
from common.kv_cache.memory import PoolMemory
from common.messages import Incarnation, KVLayout, LayerKV, Offer
from kv_transfer import ucx
from kv_transfer.base import BlockReader, TransferSettings
from tests.pools import MAKE, SECRET, ids, made, own_pool, refs

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def ucx_stays_up() -> AsyncIterator[None]:
    """Starting UCX takes longer than all these tests; `test_ucx_process.py` looks at its start and end."""
    if ucx.available() is not None:
        yield
        return
    from kv_transfer.ucx_engine import ENGINE

    await ENGINE.borrow("127.0.0.1")
    yield
    await ENGINE.give_back()


class Owner:
    """`transport_owner.py` running; see there for its pool."""

    incarnation = Incarnation("0" * 31 + "1")
    layout = KVLayout(block_size=16, dtype="float32", itemsize=4, layers=(LayerKV(2, 64, 64),) * 4)

    def __init__(self, name: str) -> None:
        script = Path(__file__).with_name("transport_owner.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script), name], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdout is not None
        self.offer = msgspec.json.decode(self.process.stdout.readline(), type=Offer)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def end(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture(params=["shm", "tcp", "ucx"])
def owner(request: pytest.FixtureRequest) -> Iterator[Owner]:
    made(request.param)
    owner = Owner(request.param)
    yield owner
    owner.end()


def reader_of(owner: Owner, pool: PoolMemory, **settings: float) -> BlockReader:
    make: Any = MAKE[owner.offer.transport]
    reader: BlockReader = make(TransferSettings(**settings)).reader(owner.offer, owner=owner.incarnation, pool=pool)
    return reader


async def test_blocks_cross_processes(owner: Owner) -> None:
    pool = own_pool(owner.layout)
    reader = reader_of(owner, pool)
    await reader.open()
    await reader.read(refs(*range(63, -1, -1), generation=3), ids(*range(64)), secret=SECRET)
    await reader.close()
    np.testing.assert_array_equal(pool.blocks, np.arange(63, -1, -1)[:, None].repeat(owner.layout.block_bytes, 1))


async def test_a_killed_owner_is_a_lost_peer(owner: Owner) -> None:
    reader = reader_of(owner, own_pool(owner.layout))
    await reader.open()
    reading = asyncio.ensure_future(read_for_ever(reader))
    await reader.read(refs(1, generation=3), ids(1), secret=SECRET)
    owner.kill()
    async with asyncio.timeout(60):
        with pytest.raises(PeerLostError):
            await reading
        with pytest.raises(PeerLostError):
            await reader.read(refs(1, generation=3), ids(1), secret=SECRET)
    await reader.close()


async def read_for_ever(reader: BlockReader) -> None:
    while True:
        await reader.read(refs(*range(2, 64), generation=3), ids(*range(2, 64)), secret=SECRET)


@pytest.mark.parametrize("owner", ["tcp", "ucx"], indirect=True)
async def test_a_frozen_owner_is_a_lost_peer_after_the_deadline(owner: Owner) -> None:
    reader = reader_of(owner, own_pool(owner.layout), stall_timeout_s=0.3)
    await reader.open()
    await reader.read(refs(1, generation=3), ids(1), secret=SECRET)
    owner.freeze()
    async with asyncio.timeout(60):
        with pytest.raises(PeerLostError, match=r"0\.3 s"):
            await reader.read(refs(*range(64), generation=3), ids(*range(64)), secret=SECRET)
    await reader.close()


@pytest.mark.parametrize("owner", ["shm"], indirect=True)
async def test_shared_memory_needs_nothing_of_a_frozen_owner(owner: Owner) -> None:
    reader = reader_of(owner, own_pool(owner.layout))
    await reader.open()
    await reader.read(refs(1, generation=3), ids(1), secret=SECRET)
    owner.freeze()
    await reader.read(refs(*range(64), generation=3), ids(*range(64)), secret=SECRET)
    await reader.close()

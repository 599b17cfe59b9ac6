import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from common.clock import new_id
from common.errors import PeerLostError, StaleBlockError, TransferError
from common.kv_cache.memory import PoolMemory, allocate
from common.messages import BlockId, BlockRef, Generation, Incarnation, KVLayout, LayerKV, RequestId
from kv_transfer.base import BlockReader
from kv_transfer.faulty import Faults, FaultyTransport
from kv_transfer.memory import MemoryTransport

LAYOUT = KVLayout(block_size=4, dtype="float32", itemsize=4, layers=(LayerKV(1, 8, 8),))
REFS = [BlockRef(BlockId(1), Generation(0))]
INTO = [BlockId(2)]
SECRET = b"secret"


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
def local() -> PoolMemory:
    return allocate(LAYOUT, 4, Incarnation(new_id()))


@pytest.fixture
async def reader(faults: Faults, local: PoolMemory) -> AsyncIterator[BlockReader]:
    source = allocate(LAYOUT, 4, Incarnation(new_id()))
    source.blocks[:] = 5
    source.grants.grant(SECRET, REFS, request=RequestId("r"))
    transport = FaultyTransport(MemoryTransport(), faults)
    server = transport.serve(source)
    reader = transport.reader(await server.start(), owner=source.incarnation, pool=local)
    await reader.open()
    yield reader
    await reader.close()
    await server.close()


async def test_without_faults_it_is_the_transport_inside(reader: BlockReader, local: PoolMemory) -> None:
    await reader.read(REFS, INTO, secret=SECRET)
    np.testing.assert_array_equal(local.blocks[2], 5)


async def test_the_named_reads_fail_and_the_others_do_not(reader: BlockReader, faults: Faults) -> None:
    faults.fail_reads = {2}
    faults.stale_reads = {3}
    await reader.read(REFS, INTO, secret=SECRET)
    with pytest.raises(TransferError, match="read 2"):
        await reader.read(REFS, INTO, secret=SECRET)
    with pytest.raises(StaleBlockError):
        await reader.read(REFS, INTO, secret=SECRET)
    await reader.read(REFS, INTO, secret=SECRET)
    assert faults.num_reads == 4


async def test_a_held_read_moves_nothing_until_it_is_released(
    reader: BlockReader, faults: Faults, local: PoolMemory
) -> None:
    faults.hold()
    read = asyncio.ensure_future(reader.read(REFS, INTO, secret=SECRET))
    await faults.held.wait()
    assert not local.blocks.any()
    faults.release()
    await read
    assert local.blocks[2].all()
    assert faults.num_held == 0


@pytest.mark.parametrize("stubborn", [False, True])
async def test_a_cancelled_read_that_is_held_ends_at_once_unless_it_is_stubborn(
    reader: BlockReader, faults: Faults, local: PoolMemory, stubborn: bool
) -> None:
    faults.hold()
    faults.stubborn = stubborn
    read = asyncio.ensure_future(reader.read(REFS, INTO, secret=SECRET))
    await faults.held.wait()
    read.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert read.done() is not stubborn
    assert not local.blocks.any()
    faults.release()
    with pytest.raises(asyncio.CancelledError):
        await read
    assert local.blocks[2].any() == stubborn, "its bytes land after all, and are nobody's"


async def test_a_dropped_connection_ends_held_reads_and_those_to_come(reader: BlockReader, faults: Faults) -> None:
    faults.hold()
    read = asyncio.ensure_future(reader.read(REFS, INTO, secret=SECRET))
    await faults.held.wait()
    faults.drop()
    with pytest.raises(PeerLostError):
        await read
    with pytest.raises(PeerLostError):
        await reader.read(REFS, INTO, secret=SECRET)
    faults.restore()
    faults.release()
    await reader.read(REFS, INTO, secret=SECRET)

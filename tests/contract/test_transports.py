"""The contract of `kv_transfer.base`, over every transport."""

import asyncio
import gc
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio

from common.clock import new_id
from common.errors import PeerLostError, StaleBlockError, TransferError
from common.kv_cache.memory import PoolMemory, allocate
from common.messages import HeldConnection, Incarnation, KVLayout, RequestId
from kv_transfer import ucx
from kv_transfer.base import BlockReader, Transport
from tests.pools import GENERATION, HUGE, LARGE, MAKE, NUM_BLOCKS, SECRET, SMALL, ids, made, own_pool, owned_pool, refs

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHECKED_EACH_TIME = ["memory", "tcp", "tcp and keys", "ucx"]
"""Transports whose owner looks at the secret of every read; see `kv_transfer.shm` for the other one."""


@pytest.fixture(params=list(MAKE))
def transport(request: pytest.FixtureRequest) -> Transport:
    return made(request.param)


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


@asynccontextmanager
async def connected(transport: Transport, source: PoolMemory, destination: PoolMemory) -> AsyncIterator[BlockReader]:
    server = transport.serve(source)
    offer = await server.start()
    reader = transport.reader(offer, owner=source.incarnation, pool=destination)
    try:
        await reader.open()
        yield reader
    finally:
        await reader.close()
        await server.close()


@pytest.mark.parametrize("layout", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize(
    ("blocks", "into"),
    [
        ([5], [9]),
        ([0, 1, 2, 3], [0, 1, 2, 3]),
        ([63, 7, 20, 21, 22, 3], [4, 60, 9, 10, 2, 63]),
        (list(range(64)), list(range(63, -1, -1))),
        ([], []),
    ],
    ids=["one", "a run", "scattered", "all, reversed", "none"],
)
async def test_blocks_arrive_byte_for_byte_where_they_were_sent(
    transport: Transport, layout: KVLayout, blocks: list[int], into: list[int]
) -> None:
    source, destination = owned_pool(layout), own_pool(layout)
    async with connected(transport, source, destination) as reader:
        await reader.read(refs(*blocks), ids(*into), secret=SECRET)
    np.testing.assert_array_equal(destination.blocks[into], source.blocks[blocks])
    untouched = [block for block in range(NUM_BLOCKS) if block not in into]
    assert not destination.blocks[untouched].any()


async def test_blocks_larger_than_any_buffer_arrive(transport: Transport) -> None:
    source, destination = owned_pool(HUGE, 5), allocate(HUGE, 5, Incarnation(new_id()))
    async with connected(transport, source, destination) as reader:
        await reader.read(refs(4, 0, 1, 2, 3), ids(0, 1, 2, 3, 4), secret=SECRET)
    np.testing.assert_array_equal(destination.blocks, source.blocks[[4, 0, 1, 2, 3]])


async def test_reads_may_overlap(transport: Transport) -> None:
    source, destination = owned_pool(LARGE), own_pool(LARGE)
    async with connected(transport, source, destination) as reader:
        await asyncio.gather(
            *(reader.read(refs(*range(k, 64, 8)), ids(*range(k, 64, 8)), secret=SECRET) for k in range(8))
        )
    np.testing.assert_array_equal(destination.blocks, source.blocks)


async def test_two_readers_share_an_owner(transport: Transport) -> None:
    source, first, second = owned_pool(LARGE), own_pool(LARGE), own_pool(LARGE)
    server = transport.serve(source)
    offer = await server.start()
    readers = [transport.reader(offer, owner=source.incarnation, pool=pool) for pool in (first, second)]
    for reader in readers:
        await reader.open()
    await asyncio.gather(*(reader.read(refs(*range(64)), ids(*range(64)), secret=SECRET) for reader in readers))
    await readers[0].close()
    await readers[1].read(refs(1), ids(2), secret=SECRET)
    await readers[1].close()
    await server.close()
    np.testing.assert_array_equal(first.blocks, source.blocks)
    np.testing.assert_array_equal(second.blocks[2], source.blocks[1])


async def test_a_generation_that_moved_before_the_read_is_stale(transport: Transport) -> None:
    source, destination = owned_pool(), own_pool()
    async with connected(transport, source, destination) as reader:
        source.generations[4] += 1
        with pytest.raises(StaleBlockError, match="block 4 is at generation 8, 7 was promised"):
            await reader.read(refs(3, 4, 5), ids(3, 4, 5), secret=SECRET)
        await reader.read(refs(3, 5), ids(0, 1), secret=SECRET)
    np.testing.assert_array_equal(destination.blocks[[0, 1]], source.blocks[[3, 5]])


async def test_only_the_secret_of_an_open_call_reads_its_blocks(transport: Transport) -> None:
    source, destination = owned_pool(), own_pool()
    wrong = {"missing": b"", "wrong": b"a guess", "revoked": b"an ended call's"}
    source.grants.grant(wrong["revoked"], refs(5), request=RequestId("ended"))
    source.grants.revoke(wrong["revoked"])
    async with connected(transport, source, destination) as reader:
        for secret in wrong.values():
            with pytest.raises(StaleBlockError):
                await reader.read(refs(5), ids(9), secret=secret)
        assert not destination.blocks.any()
        await reader.read(refs(5), ids(9), secret=SECRET)
    np.testing.assert_array_equal(destination.blocks[9], source.blocks[5])


@pytest.mark.parametrize("transport", CHECKED_EACH_TIME, indirect=True)
async def test_another_calls_secret_opens_its_own_blocks_only(transport: Transport) -> None:
    source, destination = owned_pool(), own_pool()
    source.grants.grant(b"another call's", refs(1, 2), request=RequestId("another"))
    async with connected(transport, source, destination) as reader:
        for blocks in ([5], [1, 5], [2, 1, 0]):
            with pytest.raises(StaleBlockError):
                await reader.read(refs(*blocks), ids(*range(len(blocks))), secret=b"another call's")
        assert not destination.blocks[5:].any()
        await reader.read(refs(2, 1), ids(0, 1), secret=b"another call's")
    np.testing.assert_array_equal(destination.blocks[[0, 1]], source.blocks[[2, 1]])


@pytest.mark.parametrize("transport", CHECKED_EACH_TIME, indirect=True)
async def test_a_secret_opens_nothing_more_once_its_call_has_ended(transport: Transport) -> None:
    source, destination = owned_pool(), own_pool()
    async with connected(transport, source, destination) as reader:
        await reader.read(refs(5), ids(9), secret=SECRET)
        source.grants.revoke(SECRET)
        with pytest.raises(StaleBlockError):
            await reader.read(refs(5), ids(10), secret=SECRET)


async def test_a_call_that_ends_during_its_read_breaks_no_other_read(transport: Transport) -> None:
    source, destination = owned_pool(LARGE), own_pool(LARGE)
    source.grants.grant(b"ends", refs(*range(32)), request=RequestId("ends"))
    async with connected(transport, source, destination) as reader:
        ends = asyncio.ensure_future(reader.read(refs(*range(32)), ids(*range(32)), secret=b"ends"))
        goes_on = asyncio.ensure_future(reader.read(refs(*range(32, 64)), ids(*range(32, 64)), secret=SECRET))
        await asyncio.sleep(0)
        source.grants.revoke(b"ends")
        await asyncio.wait([ends, goes_on])
        assert ends.exception() is None or isinstance(ends.exception(), StaleBlockError)
        assert goes_on.exception() is None
    np.testing.assert_array_equal(destination.blocks[32:], source.blocks[32:])


@pytest.mark.parametrize("transport", ["shm"], indirect=True)
async def test_shared_memory_stays_in_view_once_a_secret_has_opened_it(transport: Transport) -> None:
    """What `kv_transfer.shm` says of itself."""
    source, destination = owned_pool(), own_pool()
    async with connected(transport, source, destination) as reader:
        await reader.read(refs(5), ids(9), secret=SECRET)
        source.grants.revoke(SECRET)
        await reader.read(refs(6), ids(9), secret=b"")
    np.testing.assert_array_equal(destination.blocks[9], source.blocks[6])


class Tripwire(np.ndarray[Any, Any]):
    """Blocks that call `touched` whenever one of them is taken from or written to."""

    touched: Callable[[], None] | None = None

    def __array_finalize__(self, origin: Any) -> None:
        self.touched = getattr(origin, "touched", None)

    def __getitem__(self, key: Any) -> Any:
        if self.touched is not None:
            self.touched()
        return super().__getitem__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        if self.touched is not None:
            self.touched()
        super().__setitem__(key, value)


def tripwired(pool: PoolMemory, touched: Callable[[], None]) -> PoolMemory:
    blocks = pool.blocks.view(Tripwire)
    blocks.touched = touched
    return replace(pool, blocks=blocks)


@pytest.mark.parametrize("layout", [SMALL, LARGE], ids=["small", "large"])
async def test_a_generation_that_moves_during_the_read_is_stale(transport: Transport, layout: KVLayout) -> None:
    """Every transport checks, then touches the blocks on one side or the other, then checks again."""
    source, destination = owned_pool(layout), own_pool(layout)

    def reuse() -> None:
        source.generations[6] = GENERATION + 1

    served = tripwired(source, reuse) if transport.name != "shm" else source
    landing = tripwired(destination, reuse) if transport.name == "shm" else destination
    async with connected(transport, served, landing) as reader:
        assert source.generations[6] == GENERATION
        with pytest.raises(StaleBlockError):
            await reader.read(refs(5, 6), ids(0, 1), secret=SECRET)
        await reader.read(refs(5, 7), ids(0, 1), secret=SECRET)
    np.testing.assert_array_equal(destination.blocks[[0, 1]], source.blocks[[5, 7]])


async def test_another_incarnation_is_refused(transport: Transport) -> None:
    server = transport.serve(owned_pool())
    reader = transport.reader(await server.start(), owner=Incarnation("f" * 32), pool=own_pool())
    with pytest.raises(TransferError, match=r"incarnation f{32} is gone"):
        await reader.open()
    await server.close()


async def test_another_layout_is_refused_with_its_reason(transport: Transport) -> None:
    source = owned_pool()
    server = transport.serve(source)
    offer = await server.start()
    reader = transport.reader(offer, owner=source.incarnation, pool=own_pool(replace_block_size(SMALL, 8)))
    with pytest.raises(TransferError, match="block_size 8 here, 4 there"):
        await reader.open()
    await server.close()


def replace_block_size(layout: KVLayout, block_size: int) -> KVLayout:
    return msgspec.structs.replace(layout, block_size=block_size)


@pytest.mark.parametrize(
    ("source", "into"),
    [([64], [0]), ([-1], [0]), ([0], [64]), ([0], [-1]), ([0, 1], [0]), ([0, 1], [5, 5]), ([1 << 62], [0])],
)
async def test_ids_outside_a_pool_are_refused(transport: Transport, source: list[int], into: list[int]) -> None:
    async with connected(transport, owned_pool(), own_pool()) as reader:
        with pytest.raises(TransferError):
            await reader.read(refs(*source), ids(*into), secret=SECRET)
        await reader.read(refs(1), ids(1), secret=SECRET)


async def test_nobody_at_the_address_is_a_transfer_error(transport: Transport) -> None:
    source = owned_pool()
    server = transport.serve(source)
    offer = await server.start()
    await server.close()
    reader = transport.reader(offer, owner=source.incarnation, pool=own_pool())
    with pytest.raises(TransferError):
        await reader.open()
    await reader.close()


async def test_a_cancelled_read_is_settled_when_it_returns(transport: Transport) -> None:
    """Whenever it is cancelled: afterwards nothing writes to its blocks, and other reads work."""
    source, destination = owned_pool(LARGE), own_pool(LARGE)
    async with connected(transport, source, destination) as reader:
        for num_turns in range(12):
            read = asyncio.ensure_future(reader.read(refs(*range(32)), ids(*range(32)), secret=SECRET))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            was_done = read.done()
            read.cancel()
            await asyncio.wait([read])
            assert was_done or read.cancelled()
            destination.blocks[:32] = 170
            await reader.read(refs(*range(32, 64)), ids(*range(32, 64)), secret=SECRET)
            assert (destination.blocks[:32] == 170).all()
    np.testing.assert_array_equal(destination.blocks[32:], source.blocks[32:])


@pytest.mark.parametrize("transport", ["shm", "tcp"], indirect=True)
async def test_a_cancelled_read_does_not_return_while_a_copy_is_being_made(transport: Transport) -> None:
    source, destination = owned_pool(LARGE), own_pool(LARGE)
    loop = asyncio.get_running_loop()
    copying, gate = asyncio.Event(), threading.Event()

    def hold_up() -> None:
        if threading.current_thread() is not threading.main_thread():
            loop.call_soon_threadsafe(copying.set)
            gate.wait(10)

    async with connected(transport, source, tripwired(destination, hold_up)) as reader:
        read = asyncio.ensure_future(reader.read(refs(1, 3), ids(1, 3), secret=SECRET))
        await copying.wait()
        read.cancel()
        for _ in range(20):
            await asyncio.sleep(0)
        assert not read.done()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await read
        assert not destination.blocks[3].any(), "a copy was begun after the cancellation"


async def test_closing_the_reader_ends_its_reads(transport: Transport) -> None:
    source, destination = owned_pool(LARGE), own_pool(LARGE)
    async with connected(transport, source, destination) as reader:
        reads = [asyncio.ensure_future(reader.read(refs(*range(64)), ids(*range(64)), secret=SECRET)) for _ in range(4)]
        await asyncio.sleep(0)
        await reader.close()
        destination.blocks[:] = 170
        await asyncio.wait(reads)
        errors = [read.exception() for read in reads]
        assert all(error is None or isinstance(error, TransferError | PeerLostError) for error in errors)
        assert any(errors)
        assert (destination.blocks == 170).all()
        with pytest.raises((TransferError, PeerLostError)):
            await reader.read(refs(1), ids(1), secret=SECRET)


async def test_an_owner_that_closes_is_a_lost_peer(transport: Transport) -> None:
    source = owned_pool()
    server = transport.serve(source)
    reader = transport.reader(await server.start(), owner=source.incarnation, pool=own_pool())
    await reader.open()
    await server.close()
    with pytest.raises(PeerLostError):
        async with asyncio.timeout(60):
            await reader.read(refs(1), ids(1), secret=SECRET)
    await reader.close()


async def test_an_owner_lists_who_reads_from_it(transport: Transport) -> None:
    source, first, second = owned_pool(), own_pool(), own_pool()
    server = transport.serve(source)
    offer = await server.start()
    readers = [transport.reader(offer, owner=source.incarnation, pool=pool) for pool in (first, second)]
    assert server.connections() == []
    for reader in readers:
        await reader.open()
        await reader.read(refs(1), ids(1), secret=SECRET)
    await until(
        lambda: server.connections() == [HeldConnection(transport.name, one.incarnation) for one in (first, second)]
    )
    await readers[0].close()
    await until(lambda: server.connections() == [HeldConnection(transport.name, second.incarnation)])
    await readers[1].close()
    await until(lambda: server.connections() == [])
    await server.close()


async def until(holds: Callable[[], bool], *, within_s: float = 60.0) -> None:
    """What one end of a connection does, the other end learns a moment later."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(within_s):
        while not holds():
            moment = asyncio.Event()
            loop.call_later(0.005, moment.set)
            await moment.wait()


def left() -> tuple[int, int]:
    """Open descriptors and threads."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


async def test_nothing_is_left_behind(transport: Transport) -> None:
    async def use() -> None:
        async with connected(transport, source, destination) as reader:
            await reader.read(refs(*range(64)), ids(*range(64)), secret=SECRET)
            with pytest.raises(StaleBlockError):
                await reader.read(refs(1, generation=1), ids(1), secret=SECRET)

    source, destination = owned_pool(LARGE), own_pool(LARGE)
    await use()  # the first use starts what its library keeps for the process's life
    before = left()
    for _ in range(3):
        await use()
    assert left() == before

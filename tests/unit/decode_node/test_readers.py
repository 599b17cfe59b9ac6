"""Readers are shared, replaced when they fail, and closed when nobody needs them."""

import asyncio
from collections.abc import Sequence

import pytest

from common.errors import PeerLostError, StaleBlockError, TransferError
from common.messages import BlockId, BlockRef, HeldConnection, Incarnation, NodeAddress, NodeId
from decode_node.readers import Readers
from kv_transfer.base import BlockReader

OWNER = NodeAddress(NodeId("prefill-0"), Incarnation("a"), "tcp://node:1")


class ScriptedReader:
    """Raises what it was told to; `gate` holds its reads."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.closed = asyncio.Event()

    async def open(self) -> None: ...

    async def read(self, refs: Sequence[BlockRef], into: Sequence[BlockId], *, secret: bytes) -> None:
        await self.gate.wait()
        if self.error is not None:
            raise self.error

    async def close(self) -> None:
        self.closed.set()


class Bench:
    def __init__(self, *, idle_s: float = 60.0) -> None:
        self.made: list[ScriptedReader] = []
        self.refuse = False
        self.readers = Readers(self.connect, idle_s=idle_s)

    async def connect(self, owner: NodeAddress) -> tuple[str, BlockReader]:
        if self.refuse:
            raise TransferError("nobody there")
        self.made.append(ScriptedReader())
        return "scripted", self.made[-1]

    async def read(self) -> None:
        await self.readers.read(OWNER, [], [], secret=b"secret")


async def test_one_reader_serves_all_reads_of_an_owner() -> None:
    bench = Bench()
    await asyncio.gather(*[bench.read() for _ in range(5)])
    assert len(bench.made) == 1
    await bench.readers.close()
    assert bench.made[0].closed.is_set()


async def test_a_failed_reader_is_replaced_and_a_second_failure_of_it_spares_the_replacement() -> None:
    bench = Bench()
    await bench.read()
    [first] = bench.made
    first.error = PeerLostError("gone")
    first.gate.clear()
    slow = asyncio.create_task(bench.read())
    await asyncio.wait([slow], timeout=0)
    first.gate.set()
    with pytest.raises(PeerLostError):
        await bench.read()
    await bench.read()
    with pytest.raises(PeerLostError):
        await slow
    await bench.read()
    _, second = bench.made
    assert first.closed.is_set()
    assert not second.closed.is_set()
    await bench.readers.close()


async def test_a_stale_block_is_no_fault_of_the_reader() -> None:
    bench = Bench()
    await bench.read()
    bench.made[0].error = StaleBlockError("moved")
    with pytest.raises(StaleBlockError):
        await bench.read()
    bench.made[0].error = None
    await bench.read()
    assert len(bench.made) == 1
    await bench.readers.close()


async def test_an_owner_that_cannot_be_reached_is_tried_anew_by_the_next_read() -> None:
    bench = Bench()
    bench.refuse = True
    with pytest.raises(TransferError):
        await bench.read()
    bench.refuse = False
    await bench.read()
    await bench.readers.close()


async def test_a_reader_that_nobody_uses_is_closed() -> None:
    bench = Bench(idle_s=0.0)
    await bench.read()
    async with asyncio.timeout(5):
        await bench.made[0].closed.wait()
    await bench.readers.close()


async def test_open_readers_are_listed_with_their_reads_until_their_owner_is_lost() -> None:
    bench = Bench()
    assert bench.readers.connections() == []
    await bench.read()
    assert bench.readers.connections() == [HeldConnection("scripted", OWNER.incarnation)]
    [reader] = bench.made
    reader.gate.clear()
    read = asyncio.create_task(bench.read())
    await asyncio.wait([read], timeout=0)
    assert bench.readers.connections() == [HeldConnection("scripted", OWNER.incarnation, 1)]
    reader.gate.set()
    await read
    bench.readers.lose(Incarnation("somebody else"))
    assert not reader.closed.is_set()
    bench.readers.lose(OWNER.incarnation)
    assert bench.readers.connections() == []
    await reader.closed.wait()
    await bench.readers.close()

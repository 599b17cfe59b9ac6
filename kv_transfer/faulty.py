"""A transport that fails on purpose, around any other: how tests make transfers slow, stale, broken or stuck."""

import asyncio
from collections.abc import Sequence

from common.errors import PeerLostError, StaleBlockError, TransferError
from common.kv_cache.memory import PoolMemory
from common.messages import BlockId, BlockRef, Incarnation, Offer
from kv_transfer.base import BlockReader, BlockServer, Transport
from kv_transfer.blocks import settled

_NONSENSE = 0xA5


class Faults:
    """What goes wrong, for all readers of one `FaultyTransport`. Reads are counted from 1, in order of asking.

    Change it at any time; it applies to reads that start afterwards.
    """

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.fail_reads: set[int] = set()
        """These raise TransferError and move nothing."""
        self.stale_reads: set[int] = set()
        """These move what the blocks have become meanwhile and then raise StaleBlockError."""
        self.stubborn = False
        """A held read that is cancelled stays held, and then writes nonsense: the hardware was already moving bytes."""
        self.num_reads = 0
        self.num_held = 0
        self.held = asyncio.Event()
        """Set while at least one read is being held."""
        self._released = asyncio.Event()
        self._released.set()
        self._dropped = asyncio.Event()

    def hold(self) -> None:
        """Reads wait before their first byte until `release`."""
        self._released.clear()

    def release(self) -> None:
        self._released.set()

    def drop(self) -> None:
        """The connection breaks: every read in progress and to come raises PeerLostError."""
        self._dropped.set()

    def restore(self) -> None:
        self._dropped.clear()

    async def before_read(self, number: int) -> None:
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        if not self._released.is_set():
            await self._wait_for_release()
        self.check_connection()
        if number in self.fail_reads:
            raise TransferError(f"faulty: read {number} was told to fail")

    async def after_read(self, number: int) -> None:
        self.check_connection()
        if number in self.stale_reads:
            raise StaleBlockError(f"faulty: read {number} was told to be stale")

    def check_connection(self) -> None:
        if self._dropped.is_set():
            raise PeerLostError("faulty: the connection was dropped")

    async def _wait_for_release(self) -> None:
        self.num_held += 1
        self.held.set()
        waits = [asyncio.ensure_future(event.wait()) for event in (self._released, self._dropped)]
        first = asyncio.ensure_future(asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED))
        try:
            if self.stubborn:
                await settled(first, lambda: None)
            else:
                await first
        finally:
            for wait in (*waits, first):
                wait.cancel()
            self.num_held -= 1
            if self.num_held == 0:
                self.held.clear()


class FaultyTransport:
    def __init__(self, inner: Transport, faults: Faults) -> None:
        self.name = inner.name
        self._inner = inner
        self._faults = faults

    def serve(self, pool: PoolMemory, *, listen_host: str = "127.0.0.1") -> BlockServer:
        return self._inner.serve(pool, listen_host=listen_host)

    def reader(self, offer: Offer, *, owner: Incarnation, pool: PoolMemory) -> "FaultyReader":
        return FaultyReader(self._inner.reader(offer, owner=owner, pool=pool), self._faults, pool)


class FaultyReader:
    def __init__(self, inner: BlockReader, faults: Faults, pool: PoolMemory) -> None:
        self._inner = inner
        self._faults = faults
        self._pool = pool

    async def open(self) -> None:
        self._faults.check_connection()
        await self._inner.open()

    async def read(self, refs: Sequence[BlockRef], into: Sequence[BlockId], *, secret: bytes) -> None:
        self._faults.num_reads += 1
        number = self._faults.num_reads
        try:
            await self._faults.before_read(number)
        except asyncio.CancelledError:
            if self._faults.stubborn:
                self._scribble(into)
            raise
        await self._inner.read(refs, into, secret=secret)
        try:
            await self._faults.after_read(number)
        except StaleBlockError:
            self._scribble(into)
            raise

    def _scribble(self, into: Sequence[BlockId]) -> None:
        """Bytes that nobody wanted: whoever computes with them gives another answer."""
        for block in into:
            self._pool.blocks[block] = _NONSENSE

    async def close(self) -> None:
        await self._inner.close()

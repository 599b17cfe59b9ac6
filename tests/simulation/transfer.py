"""Block reads that take virtual time and fail in every way a wire can, over the in-memory transport.

A read copies block by block, checking each, with time in between. It may be slow, fail midway, move its bytes and
be called stale, hang while its owner is out of reach, or be *stubborn*: cancelled, it goes on writing to its end.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import dataclass
from typing import Any

from common.errors import PeerLostError, StaleBlockError, TransferError
from common.kv_cache.memory import PoolMemory
from common.messages import BlockId, BlockRef, Incarnation, Offer
from kv_transfer.base import BlockReader, BlockServer
from kv_transfer.blocks import settled
from kv_transfer.memory import MemoryTransport
from tests.simulation.virtual_time import pause

STALL_S = 0.8
"""A read that gets no byte for so long gives its owner up."""
_LOOK_S = 0.2
_NONSENSE = 0xA5
"""What a read that did not end well leaves in its blocks, in its last moment."""


class _SimulatedStaleError(StaleBlockError):
    """Nothing was reused."""


@dataclass(slots=True, kw_only=True)
class ReadFaults:
    """Probabilities, but for `block_s`: how long a block takes at most."""

    block_s: float = 0.001
    slow: float = 0.0
    fail: float = 0.0
    stale: float = 0.0
    stubborn: float = 0.0
    no_connection: float = 0.0


class DataPlane:
    """What becomes of reads, and what became of them."""

    def __init__(self, rng: random.Random, is_blocked: Callable[[Incarnation, Incarnation], bool]) -> None:
        self.faults = ReadFaults()
        self.rng = rng
        self.is_blocked = is_blocked
        self.num_reads = 0
        self.reading: Counter[Incarnation] = Counter()
        """Reads in flight, by reader."""
        self.pairs: Counter[tuple[Incarnation, Incarnation]] = Counter()
        """The same by (owner, reader)."""
        self.num_stale = 0
        """Reads that somebody still wanted and that found a block reused."""
        self.ambush: Callable[[], None] | None = None
        """Done once, in the middle of the next read."""
        self._inner = MemoryTransport()

    def spring(self) -> None:
        act, self.ambush = self.ambush, None
        if act is not None:
            asyncio.get_running_loop().call_soon(act, context=Context())

    def serve(self, pool: PoolMemory) -> BlockServer:
        return self._inner.serve(pool)

    def reader(self, offer: Offer, *, owner: Incarnation, pool: PoolMemory) -> "SimulatedReader":
        return SimulatedReader(self, self._inner.reader(offer, owner=owner, pool=pool), pool, owner)


class SimulatedReader:
    def __init__(self, plane: DataPlane, inner: BlockReader, pool: PoolMemory, owner: Incarnation) -> None:
        self._plane = plane
        self._inner = inner
        self._pool = pool
        self._pair = (owner, pool.incarnation)

    async def open(self) -> None:
        if self._plane.rng.random() < self._plane.faults.no_connection:
            raise TransferError("simulated: no connection")
        await self._reach()
        await self._inner.open()

    async def read(self, refs: Sequence[BlockRef], into: Sequence[BlockId], **secrets: Any) -> None:
        plane = self._plane
        plane.num_reads += 1
        plane.reading[self._pair[1]] += 1
        plane.pairs[self._pair] += 1
        copying = asyncio.ensure_future(self._copy(refs, into, secrets))
        is_stubborn = plane.rng.random() < plane.faults.stubborn
        try:
            await settled(copying, lambda: None if is_stubborn else _stop(copying))
        except (asyncio.CancelledError, TransferError) as error:
            plane.num_stale += isinstance(error, StaleBlockError) and not isinstance(error, _SimulatedStaleError)
            for block in into:
                self._pool.blocks[block] = _NONSENSE
            raise
        finally:
            plane.reading[self._pair[1]] -= 1
            plane.pairs[self._pair] -= 1

    async def close(self) -> None:
        await self._inner.close()

    async def _copy(self, refs: Sequence[BlockRef], into: Sequence[BlockId], secrets: dict[str, Any]) -> None:
        plane, rng = self._plane, self._plane.rng
        faults = plane.faults
        slowness = 50.0 if rng.random() < faults.slow else 1.0
        fails_at = rng.randrange(len(refs)) if rng.random() < faults.fail else None
        is_stale = rng.random() < faults.stale
        for index, (ref, block) in enumerate(zip(refs, into, strict=True)):
            await pause(faults.block_s * slowness * rng.random())
            if index == len(refs) // 2:
                plane.spring()
            await self._reach()
            if index == fails_at:
                raise TransferError("simulated: the read failed")
            await self._inner.read([ref], [block], **secrets)
        if is_stale:
            raise _SimulatedStaleError("simulated: a block was reused")

    async def _reach(self) -> None:
        """Waits for an owner that does not answer, for a while."""
        waited_s = 0.0
        while self._plane.is_blocked(*self._pair):
            if waited_s >= STALL_S:
                raise PeerLostError("simulated: the owner does not answer")
            await pause(_LOOK_S)
            waited_s += _LOOK_S


def _stop(copying: "asyncio.Future[None]") -> None:
    copying.cancel()

"""Blocks inside one process: for tests that run a whole cluster in it. Not in `TRANSPORTS`."""

import asyncio
from collections.abc import Sequence

from common.clock import new_id
from common.errors import PeerLostError, TransferError
from common.kv_cache.memory import PoolMemory
from common.messages import BlockId, BlockRef, HeldConnection, Incarnation, Offer
from kv_transfer.blocks import check_destination, check_generations, check_layout, check_readable, check_source

_served: dict[str, "MemoryServer"] = {}


class MemoryTransport:
    name = "memory"

    def serve(self, pool: PoolMemory, *, listen_host: str = "127.0.0.1") -> "MemoryServer":
        return MemoryServer(pool)

    def reader(self, offer: Offer, *, owner: Incarnation, pool: PoolMemory) -> "MemoryReader":
        return MemoryReader(offer, owner=owner, pool=pool)


class MemoryServer:
    def __init__(self, pool: PoolMemory) -> None:
        self.pool = pool
        self.readers: dict[MemoryReader, Incarnation] = {}
        self._address = new_id()

    async def start(self) -> Offer:
        _served[self._address] = self
        return Offer(transport="memory", address=self._address)

    def connections(self) -> list[HeldConnection]:
        return [HeldConnection("memory", reader) for reader in self.readers.values()]

    async def close(self) -> None:
        _served.pop(self._address, None)


class MemoryReader:
    def __init__(self, offer: Offer, *, owner: Incarnation, pool: PoolMemory) -> None:
        self._address = offer.address
        self._owner = owner
        self._pool = pool
        self._open = False

    async def open(self) -> None:
        server = _served.get(self._address)
        if server is None:
            raise TransferError("memory: nobody serves there")
        source = server.pool
        if source.incarnation != self._owner:
            raise TransferError(f"memory: incarnation {self._owner} is gone, {source.incarnation} is here")
        check_layout(self._pool.layout, source.layout)
        self._open = True
        server.readers[self] = self._pool.incarnation

    async def read(self, refs: Sequence[BlockRef], into: Sequence[BlockId], *, secret: bytes) -> None:
        check_destination(refs, into, self._pool.num_blocks)
        for ref, block in zip(refs, into, strict=True):
            source = self._source()
            check_source([ref], source.num_blocks)
            check_readable(source, [ref], secret)
            self._pool.blocks[block] = source.blocks[ref.block]
            await asyncio.sleep(0)  # others get their turn, as they do with a real wire
        source = self._source()
        check_source(refs, source.num_blocks)
        check_generations(refs, source.generations)

    def _source(self) -> PoolMemory:
        if not self._open:
            raise TransferError("memory: the reader is not open")
        server = _served.get(self._address)
        if server is None:
            raise PeerLostError("memory: the owner is gone")
        return server.pool

    async def close(self) -> None:
        self._open = False
        if server := _served.get(self._address):
            server.readers.pop(self, None)

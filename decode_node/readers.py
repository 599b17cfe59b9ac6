"""Open readers, one per owner incarnation: made on first use, dropped when one fails or is not used for a while.

The time limit matters: a mapped pool keeps its memory alive after its owner's death.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from common import telemetry
from common.errors import BatonError, StaleBlockError
from common.messages import BlockId, BlockRef, Incarnation, NodeAddress
from kv_transfer.base import BlockReader

log = telemetry.logger(__name__)

IDLE_S = 30.0

Connect = Callable[[NodeAddress], Awaitable[tuple[str, BlockReader]]]
"""Opens a reader of that node's pool; returns the transport's name too. TransferError if none works."""


class Readers:
    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._opening: dict[Incarnation, asyncio.Task[BlockReader]] = {}
        self._reads: dict[Incarnation, int] = {}  # in flight
        self._expiring: dict[Incarnation, asyncio.TimerHandle] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def read(self, owner: NodeAddress, refs: Sequence[BlockRef], into: Sequence[BlockId]) -> None:
        """As `BlockReader.read`. A reader that failed, other than by a stale block, is not used again."""
        self._keep(owner.incarnation)
        try:
            reader = await self._reader(owner)
            await reader.read(refs, into)
        except StaleBlockError:
            raise
        except BatonError:
            await self.drop(owner.incarnation)
            raise
        finally:
            self._let_expire(owner.incarnation)

    async def drop(self, owner: Incarnation) -> None:
        """Close the reader of an owner that is gone."""
        opening = self._opening.pop(owner, None)
        if opening is None:
            return
        opening.cancel()
        with suppress(asyncio.CancelledError, BatonError):
            await (await opening).close()

    async def close(self) -> None:
        for owner in list(self._opening):
            await self.drop(owner)
        for timer in self._expiring.values():
            timer.cancel()
        self._expiring.clear()
        while self._closing:
            await asyncio.wait(self._closing)

    def _keep(self, owner: Incarnation) -> None:
        self._reads[owner] = self._reads.get(owner, 0) + 1
        if timer := self._expiring.pop(owner, None):
            timer.cancel()

    def _let_expire(self, owner: Incarnation) -> None:
        self._reads[owner] -= 1
        if not self._reads[owner]:
            del self._reads[owner]
            self._expiring[owner] = asyncio.get_running_loop().call_later(IDLE_S, self._expire, owner)

    def _expire(self, owner: Incarnation) -> None:
        del self._expiring[owner]
        task = asyncio.get_running_loop().create_task(self.drop(owner))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _reader(self, owner: NodeAddress) -> BlockReader:
        opening = self._opening.get(owner.incarnation)
        if opening is None:
            opening = self._opening[owner.incarnation] = asyncio.create_task(self._open(owner))
        # Several calls wait for one handshake; one of them leaving must not end it for the others.
        return await asyncio.shield(opening)

    async def _open(self, owner: NodeAddress) -> BlockReader:
        transport, reader = await self._connect(owner)
        log.info("blocks will come over", owner=owner.node, transport=transport)
        return reader

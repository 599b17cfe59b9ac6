"""Open readers, one per owner incarnation, made on first use and dropped when the owner is lost."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from common.errors import BatonError, StaleBlockError
from common.messages import BlockId, BlockRef, Incarnation, NodeAddress
from kv_transfer.base import BlockReader

log = logging.getLogger(__name__)

Connect = Callable[[NodeAddress], Awaitable[tuple[str, BlockReader]]]
"""Opens a reader of that node's pool; returns the transport's name too. TransferError if none works."""


class Readers:
    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._opening: dict[Incarnation, asyncio.Task[BlockReader]] = {}

    async def read(self, owner: NodeAddress, refs: Sequence[BlockRef], into: Sequence[BlockId]) -> None:
        """As `BlockReader.read`. A reader that failed, other than by a stale block, is not used again."""
        reader = await self._reader(owner)
        try:
            await reader.read(refs, into)
        except StaleBlockError:
            raise
        except BatonError:
            await self.drop(owner.incarnation)
            raise

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

    async def _reader(self, owner: NodeAddress) -> BlockReader:
        opening = self._opening.get(owner.incarnation)
        if opening is None:
            opening = self._opening[owner.incarnation] = asyncio.create_task(self._open(owner))
        try:
            # Several calls wait for one handshake; one of them leaving must not end it for the others.
            return await asyncio.shield(opening)
        except BatonError:
            if self._opening.get(owner.incarnation) is opening:
                del self._opening[owner.incarnation]
            raise

    async def _open(self, owner: NodeAddress) -> BlockReader:
        transport, reader = await self._connect(owner)
        log.info("blocks will come over", extra={"owner": owner.node, "transport": transport})
        return reader

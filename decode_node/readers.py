"""Open readers, one per owner incarnation: made on first use, dropped when one fails or is not used for a while.

Both matter: a mapped pool keeps its memory alive after its owner's death. Of that the links for calls tell, for
a reader that nobody uses hears nothing (`lose`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from common import telemetry
from common.errors import BatonError, StaleBlockError
from common.messages import BlockId, BlockRef, HeldConnection, Incarnation, NodeAddress
from kv_transfer.base import BlockReader

log = telemetry.logger(__name__)

IDLE_S = 30.0

Opened = tuple[str, BlockReader]
"""A reader and the name of its transport."""
Connect = Callable[[NodeAddress], Awaitable[Opened]]
"""Opens a reader of that node's pool. TransferError if no transport works."""


class Readers:
    def __init__(self, connect: Connect, *, idle_s: float = IDLE_S) -> None:
        self._connect = connect
        self._idle_s = idle_s
        self._opening: dict[Incarnation, asyncio.Task[Opened]] = {}
        self._reads: dict[Incarnation, int] = {}  # in flight
        self._expiring: dict[Incarnation, asyncio.TimerHandle] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def read(
        self, owner: NodeAddress, refs: Sequence[BlockRef], into: Sequence[BlockId], *, secret: bytes
    ) -> None:
        """As `BlockReader.read`. A reader that failed, other than by a stale block, is not used again."""
        self._keep(owner.incarnation)
        opening = self._opened(owner)
        try:
            # Several calls wait for one handshake; one of them leaving must not end it for the others.
            _, reader = await asyncio.shield(opening)
            await reader.read(refs, into, secret=secret)
        except StaleBlockError:
            raise
        except BatonError:
            self._drop(owner.incarnation, opening)
            raise
        finally:
            self._let_expire(owner.incarnation)

    def connections(self) -> list[HeldConnection]:
        """Those that are open, with their reads in flight."""
        return [
            HeldConnection(opening.result()[0], owner, self._reads.get(owner, 0))
            for owner, opening in self._opening.items()
            if opening.done() and not opening.cancelled() and opening.exception() is None
        ]

    def lose(self, owner: Incarnation) -> None:
        """This process is dead, or was cut off and has given its calls up: nothing of its pool is kept here."""
        if opening := self._opening.get(owner):
            self._drop(owner, opening)

    async def close(self) -> None:
        for timer in self._expiring.values():
            timer.cancel()
        self._expiring.clear()
        for owner, opening in list(self._opening.items()):
            self._drop(owner, opening)
        while self._closing:
            await asyncio.wait(self._closing)

    # --- one reader an owner ---------------------------------------------------------------------------------

    def _opened(self, owner: NodeAddress) -> "asyncio.Task[Opened]":
        opening = self._opening.get(owner.incarnation)
        if opening is None:
            opening = self._opening[owner.incarnation] = asyncio.create_task(self._open(owner))
        return opening

    async def _open(self, owner: NodeAddress) -> Opened:
        transport, reader = await self._connect(owner)
        log.info("blocks will come over", owner=owner.node, transport=transport)
        return transport, reader

    def _drop(self, owner: Incarnation, opening: "asyncio.Task[Opened]") -> None:
        """Close this reader; a later one of the same owner, made since, stays."""
        if self._opening.get(owner) is not opening:
            return
        del self._opening[owner]
        opening.cancel()
        closing = asyncio.create_task(_close(opening))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    # --- idleness ----------------------------------------------------------------------------------------------

    def _keep(self, owner: Incarnation) -> None:
        self._reads[owner] = self._reads.get(owner, 0) + 1
        if timer := self._expiring.pop(owner, None):
            timer.cancel()

    def _let_expire(self, owner: Incarnation) -> None:
        self._reads[owner] -= 1
        if not self._reads[owner]:
            del self._reads[owner]
            self._expiring[owner] = asyncio.get_running_loop().call_later(self._idle_s, self._expire, owner)

    def _expire(self, owner: Incarnation) -> None:
        del self._expiring[owner]
        self.lose(owner)


async def _close(opening: "asyncio.Task[Opened]") -> None:
    await asyncio.wait([opening])
    if not opening.cancelled() and opening.exception() is None:
        _, reader = opening.result()
        await reader.close()

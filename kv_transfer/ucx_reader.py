"""The reader's side of the ucx transport: posts receives into its own pool, then asks for the blocks."""

import asyncio
from collections.abc import Sequence
from itertools import count
from urllib.parse import parse_qs, urlsplit

import msgspec

from common.errors import BatonError, PeerLostError, StaleBlockError, TransferError
from common.kv_cache.memory import PoolMemory
from common.messages import BlockId, BlockRef, Incarnation, Offer
from kv_transfer import ucx_wire as wire
from kv_transfer.blocks import check_destination, check_layout, check_source, settled
from kv_transfer.stall import StallWatch
from kv_transfer.ucx_engine import ENGINE

_CONNECT_TIMEOUT_S = 3.0


class UcxReader:
    def __init__(self, offer: Offer, *, owner: Incarnation, pool: PoolMemory, stall_timeout_s: float) -> None:
        self._offer = offer
        self._owner = owner
        self._pool = pool
        self._stall_timeout_s = stall_timeout_s
        self._num_blocks = 0
        self._line: wire.Line | None = None
        self._batches = count()
        self._verdicts: dict[int, asyncio.Future[wire.Verdict]] = {}
        self._reads: set[asyncio.Future[None]] = set()
        self._lost: BatonError | None = None

    async def open(self) -> None:
        address = urlsplit(self._offer.address)
        host = address.hostname or ""
        secret = parse_qs(address.query).get("secret", [""])[0]
        await ENGINE.borrow(host)
        try:
            line = await wire.connect(host, address.port or 0, timeout_s=_CONNECT_TIMEOUT_S)
            try:
                await self._greet(line, secret)
            except BaseException:
                line.abort()
                raise
        except BaseException:
            await ENGINE.give_back()
            raise
        self._line = line
        self._watch = StallWatch(self._stall_timeout_s, self._stalled)
        self._listener = asyncio.ensure_future(self._listen(line))

    async def _greet(self, line: wire.Line, secret: str) -> None:
        try:
            await line.say(wire.Hello(secret, self._owner, self._pool.incarnation))
            word = line.next_word()
            await asyncio.wait([word], timeout=_CONNECT_TIMEOUT_S)
            if not word.done():
                line.abort()
            await word
            greeting = line.decode(wire.greeting_decoder)
        except (PeerLostError, msgspec.MsgspecError) as error:
            raise TransferError(f"ucx: the owner does not answer the greeting ({error})") from None
        if isinstance(greeting, wire.Refuse):
            raise TransferError(f"ucx: the owner refuses, {greeting.reason}")
        check_layout(self._pool.layout, greeting.layout)
        self._num_blocks = greeting.num_blocks

    async def read(self, refs: Sequence[BlockRef], into: Sequence[BlockId], *, secret: bytes) -> None:
        if self._lost is not None:
            raise type(self._lost)(self._lost.message)
        if self._line is None:
            raise TransferError("ucx: the reader is not open")
        check_destination(refs, into, self._pool.num_blocks)
        check_source(refs, self._num_blocks)
        stopped = asyncio.Event()
        read = asyncio.ensure_future(self._read(self._line, tuple(refs), tuple(into), secret, stopped))
        self._reads.add(read)
        read.add_done_callback(self._reads.discard)
        await settled(read, stopped.set)

    async def _read(
        self,
        line: wire.Line,
        refs: tuple[BlockRef, ...],
        into: tuple[BlockId, ...],
        secret: bytes,
        stopped: asyncio.Event,
    ) -> None:
        for first in range(0, len(refs), wire.MAX_BATCH_BLOCKS):
            if stopped.is_set():
                raise TransferError("ucx: the read was cancelled")
            part = slice(first, first + wire.MAX_BATCH_BLOCKS)
            await self._read_batch(line, refs[part], into[part], secret)

    async def _read_batch(
        self, line: wire.Line, refs: tuple[BlockRef, ...], into: tuple[BlockId, ...], secret: bytes
    ) -> None:
        """All blocks of the batch are in flight together; over when every receive has settled, whatever came."""
        batch = next(self._batches)
        verdict = self._verdicts[batch] = asyncio.get_running_loop().create_future()
        self._watch.start()
        try:
            receives = [
                line.receive(self._pool.blocks[block], wire.block_tag(batch, i)) for i, block in enumerate(into)
            ]
            for receive in receives:
                receive.add_done_callback(lambda _: self._watch.heard())
            asked = line.say(wire.Read(batch, refs, secret))
            await wire.all_of([*receives, asked])
            error = (await verdict).error
        except PeerLostError as lost:
            line.abort()  # a receive that failed was not settled by the owner: nothing more can be told apart
            raise self._reason(lost) from None
        finally:
            del self._verdicts[batch]
            if not self._verdicts:
                self._watch.stop()
        if error is not None:
            failure = error.exception()
            raise failure if isinstance(failure, StaleBlockError) else TransferError(f"ucx: {failure.message}")

    async def _listen(self, line: wire.Line) -> None:
        """Hands out verdicts until the connection ends."""
        try:
            while True:
                await line.next_word()
                word: wire.Verdict = line.decode(wire.verdict_decoder)
                self._watch.heard()
                verdict = self._verdicts.get(word.batch)
                if verdict is not None and not verdict.done():
                    verdict.set_result(word)
        except (PeerLostError, msgspec.MsgspecError) as error:
            self._lost = self._reason(error)
            line.abort()
            for verdict in self._verdicts.values():
                if not verdict.done():
                    verdict.set_exception(PeerLostError(self._lost.message))
                    verdict.exception()  # its read may fail on a receive first and never look

    def _reason(self, error: Exception) -> BatonError:
        """What broke the connection, if it is known better than by UCX's own word."""
        if self._lost is None:
            self._lost = PeerLostError(f"ucx: the owner is gone ({error})")
        return type(self._lost)(self._lost.message)

    def _stalled(self) -> None:
        assert self._line is not None
        self._lost = PeerLostError(f"ucx: the owner moved nothing for {self._stall_timeout_s:g} s")
        self._line.abort()

    async def close(self) -> None:
        if self._line is None:
            return
        line, self._line = self._line, None
        if self._lost is None:
            self._lost = TransferError("ucx: the reader was closed")
        line.abort()
        ending = asyncio.gather(self._listener, *self._reads, return_exceptions=True)
        try:
            await settled(ending, lambda: None)
        finally:
            self._watch.stop()
            del line, ending
            await ENGINE.give_back()

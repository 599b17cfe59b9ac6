"""The owner's side of the ucx transport: sends blocks straight out of the pool, then its verdict."""

import asyncio
import secrets
from typing import Any
from urllib.parse import urlencode

import msgspec
import numpy as np

from common.errors import BatonError, PeerLostError, TransferError
from common.kv_cache.memory import PoolMemory
from common.messages import HeldConnection, Incarnation, Offer, WireError
from kv_transfer import ucx_wire as wire
from kv_transfer.base import TransferSettings
from kv_transfer.blocks import check_generations, check_readable, check_source
from kv_transfer.stall import StallWatch
from kv_transfer.ucx_engine import ENGINE

_HELLO_TIMEOUT_S = 2.0
_MAX_READERS = 1024
_MAX_BATCHES = 64
_FILLER = np.zeros(1, np.uint8)


class UcxServer:
    def __init__(
        self, pool: PoolMemory, *, listen_host: str, settings: TransferSettings, has_rdma_or_cuda: bool
    ) -> None:
        self._pool = pool
        self._listen_host = listen_host
        self._trust = settings.trust
        self._stall_timeout_s = settings.stall_timeout_s
        self._fast = has_rdma_or_cuda
        self._secret = secrets.token_hex(16)
        self._listener: Any = None
        self._readers: dict[asyncio.Task[None], _Service] = {}

    async def start(self) -> Offer:
        host = self._listen_host
        address = f"[{host}]" if ":" in host else host
        self._trust.check_bind(f"tcp://{address}:*")
        ucxx = await ENGINE.borrow(host)
        try:
            self._listener = ucxx.create_listener(self._connected, connect_timeout=_HELLO_TIMEOUT_S)
        except Exception as error:
            await ENGINE.give_back()
            raise TransferError(f"ucx: cannot listen ({error})") from error
        query = urlencode({"secret": self._secret, "fast": int(self._fast)})
        return Offer(transport="ucx", address=f"ucx://{address}:{self._listener.port}?{query}")

    def connections(self) -> list[HeldConnection]:
        return [
            HeldConnection("ucx", service.reader, service.num_reads)
            for service in self._readers.values()
            if service.reader is not None
        ]

    async def close(self) -> None:
        if self._listener is None:
            return
        listener, self._listener = self._listener, None
        for service in self._readers.values():
            service.line.abort()
        while self._readers:
            await asyncio.wait(list(self._readers))
        # Connections whose handshake is under way end within the handshake's own limit.
        await listener._handler_tracker.wait()
        listener.close()
        del listener
        await ENGINE.give_back()

    def _connected(self, endpoint: Any) -> None:
        line = wire.Line(endpoint)
        if self._listener is None or len(self._readers) >= _MAX_READERS:
            line.abort()
            return
        service = _Service(self._pool, line, self._secret, self._stall_timeout_s)
        task = asyncio.ensure_future(service.run())
        self._readers[task] = service
        task.add_done_callback(self._readers.pop)


class _Service:
    """One reader, once it said who it is. Ends by breaking the connection, whatever went wrong."""

    def __init__(self, pool: PoolMemory, line: wire.Line, secret: str, stall_timeout_s: float) -> None:
        self.line = line
        self.reader: Incarnation | None = None
        self._pool = pool
        self._secret = secret
        self._answers: set[asyncio.Task[None]] = set()
        # A reader posts its receives before it asks: one that takes nothing for so long is frozen or gone.
        self._watch = StallWatch(stall_timeout_s, line.abort)

    @property
    def num_reads(self) -> int:
        return len(self._answers)

    async def run(self) -> None:
        try:
            if await self._greet():
                while len(self._answers) < _MAX_BATCHES:
                    await self.line.next_word()
                    answer = asyncio.ensure_future(self._answer(self.line.decode(wire.read_decoder)))
                    self._answers.add(answer)
                    answer.add_done_callback(self._answered)
        except (PeerLostError, msgspec.MsgspecError):
            pass  # gone, or talking nonsense: either way only this reader loses
        finally:
            self.line.abort()
            while self._answers:
                await asyncio.wait(self._answers)

    async def _greet(self) -> bool:
        word = self.line.next_word()
        await asyncio.wait([word], timeout=_HELLO_TIMEOUT_S)
        if not word.done():
            self.line.abort()
        await word
        hello: wire.Hello = self.line.decode(wire.hello_decoder)
        if not secrets.compare_digest(hello.secret.encode(), self._secret.encode()):
            return False
        if hello.owner != self._pool.incarnation:
            reason = f"incarnation {hello.owner} is gone, {self._pool.incarnation} is here"
            await self._within(self.line.say(wire.Refuse(reason)))
            # Breaking off drops what is still on its way: the reader hangs up when it has read the reason.
            await self._within(self.line.next_word())
            return False
        await self.line.say(wire.Welcome(self._pool.layout, self._pool.num_blocks))
        self.reader = hello.reader
        return True

    async def _within(self, step: "asyncio.Future[None]") -> None:
        await asyncio.wait([step], timeout=_HELLO_TIMEOUT_S)
        if not step.done():
            self.line.abort()
        await step

    async def _answer(self, read: wire.Read) -> None:
        self._watch.start()
        error: BatonError | None = None
        payloads = [_FILLER] * len(read.refs)
        try:
            check_source(read.refs, self._pool.num_blocks)
            check_readable(self._pool, read.refs, read.secret)
            payloads = [self._pool.blocks[ref.block] for ref in read.refs]
        except TransferError as failure:
            error = failure
        sends = [self.line.send(payload, wire.block_tag(read.batch, i)) for i, payload in enumerate(payloads)]
        for send in sends:
            send.add_done_callback(lambda _: self._watch.heard())
        await wire.all_of(sends)
        if error is None:
            try:
                check_generations(read.refs, self._pool.generations)
            except TransferError as failure:
                error = failure
        await self.line.say(wire.Verdict(read.batch, WireError.of(error) if error is not None else None))

    def _answered(self, answer: "asyncio.Task[None]") -> None:
        self._answers.discard(answer)
        if not self._answers:
            self._watch.stop()
        if answer.cancelled() or answer.exception() is not None:
            self.line.abort()

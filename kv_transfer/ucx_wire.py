"""UCX endpoints whose operations always settle, and the words spoken over them.

Imported only where ucxx is installed; ucxx itself is imported when UCX is first used.
"""

import asyncio
import importlib
import secrets
from collections.abc import Coroutine
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from common.errors import PeerLostError, TransferError
from common.messages import BlockRef, Incarnation, KVLayout, WireError
from kv_transfer.ucx_engine import ENGINE, said_by_ucx

MAX_BATCH_BLOCKS = 256
MAX_SECRET_BYTES = 64
_MAX_WORD_BYTES = 1 << 16
_WORD_TAG = 0
_ABORT_NS = 2_000_000_000
_GRACE_S = 1.0

Bytes = npt.NDArray[np.uint8]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]


class Word(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """One control message; blocks travel beside them, each under the tag that `block_tag` gives it."""


class Hello(Word, frozen=True):
    """First from a reader, within a time limit: the listener itself lets anybody in."""

    secret: str
    owner: Incarnation
    reader: Incarnation = Incarnation("")


class Read(Word, frozen=True):
    """The reader has posted a receive for each of these blocks; every one of them will be sent something.

    `secret` is the call's.
    """

    batch: Count
    refs: Annotated[tuple[BlockRef, ...], msgspec.Meta(max_length=MAX_BATCH_BLOCKS)]
    secret: Annotated[bytes, msgspec.Meta(max_length=MAX_SECRET_BYTES)]


class Welcome(Word, frozen=True):
    layout: KVLayout
    num_blocks: int


class Refuse(Word, frozen=True):
    reason: str


class Verdict(Word, frozen=True):
    """All receives of the batch have been sent to. With an error, what they got is worthless."""

    batch: Count
    error: WireError | None = None


hello_decoder = msgspec.msgpack.Decoder(Hello)
read_decoder = msgspec.msgpack.Decoder(Read)
greeting_decoder = msgspec.msgpack.Decoder(Welcome | Refuse)
verdict_decoder = msgspec.msgpack.Decoder(Verdict)


def block_tag(batch: int, index: int) -> int:
    return 1 + batch * MAX_BATCH_BLOCKS + index


class Line:
    """An endpoint whose sends and receives always settle: by themselves, or soon after `abort`.

    Nobody else may cancel them: UCX goes on writing into the buffer of a cancelled receive.
    """

    def __init__(self, endpoint: Any) -> None:
        self._endpoint = endpoint
        self._closing = endpoint._ep  # outlives the endpoint's own reference, to see that it is closed
        self._word = np.empty(_MAX_WORD_BYTES, np.uint8)
        self._pending: set[asyncio.Task[None]] = set()
        self._given_up = False

    def abort(self) -> None:
        """Break the connection. Once the futures have settled nothing touches their buffers any more. Idempotent."""
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.abort(period=_ABORT_NS)
            if self._pending:
                asyncio.get_running_loop().call_later(_GRACE_S, self._give_up)
            else:
                self._closing = None

    def _give_up(self) -> None:
        """ucxx can lose the end of an operation that began as the connection broke. UCX lets go of every buffer
        when it closes an endpoint, so once that is done nobody need wait for the news; before, everybody must."""
        if self._pending and self._closing.alive:
            asyncio.get_running_loop().call_later(_GRACE_S, self._give_up)
            return
        self._given_up = True
        self._closing = None
        for operation in self._pending:
            operation.cancel()

    def send(self, payload: Bytes, tag: int) -> "asyncio.Future[None]":
        if self._endpoint is None:
            return _failed()
        return self._begin(self._endpoint.send(_run_of_bytes(payload), tag=tag))

    def receive(self, into: Bytes, tag: int) -> "asyncio.Future[None]":
        if self._endpoint is None:
            return _failed()
        if not into.flags.writeable:
            raise TransferError("ucx: the destination is read-only")  # UCX would write there all the same
        return self._begin(self._endpoint.recv(_run_of_bytes(into), tag=tag))

    def _begin(self, operation: Coroutine[Any, Any, Any]) -> "asyncio.Future[None]":
        task = asyncio.ensure_future(self._outcome(operation))
        self._pending.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._pending.discard(task)
        if self._endpoint is None and not self._pending:
            self._closing = None

    async def _outcome(self, operation: Coroutine[Any, Any, Any]) -> None:
        """PeerLostError for whatever UCX raises."""
        reason = ""
        try:
            ENGINE.prepare()
            await operation
        except asyncio.CancelledError:
            if not self._given_up:
                raise
            reason = "the connection was closed"
        except Exception as error:
            reason = said_by_ucx(error)
        if reason:
            raise PeerLostError(f"ucx: {reason}")

    def say(self, word: Word) -> "asyncio.Future[None]":
        payload = msgspec.msgpack.encode(word)
        # UCX does not tell how long a message was.
        framed = len(payload).to_bytes(4, "little") + payload
        return self.send(np.frombuffer(framed, np.uint8), _WORD_TAG)

    def next_word(self) -> "asyncio.Future[None]":
        """Settles when a word has come, which `decode` then reads. One at a time."""
        return self.receive(self._word, _WORD_TAG)

    def decode(self, decoder: "msgspec.msgpack.Decoder[Any]") -> Any:
        """The word that came. Raises msgspec.MsgspecError for nonsense."""
        length = int.from_bytes(self._word[:4].tobytes(), "little")
        return decoder.decode(self._word[4 : 4 + length].tobytes())


async def connect(host: str, port: int, *, timeout_s: float) -> Line:
    """A line to the listener at `host` (numeric) and `port`; TransferError if there is none in time."""
    context = importlib.import_module("ucxx.core")._get_ctx()
    endpoint, reason = await _shake_hands(context, host, port, timeout_s)
    del context  # nor may an error's traceback keep UCX alive
    if endpoint is None:
        raise TransferError(f"ucx: nobody answers at {host}:{port} ({reason})")
    return Line(endpoint)


async def _shake_hands(context: Any, host: str, port: int, timeout_s: float) -> tuple[Any, str]:
    """What `ucxx.create_endpoint` does, with two differences: it leaves nothing behind when it fails (its own way
    leaks the endpoint and with it the whole of UCX), and it fails at once when nobody listens."""
    libucxx = importlib.import_module("ucxx._lib.libucxx")
    endpoints = importlib.import_module("ucxx._lib_async.endpoint")
    peer_info = importlib.import_module("ucxx._lib_async.exchange_peer_info")
    broken = asyncio.Event()
    raw = libucxx.UCXEndpoint.create(context.worker, host, port, True)
    try:
        raw.set_close_callback(asyncio.get_running_loop().call_soon_threadsafe, (broken.set,))
    except RuntimeError:
        return None, "refused"  # so soon
    our_tag = secrets.randbits(64)
    exchange = asyncio.ensure_future(
        peer_info.exchange_peer_info(endpoint=raw, msg_tag=our_tag, listener=False, connect_timeout=None)
    )
    breaking = asyncio.ensure_future(broken.wait())
    try:
        await asyncio.wait([exchange, breaking], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        breaking.cancel()
        reason = "" if exchange.done() else "refused" if broken.is_set() else f"silent for {timeout_s:g} s"
        if not exchange.done():
            raw.close_blocking(period=_ABORT_NS, max_attempts=1)  # which ends the exchange
            await asyncio.wait([exchange], timeout=_GRACE_S)
        raw.remove_close_callback()
    if not exchange.done():  # or not: see Line._give_up. Its buffers are its own.
        exchange.cancel()
        await asyncio.wait([exchange])
        return None, reason
    failure = exchange.exception()
    if failure is not None:
        raw.close_blocking(period=_ABORT_NS, max_attempts=1)
        heard = said_by_ucx(failure)
        return None, reason or heard
    tags = {"msg_send": exchange.result()["msg_tag"], "msg_recv": our_tag}
    return endpoints.Endpoint(endpoint=raw, ctx=context, tags=tags), ""


def _run_of_bytes(array: Bytes) -> Bytes:
    if array.dtype != np.uint8 or not array.flags.c_contiguous:
        raise TransferError("ucx: only contiguous bytes travel")  # UCX would take a strided view for a plain one
    return array


async def all_of(futures: "list[asyncio.Future[None]]") -> None:
    """Waits until every one has settled, then raises the first error if there is one."""
    if futures:
        await asyncio.wait(futures)
    errors = [future.exception() for future in futures]
    for error in errors:
        if error is not None:
            raise error


def _failed() -> "asyncio.Future[None]":
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.set_exception(PeerLostError("ucx: the connection is closed"))
    return future

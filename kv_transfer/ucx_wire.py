"""UCX as this project uses it: one context per process, endpoints that settle, and the words spoken over them.

Imported only where ucxx is installed; ucxx itself is imported when UCX is first used.
"""

import asyncio
import gc
import importlib
import ipaddress
import os
import secrets
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from common.errors import PeerLostError, TransferError
from common.messages import BlockRef, Incarnation, KVLayout, WireError

MAX_BATCH_BLOCKS = 256
_MAX_WORD_BYTES = 1 << 16
_WORD_TAG = 0
_ABORT_NS = 2_000_000_000

Bytes = npt.NDArray[np.uint8]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]


class Word(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """One control message; blocks travel beside them, each under the tag that `block_tag` gives it."""


class Hello(Word, frozen=True):
    """First from a reader, within a time limit: the listener itself lets anybody in."""

    secret: str
    owner: Incarnation


class Read(Word, frozen=True):
    """The reader has posted a receive for each of these blocks; every one of them will be sent something."""

    batch: Count
    refs: Annotated[tuple[BlockRef, ...], msgspec.Meta(max_length=MAX_BATCH_BLOCKS)]


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


class _Engine:
    """The process's UCX: started for the first user, taken down after the last.

    ucxx notifies one event loop, so all users share that loop. It must be taken down before the interpreter
    ends, which otherwise waits for its thread for ever; hence the hooks into the loop's end and the process's.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loopback = False
        self._num_users = 0
        self._exit_hook = False
        self._worker: Any = None
        self._ended: asyncio.Event | None = None
        """Set while UCX is being taken down; who wants it then waits until it is, and starts it anew."""

    async def borrow(self, host: str) -> Any:
        """The ucxx module, ready. TransferError if this process uses UCX in a way that `host` does not fit."""
        loop = asyncio.get_running_loop()
        loopback = ipaddress.ip_address(host).is_loopback
        while self._loop is loop and self._ended is not None:
            await self._ended.wait()
        if self._loop is None:
            self._start(loop, loopback)
        elif self._loop is not loop:
            raise TransferError("ucx: another event loop of this process uses it")
        elif self._loopback and not loopback:
            raise TransferError(f"ucx: this process listens on the loopback and cannot reach {host}")
        self._num_users += 1
        return importlib.import_module("ucxx")

    async def give_back(self) -> None:
        """Call when every endpoint and listener of this user is closed."""
        if self._loop is not asyncio.get_running_loop():
            return  # the loop that it was borrowed on has ended, and UCX with it
        self._num_users -= 1
        if self._num_users:
            return
        self._ended = asyncio.Event()
        try:
            self._stop_notifying()
            # What ucxx's thread has put on the loop before it ended holds the worker, with its thread and its
            # descriptors, until it has run: one turn makes it a task, the next one runs that.
            for _ in range(2):
                await asyncio.sleep(0)
        finally:
            self._stop()

    def prepare(self) -> None:
        """Call before each operation: ucxx keeps some fifty futures ready and complains if more are wanted at once."""
        if self._worker is not None:
            self._worker.populate_python_futures_pool()

    def _start(self, loop: asyncio.AbstractEventLoop, loopback: bool) -> None:
        os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")  # importing ucxx sets some that UCX does not know
        ucxx = importlib.import_module("ucxx")
        options = {"RNDV_SCHEME": "put_zcopy"}
        if loopback:
            options["NET_DEVICES"] = "lo"
        # Every other progress mode spins.
        ucxx.init(options, env_takes_precedence=True, progress_mode="thread", enable_python_future=True)
        self._loop, self._loopback = loop, loopback
        self._worker = ucxx.core._get_ctx().worker
        ucxx_close = loop.close  # ucxx has put its own in place

        def close() -> None:
            self._stop()
            ucxx_close()

        loop.close = close  # type: ignore[method-assign]
        if not self._exit_hook:
            self._exit_hook = True
            # atexit is too late: the interpreter first waits for all threads, ucxx's among them.
            threading._register_atexit(self._stop)  # type: ignore[attr-defined]

    def _stop_notifying(self) -> None:
        """End ucxx's thread. Left to itself, `reset` waits for up to a second until that looks whether it should."""
        thread = importlib.import_module("ucxx.core")._get_ctx().notifier_thread
        if thread is None:
            return
        self._worker.stop_request_notifier_thread()
        while thread.is_alive():
            thread.join(timeout=0.005)  # in portions: its last steps may need the interpreter's lock
        # A worker that was told to stop before it waited, or has news for nobody, believes that its thread still runs.
        for _ in range(2):
            self._worker.wait_request_notifier(period_ns=1)
        self._worker.stop_request_notifier_thread()

    def _stop(self) -> None:
        """Take UCX down, now: also where no loop runs any more. Idempotent."""
        if self._loop is None:
            return
        self._stop_notifying()
        loop, self._loop = self._loop, None
        ended, self._ended = self._ended, None
        self._num_users = 0
        self._worker = None
        # ucxx leaves its wrapper on the loop, and through it the worker with its thread and descriptors.
        loop.__dict__.pop("close", None)
        ucxx = importlib.import_module("ucxx")
        # Raises if somebody still holds an endpoint, as at the end of a process: the threads are stopped all the same.
        with suppress(ucxx.exceptions.UCXError):
            ucxx.reset()
        gc.collect()
        if ended is not None:
            ended.set()


ENGINE = _Engine()


class Line:
    """An endpoint whose sends and receives are futures that always settle: by themselves, or after `abort`.

    They are never cancelled: UCX goes on writing into the buffer of a cancelled receive.
    """

    def __init__(self, endpoint: Any) -> None:
        self._endpoint = endpoint
        self._word = np.empty(_MAX_WORD_BYTES, np.uint8)

    @property
    def aborted(self) -> bool:
        return self._endpoint is None

    def abort(self) -> None:
        """Break the connection. Once the futures have settled nothing touches their buffers any more. Idempotent."""
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.abort(period=_ABORT_NS)

    def send(self, payload: Bytes, tag: int) -> "asyncio.Future[None]":
        if self._endpoint is None:
            return _failed()
        return asyncio.ensure_future(_outcome(self._endpoint.send(_run_of_bytes(payload), tag=tag)))

    def receive(self, into: Bytes, tag: int) -> "asyncio.Future[None]":
        if self._endpoint is None:
            return _failed()
        if not into.flags.writeable:
            raise TransferError("ucx: the destination is read-only")  # UCX would write there all the same
        return asyncio.ensure_future(_outcome(self._endpoint.recv(_run_of_bytes(into), tag=tag)))

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
            await asyncio.wait([exchange])
        raw.remove_close_callback()
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


async def _outcome(operation: Coroutine[Any, Any, Any]) -> None:
    """PeerLostError for whatever UCX raises."""
    reason = ""
    try:
        ENGINE.prepare()
        await operation
    except Exception as error:
        reason = said_by_ucx(error)
    if reason:
        raise PeerLostError(f"ucx: {reason}")


def said_by_ucx(error: BaseException) -> str:
    """The words of an exception of ucxx, which must not be used any further.

    ucxx never lets go of its exceptions, so their tracebacks are cut: they would keep the endpoint, its memory
    and its descriptors for ever.
    """
    reason = str(error) or type(error).__name__
    link: BaseException | None = error
    while link is not None:
        earlier = link.__cause__ or link.__context__
        link.__traceback__ = link.__cause__ = link.__context__ = None
        link = earlier
    return reason


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

"""The process's UCX: started for its first user, taken down after its last."""

import asyncio
import gc
import importlib
import ipaddress
import os
import threading
from contextlib import suppress
from typing import Any

from common.errors import TransferError


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
            gc.collect()  # a notice that came too late for its turn holds the worker, in a cycle of tasks and futures

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

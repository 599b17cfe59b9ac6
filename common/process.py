"""How every Baton process lives and ends.

1. One event loop (uvloop) runs one main coroutine; when that returns the process exits with 0.
2. SIGINT or SIGTERM cancels the coroutine, which cleans up; exit 0. A second signal exits at once.
3. `parent_pipe` is the reading end of a pipe that the parent holds open for as long as it lives: when the
   pipe closes the parent is gone, however it ended, and the process ends as by a signal.
4. A process that has not gone `GRACE_S` after it was told to is stuck: it prints its stacks and exits with 1.
5. A ConfigError is the operator's to mend: one line on stderr, exit 2. Anything else is our bug: a traceback, exit 1.
"""

import asyncio
import contextlib
import faulthandler
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import Any

from common import telemetry
from common.errors import ConfigError

GRACE_S = 10.0
# Half the wake-up delay of the event loop beside a busy engine thread (Python's own is 5 ms).
_SWITCH_INTERVAL_S = 0.0005
_SIGNALS = (signal.SIGINT, signal.SIGTERM)

log = telemetry.logger(__name__)


def run(main: Callable[[], Coroutine[Any, Any, None]], *, parent_pipe: int = -1) -> int:
    """Run the coroutine that `main` makes; returns the exit code. The last thing a process does.

    `main` itself is called before there is a loop, so it is the place for slow imports.
    """
    _fill_standard_streams()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    for number in _SIGNALS:
        signal.signal(number, _leave_at_once)
    try:
        with _leaves_with_parent(parent_pipe):
            import uvloop  # 10 ms that a command which only prints its help need not pay

            coroutine = main()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_supervise(coroutine, parent_pipe))
    except Exception as error:
        settings_error = _config_error(error)
        if settings_error is None:
            traceback.print_exc()
            return 1
        print(f"baton: {settings_error.message}", file=sys.stderr)
        return 2
    return 0


def _fill_standard_streams() -> None:
    """A stream that whoever started us had closed (`<&-`) leads nowhere. Else the next descriptor takes its number,
    and uvloop aborts the process on closing one of those three."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def _config_error(error: BaseException) -> ConfigError | None:
    """The ConfigError that this error is, or holds if it comes out of a task group."""
    if isinstance(error, BaseExceptionGroup):
        return next((found for inner in error.exceptions if (found := _config_error(inner))), None)
    return error if isinstance(error, ConfigError) else None


def _leave_at_once(number: int, frame: FrameType | None) -> None:
    """While nothing is there to clean up yet (slow imports, mostly)."""
    os._exit(0)


@contextlib.contextmanager
def _leaves_with_parent(parent_pipe: int) -> Iterator[None]:
    """The same for a parent that goes away: without a loop yet, a thread watches the pipe."""
    if parent_pipe < 0:
        yield
        return
    done_reader, done_writer = os.pipe()

    def watch() -> None:
        poll = select.poll()
        poll.register(parent_pipe, 0)  # a hang-up is reported always
        poll.register(done_reader, select.POLLIN)
        events = dict(poll.poll())
        if done_reader not in events and events.get(parent_pipe, 0) & select.POLLHUP:
            os._exit(0)

    watcher = threading.Thread(target=watch, name="parent pipe", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        os.write(done_writer, b".")
        watcher.join()
        os.close(done_reader)
        os.close(done_writer)


async def _supervise(coroutine: Coroutine[Any, Any, None], parent_pipe: int) -> None:
    loop = asyncio.get_running_loop()
    main = loop.create_task(coroutine, name="main")
    stopping = False

    def stop(reason: str) -> None:
        nonlocal stopping
        if stopping:
            return
        stopping = True
        log.info("stopping", reason=reason)
        # Its own thread, without the interpreter's lock: works also when the event loop is what is stuck.
        faulthandler.dump_traceback_later(GRACE_S, exit=True)
        main.cancel()

    def on_signal(number: signal.Signals) -> None:
        if stopping:
            os._exit(128 + number)
        stop(number.name)

    def on_parent_pipe() -> None:
        with contextlib.suppress(BlockingIOError):
            if os.read(parent_pipe, 4096) == b"":
                loop.remove_reader(parent_pipe)
                stop("parent gone")

    for number in _SIGNALS:
        # Also where SIGINT was ignored from the start, as a shell does for its background jobs.
        loop.add_signal_handler(number, on_signal, number)
    if parent_pipe >= 0:
        _watch(loop, parent_pipe, on_parent_pipe)
    try:
        await main
    except asyncio.CancelledError:
        if not stopping:
            raise
    finally:
        if parent_pipe >= 0:
            loop.remove_reader(parent_pipe)


def _watch(loop: asyncio.AbstractEventLoop, fd: int, on_readable: Callable[[], None]) -> None:
    try:
        os.set_blocking(fd, False)
        os.set_inheritable(fd, False)
        loop.add_reader(fd, on_readable)
    except (OSError, ValueError) as error:
        raise ConfigError(f"parent_pipe = {fd}: expected an open pipe, -1 for none ({error})") from error

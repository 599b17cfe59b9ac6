"""How a process that uses UCX ends: always, at once, and with its own exit status."""

import subprocess
import sys

import pytest

from kv_transfer import ucx

pytestmark = pytest.mark.skipif(ucx.available() is not None, reason=str(ucx.available()))

SCRIPT = """
import asyncio, os, signal, sys
import numpy as np, uvloop
from common.kv_cache.memory import allocate
from common.messages import BlockRef, Incarnation, KVLayout, LayerKV
from kv_transfer.ucx import UcxTransport

LAYOUT = KVLayout(16, "float32", 4, (LayerKV(2, 64, 64),) * 4)
source = allocate(LAYOUT, 16, Incarnation("0" * 32))
source.blocks[:] = 9
destination = allocate(LAYOUT, 16, Incarnation("1" * 32))

async def connect():
    server = UcxTransport().serve(source)
    reader = UcxTransport().reader(await server.start(), owner=source.incarnation, pool=destination)
    await reader.open()
    refs = [BlockRef(b, 0) for b in range(16)]
    source.grants.grant(b"secret", refs, request="")
    await reader.read(refs, list(range(16)), secret=b"secret")
    assert (destination.blocks == 9).all()
    return server, reader

def left():
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

async def use_and_close():
    before = left()
    server, reader = await connect()
    await reader.close()
    await server.close()
    del server, reader
    assert left() == before, (left(), before)

async def leave_open(how):
    kept = await connect()
    how(kept)

def fail(kept):
    raise ValueError("on purpose")

def notice_in_the_last_turn(kept):
    import ucxx
    loop = asyncio.get_running_loop()
    shutdown_default_executor = loop.shutdown_default_executor
    async def notice(worker):
        pass
    async def last_turn(*args):
        await shutdown_default_executor(*args)
        asyncio.run_coroutine_threadsafe(notice(ucxx.core._get_ctx().worker), loop)
    loop.shutdown_default_executor = last_turn
"""


def run(*lines: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", SCRIPT + "\n".join(lines)], capture_output=True, text=True, timeout=250, check=False
    )


@pytest.mark.parametrize("runner", ["asyncio.run", "uvloop.run"])
def test_it_ends_after_a_tidy_use(runner: str) -> None:
    done = run(f"{runner}(use_and_close())")
    assert (done.returncode, done.stderr) == (0, "")


def test_one_loop_after_the_other_may_use_it() -> None:
    done = run("asyncio.run(use_and_close())", "uvloop.run(use_and_close())", "asyncio.run(use_and_close())")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("how", ["lambda kept: None", "notice_in_the_last_turn"])
def test_a_loop_that_ends_with_everything_open_leaves_ucx_to_the_next_one(how: str) -> None:
    done = run(
        "before = left()",
        f"asyncio.run(leave_open({how}))",
        "assert left() == before, (left(), before)",
        "asyncio.run(use_and_close())",
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("runner", ["asyncio.run", "uvloop.run"])
def test_it_ends_when_an_exception_leaves_everything_open(runner: str) -> None:
    done = run(f"{runner}(leave_open(fail))")
    assert done.returncode == 1
    assert "ValueError: on purpose" in done.stderr


def test_it_ends_with_the_status_of_an_exit_in_the_middle() -> None:
    done = run("asyncio.run(leave_open(lambda kept: sys.exit(3)))")
    assert done.returncode == 3


def test_it_ends_when_its_loop_is_never_closed() -> None:
    done = run("loop = asyncio.new_event_loop()", "kept = loop.run_until_complete(connect())")
    assert done.returncode == 0


def test_it_dies_of_a_signal_as_anybody_does() -> None:
    done = run("asyncio.run(leave_open(lambda kept: os.kill(os.getpid(), signal.SIGTERM)))")
    assert done.returncode == -15


def test_choosing_a_transport_imports_no_ucx() -> None:
    done = run("import kv_transfer.choose, sys", "assert not {'ucxx', 'torch'} & set(sys.modules)")
    assert (done.returncode, done.stderr) == (0, "")

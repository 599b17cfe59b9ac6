"""How a process ends, from the outside: small real ones."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_PROGRAM = """
import asyncio, sys, time
from common import process
from common.errors import ConfigError

async def waits():
    print("up", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        print("cleaned up", flush=True)

async def never_cleans_up():
    try:
        await waits()
    finally:
        await asyncio.Event().wait()

async def gets_stuck():
    try:
        await waits()
    finally:
        time.sleep(1000)

async def returns():
    pass

async def starts_a_child():
    child = await asyncio.create_subprocess_exec("true", stdout=-1, stderr=-1, stdin=-3)
    await child.communicate()
    print("said to nobody")

async def is_misconfigured():
    raise ConfigError("port = 0: expected another")

async def is_misconfigured_in_a_group():
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(waits())
        tasks.create_task(is_misconfigured())

async def is_broken():
    raise ValueError("a bug")

def is_slow_to_import():
    print("up", flush=True)
    time.sleep(1000)

process.GRACE_S = float(sys.argv[3])
raise SystemExit(process.run(globals()[sys.argv[1]], parent_pipe=int(sys.argv[2])))
"""


@contextmanager
def running(
    main: str, *, parent_pipe: int = -1, grace_s: float = 30.0, ignore_sigint: bool = False
) -> Iterator["subprocess.Popen[str]"]:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if ignore_sigint else None
    try:
        child = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, main, str(parent_pipe), str(grace_s)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=() if parent_pipe < 0 else (parent_pipe,),
            text=True,
        )
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)
    with child:
        try:
            yield child
        finally:
            child.kill()


def wait_until_up(child: "subprocess.Popen[str]") -> None:
    assert child.stdout is not None
    assert child.stdout.readline() == "up\n"


def end(child: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = child.communicate(timeout=250)
    return child.returncode, out, err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_process_clean_up_and_exit_with_0(number: signal.Signals) -> None:
    with running("waits") as child:
        wait_until_up(child)
        child.send_signal(number)
        assert end(child) == (0, "cleaned up\n", "")


def test_ctrl_c_works_where_a_background_shell_had_it_ignored() -> None:
    with running("waits", ignore_sigint=True) as child:
        wait_until_up(child)
        child.send_signal(signal.SIGINT)
        assert end(child)[:2] == (0, "cleaned up\n")


def test_a_signal_during_slow_imports_ends_the_process_at_once() -> None:
    with running("is_slow_to_import") as child:
        wait_until_up(child)
        child.send_signal(signal.SIGTERM)
        assert end(child) == (0, "", "")


def test_a_second_signal_exits_hard() -> None:
    with running("never_cleans_up") as child:
        wait_until_up(child)
        child.send_signal(signal.SIGTERM)
        assert child.stdout is not None
        assert child.stdout.readline() == "cleaned up\n"
        child.send_signal(signal.SIGINT)
        assert end(child)[0] == 128 + signal.SIGINT


@pytest.mark.parametrize("main", ["never_cleans_up", "gets_stuck"])
def test_a_clean_up_that_is_stuck_is_ended_with_its_stacks(main: str) -> None:
    with running(main, grace_s=0.2) as child:
        wait_until_up(child)
        child.send_signal(signal.SIGTERM)
        status, _, err = end(child)
        assert status == 1
        assert "Timeout" in err
        assert "most recent call first" in err


def test_the_process_ends_when_its_parents_pipe_closes() -> None:
    reader, writer = os.pipe()
    try:
        with running("waits", parent_pipe=reader) as child:
            wait_until_up(child)
            os.write(writer, b"x")  # nobody should, but it is not the end
            os.close(writer)
            assert end(child)[:2] == (0, "cleaned up\n")
    finally:
        os.close(reader)


def test_a_parent_pipe_that_is_none_is_a_wrong_setting() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, "waits", "99", "30"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("baton: parent_pipe = 99: expected an open pipe, -1 for none")


def test_a_main_that_returns_ends_the_process_well() -> None:
    with running("returns") as child:
        assert end(child) == (0, "", "")


@pytest.mark.parametrize("main", ["is_misconfigured", "is_misconfigured_in_a_group"])
def test_a_wrong_setting_is_one_line_and_exit_2(main: str) -> None:
    with running(main) as child:
        status, _, err = end(child)
        assert (status, err) == (2, "baton: port = 0: expected another\n")


@pytest.mark.parametrize("closed", ["<&-", "<&- >&- 2>&-"])
def test_standard_streams_may_be_closed(closed: str) -> None:
    """uvloop aborts a process in which the number of one of them is anything else's."""
    main = [sys.executable, "-c", _PROGRAM, "starts_a_child", "-1", "30"]
    done = subprocess.run(["sh", "-c", f'"$@" {closed}', "sh", *main], check=False, timeout=250)
    assert done.returncode == 0


def test_a_bug_is_a_traceback_and_exit_1() -> None:
    with running("is_broken") as child:
        status, _, err = end(child)
        assert status == 1
        assert err.endswith("ValueError: a bug\n")

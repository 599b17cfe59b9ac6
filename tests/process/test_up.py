"""`baton up` from the outside: it starts, answers, repairs itself, and leaves nothing behind."""

import asyncio
import json
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.process.cluster import BATON, ENDS_WITHIN_S, READY_WITHIN_S, BatonUp, gone

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

MakeUp = Callable[..., BatonUp]
ALL = ["coordinator", "gateway", "prefill-0", "decode-0"]


async def run(*command: str, within_s: float = ENDS_WITHIN_S) -> tuple[int, str]:
    """Exit code and everything printed."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    async with asyncio.timeout(within_s):
        out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode()


async def test_it_starts_answers_the_curl_line_it_prints_and_ctrl_c_leaves_nothing(baton_up: MakeUp) -> None:
    """Also where a shell ignores SIGINT for background jobs."""
    ignoring = (sys.executable, "-c", "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
                "os.execv(sys.argv[1], sys.argv[1:])")  # fmt: skip
    async with baton_up(prefix=ignoring) as up:
        assert sorted(up.children()) == sorted(ALL)
        assert str(up.log_dir) in up.text
        status, out = await run(*shlex.split(up.curl.replace("curl ", "curl -sS ", 1)))
        assert status == 0, out
        events = [line.removeprefix("data: ") for line in out.splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        assert any(choice["delta"].get("content") for e in events[:-1] for choice in json.loads(e)["choices"])
        os.kill(up.pid, signal.SIGINT)
        assert await up.wait() == 0
        assert up.footprint.remains() == []


async def test_whichever_process_is_killed_is_restarted_with_a_message_and_all_end_soon_after_the_launcher_is_killed(
    baton_up: MakeUp,
) -> None:
    async with baton_up() as up:
        before = await up.complete()
        for names in (("coordinator", "prefill-0"), ("gateway", "decode-0")):
            num_lines, victims = len(up.lines), up.children()
            for name in names:
                victims[name].kill()
            for name in names:
                was_killed = rf"^{name} \(process {victims[name].pid}\) was killed by SIGKILL; restarting"
                await up.line(was_killed, after=num_lines)
            await up.line("The cluster is whole again", within_s=READY_WITHIN_S, after=num_lines)
            assert await up.complete() == before, names
            assert {name for name, pid in up.pids().items() if pid != victims[name].pid} == set(names)
        children = up.children()
        os.kill(up.pid, signal.SIGKILL)
        killed_s = time.monotonic()
        for child in children.values():
            await gone(child.pid, within_s=ENDS_WITHIN_S)
        print(f"gone {time.monotonic() - killed_s:.3f} s after the launcher")
        assert up.footprint.remains() == []


async def test_it_can_be_stopped_while_it_starts(tiny_model: Path, tmp_path: Path) -> None:
    up = BatonUp("--model", str(tiny_model), log_dir=tmp_path)
    await up.start()
    await up.line("starting the processes")
    up.footprint.take(up.pid)
    os.kill(up.pid, signal.SIGTERM)
    assert await up.wait() == 0
    assert up.footprint.remains() == []


async def test_a_port_in_use_is_an_error_that_says_what_to_do(tiny_model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, out = await run(
            *(BATON, "up", "--model", str(tiny_model), "--port", str(port), "--log-dir", str(tmp_path))
        )
    assert status != 0
    assert f"port {port} on 127.0.0.1 is in use" in out
    assert f"make up PORT={port + 1}" in out
    assert "Traceback" not in out


async def test_a_model_that_is_not_there_is_an_error_that_says_what_to_give(tmp_path: Path) -> None:
    status, out = await run(BATON, "up", "--model", "/no/such/model", "--port", "0", "--log-dir", str(tmp_path))
    assert status != 0
    assert "'/no/such/model' does not exist" in out
    assert "Traceback" not in out


async def test_a_cluster_that_cannot_start_ends_with_the_reason(tiny_model: Path, tmp_path: Path) -> None:
    status, out = await run(
        *(BATON, "up", "--model", str(tiny_model), "--port", "0", "--log-dir", str(tmp_path)),
        *("--kv-cache-memory", "1KiB"),
    )
    assert status != 0
    assert "kv_cache_memory" in out
    assert "Traceback" not in out

"""LocalLauncher over small real processes."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from coordinator.launcher.base import ChildDied, ChildSpec, LaunchError
from coordinator.launcher.local import LocalLauncher
from tests.unit.coordinator.launcher.conftest import Mailbox

Spec = Callable[[str, str], ChildSpec]
Deaths = asyncio.Queue[ChildDied]


async def gone(pid: int) -> None:
    """Return once no process has this pid; one that was orphaned is reaped by whoever adopts it."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(fd, ended.set)
    try:
        await asyncio.wait_for(ended.wait(), 60)
    finally:
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)


async def test_a_stopped_child_is_gone(launcher: LocalLauncher, mailbox: Mailbox, spec: Spec) -> None:
    await launcher.start(spec("decode-0", "wait"))
    [pid] = await mailbox.next_pids()
    assert launcher.pids() == {"decode-0": pid}
    await launcher.stop("decode-0")
    assert launcher.pids() == {}
    assert not psutil.pid_exists(pid)


async def test_a_child_killed_from_outside_is_started_again_and_its_last_lines_are_told(
    launcher: LocalLauncher, mailbox: Mailbox, spec: Spec, deaths: Deaths
) -> None:
    await launcher.start(spec("decode-0", "wait"))
    [first] = await mailbox.next_pids()
    os.kill(first, signal.SIGKILL)
    died = await asyncio.wait_for(deaths.get(), 60)
    [second] = await mailbox.next_pids()
    assert (died.name, died.pid, died.status) == ("decode-0", first, -signal.SIGKILL)
    assert died.restart_in_s == 0.001
    assert launcher.pids() == {"decode-0": second}


async def test_a_child_that_keeps_dying_during_start_up_fails_the_launch_with_its_last_lines(
    launcher: LocalLauncher, spec: Spec, deaths: Deaths
) -> None:
    await launcher.start(spec("prefill-0", "die"))
    with pytest.raises(LaunchError, match=r"prefill-0 .*prefill-0\.log"):
        await asyncio.wait_for(launcher.failed(), 60)
    told = [deaths.get_nowait() for _ in range(deaths.qsize())]
    assert [died.status for died in told] == [7] * 5
    assert told[-1].restart_in_s is None
    assert told[-1].last_lines == ("die: the last words",)


async def test_a_child_that_keeps_dying_after_start_up_is_started_again_and_again(
    launcher: LocalLauncher, mailbox: Mailbox, spec: Spec
) -> None:
    launcher.settle()
    await launcher.start(spec("prefill-0", "die"))
    pids = [(await mailbox.next_pids())[0] for _ in range(8)]
    assert len(set(pids)) == 8


async def test_a_child_whose_settings_are_wrong_fails_the_launch_at_its_first_death(
    launcher: LocalLauncher, spec: Spec, deaths: Deaths
) -> None:
    await launcher.start(spec("prefill-0", "hopeless"))
    with pytest.raises(LaunchError):
        await asyncio.wait_for(launcher.failed(), 60)
    assert deaths.qsize() == 1


async def test_a_child_that_ignores_sigterm_is_killed_after_the_grace(
    tmp_path: Path, mailbox: Mailbox, spec: Spec, deaths: Deaths
) -> None:
    launcher = LocalLauncher(log_dir=tmp_path, on_death=deaths.put_nowait, grace_s=0.05)
    await launcher.start(spec("decode-0", "stubborn"))
    [pid] = await mailbox.next_pids()
    await launcher.close()
    assert not psutil.pid_exists(pid)
    assert deaths.empty()


async def test_a_child_that_waits_for_its_restart_can_be_stopped(
    launcher: LocalLauncher, mailbox: Mailbox, spec: Spec, deaths: Deaths
) -> None:
    launcher.settle()
    await launcher.start(spec("decode-0", "die"))
    await asyncio.wait_for(deaths.get(), 60)
    await launcher.stop("decode-0")
    assert launcher.pids() == {}


async def test_what_a_child_had_started_ends_with_it(
    launcher: LocalLauncher, mailbox: Mailbox, spec: Spec, deaths: Deaths
) -> None:
    await launcher.start(spec("decode-0", "parent"))
    child, grandchild = await mailbox.next_pids()
    os.kill(child, signal.SIGKILL)
    await asyncio.wait_for(deaths.get(), 60)
    await gone(grandchild)


async def test_children_end_when_the_launcher_is_killed(tmp_path: Path, mailbox: Mailbox, spec: Spec) -> None:
    children = [spec(name, "wait") for name in ("coordinator", "decode-0")]
    program = (
        "import asyncio, sys\nfrom pathlib import Path\n"
        "from coordinator.launcher.base import ChildSpec\nfrom coordinator.launcher.local import LocalLauncher\n"
        "async def main():\n"
        f"    launcher = LocalLauncher(log_dir=Path({str(tmp_path)!r}), on_death=print)\n"
        f"    for name, command in {[(child.name, child.command) for child in children]!r}:\n"
        "        await launcher.start(ChildSpec(name=name, command=command))\n"
        "    await launcher.failed()\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
    pids = [(await mailbox.next_pids())[0] for _ in children]
    process.kill()
    await process.wait()
    for pid in pids:
        await gone(pid)


async def test_a_program_that_cannot_be_run_is_named(launcher: LocalLauncher) -> None:
    with pytest.raises(LaunchError, match="gateway: cannot run /nowhere/python"):
        await launcher.start(ChildSpec(name="gateway", command=("/nowhere/python",)))


async def test_a_name_can_be_taken_once(launcher: LocalLauncher, mailbox: Mailbox, spec: Spec) -> None:
    await launcher.start(spec("decode-0", "wait"))
    with pytest.raises(LaunchError, match="decode-0 runs already"):
        await launcher.start(spec("decode-0", "wait"))
    await mailbox.next_pids()
    await launcher.stop("nobody")

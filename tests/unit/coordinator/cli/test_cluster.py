import io

from rich.console import Console

from coordinator.cli.cluster import describe
from coordinator.cli.progress import Bars
from coordinator.launcher.base import ChildDied


def test_a_death_is_described_by_who_how_and_what_follows() -> None:
    died = ChildDied(name="decode-0", pid=7, status=-9, restart_in_s=0.2, last_lines=("one", "two"))
    assert describe(died).splitlines() == [
        "decode-0 (process 7) was killed by SIGKILL; restarting it in 0.2 s.",
        "Its last log lines:",
        "    one",
        "    two",
    ]


def test_an_exit_is_told_with_its_code_and_giving_up_as_such() -> None:
    died = ChildDied(name="gateway", pid=7, status=2, restart_in_s=None, last_lines=())
    assert describe(died) == "gateway (process 7) exited with 2; giving up."


def test_without_a_terminal_a_stage_is_one_line() -> None:
    out = io.StringIO()
    with Bars(Console(file=out, force_terminal=False)) as bars:
        for done in range(5):
            bars.report("downloading", done, 5)
        bars.report("converting", None, None)
    assert [line.strip() for line in out.getvalue().splitlines() if line.strip()] == [
        "downloading ...",
        "converting ...",
    ]


def test_in_a_terminal_a_stage_has_a_bar() -> None:
    out = io.StringIO()
    with Bars(Console(file=out, force_terminal=True, width=120)) as bars:
        bars.report("downloading", 3, 5)
        bars.report("converting", None, None)
    assert "downloading" in out.getvalue()
    assert "100%" in out.getvalue()

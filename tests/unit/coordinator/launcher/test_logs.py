from pathlib import Path

import pytest

from common.errors import ConfigError
from coordinator.launcher.logs import last_lines, new_run_folder


def test_the_newest_ten_runs_are_kept(tmp_path: Path) -> None:
    for n in range(15):
        (tmp_path / f"20200101-0000{n:02d}-1").mkdir()
    folder = new_run_folder(tmp_path)
    runs = sorted(path.name for path in tmp_path.iterdir() if not path.is_symlink())
    assert len(runs) == 10
    assert runs[-1] == folder.name
    assert (tmp_path / "latest").resolve() == folder


def test_nothing_else_in_the_folder_is_ever_removed(tmp_path: Path) -> None:
    others = {f"{n:02d} holiday" for n in range(20)} | {"20200101-000000-1-mine", "zz"}
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / "latest").touch()
    folder = new_run_folder(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == others | {"latest", folder.name}
    assert not (tmp_path / "latest").is_symlink()


def test_a_folder_that_cannot_be_made_is_the_operators_to_mend(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file.*--log-dir"):
        new_run_folder(tmp_path / "file")


def test_last_lines_are_those_of_the_last_start(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("old\n")
    start = log.stat().st_size
    log.write_text("old\nnew 1\nnew 2\n")
    assert last_lines(log, from_byte=start) == ("new 1", "new 2")
    assert last_lines(log, max_lines=1) == ("new 2",)


def test_a_log_that_is_not_there_has_no_lines(tmp_path: Path) -> None:
    assert last_lines(tmp_path / "none") == ()

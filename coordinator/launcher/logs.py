"""Where a run's logs go, and their last lines."""

import contextlib
import os
import re
import shutil
from datetime import datetime
from pathlib import Path

from common.errors import ConfigError

_KEPT_RUNS = 10
_RUN_NAME = re.compile(r"\d{8}-\d{6}-\d+")
_TAIL_BYTES = 16 << 10


def new_run_folder(root: Path) -> Path:
    """A fresh folder for one run under `root`, which keeps the newest ten. `root/latest` points to it.

    `root` may be any folder of the operator's: nothing in it is removed that does not bear a run's name.
    ConfigError if it cannot be written.
    """
    folder = root / f"{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make a folder for logs in {root.absolute()} ({error.strerror}); give another one with --log-dir"
        ) from error
    latest = root / "latest"
    with contextlib.suppress(OSError):
        if latest.is_symlink():
            latest.unlink()
        latest.symlink_to(folder.name)
    runs = sorted(path for path in root.iterdir() if _is_run(path))
    for old in runs[:-_KEPT_RUNS]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def _is_run(path: Path) -> bool:
    return _RUN_NAME.fullmatch(path.name) is not None and path.is_dir() and not path.is_symlink()


def last_lines(path: Path, *, from_byte: int = 0, max_lines: int = 12) -> tuple[str, ...]:
    """The last lines written at or after `from_byte`; none if the file cannot be read."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(from_byte, size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ()
    return tuple(text.splitlines()[-max_lines:])

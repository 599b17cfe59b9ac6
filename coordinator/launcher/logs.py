"""Where a run's logs go, and their last lines."""

import contextlib
import os
import shutil
from datetime import datetime
from pathlib import Path

_KEPT_RUNS = 10
_TAIL_BYTES = 16 << 10


def new_run_folder(root: Path) -> Path:
    """A fresh folder for one run under `root`, which keeps the newest ten. `root/latest` points to it."""
    root.mkdir(parents=True, exist_ok=True)
    folder = root / f"{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
    folder.mkdir()
    latest = root / "latest"
    with contextlib.suppress(OSError):
        latest.unlink(missing_ok=True)
        latest.symlink_to(folder.name)
    runs = sorted(path for path in root.iterdir() if path.is_dir() and not path.is_symlink())
    for old in runs[:-_KEPT_RUNS]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


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

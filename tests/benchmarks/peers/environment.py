"""A virtual environment for a peer, made once with exactly these packages and made anew when the list changes."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from common.model.store import Progress
from tests.benchmarks.peers.base import Unavailable, folder

_STAMP = "packages"


def python_of(name: str) -> Path:
    """The interpreter of the environment called `name`, whether it exists or not."""
    return folder(name) / "env" / "bin" / "python"


def install(name: str, requirements: Sequence[str], progress: Progress, *, alone: Sequence[str] = ()) -> Path:
    """Its interpreter. Packages come as wheels only: nothing is built here for minutes. Those that are to come
    `alone` are installed without what they depend on. Unavailable says what pip could not do.
    """
    python, env = python_of(name), folder(name) / "env"
    wanted = "\n".join([*requirements, *(f"{package} alone" for package in alone), ""])
    stamp = env / _STAMP
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    shutil.rmtree(env, ignore_errors=True)  # of another list, or broken off
    progress(f"installing {name} into {env}", None, None)
    env.parent.mkdir(parents=True, exist_ok=True)
    run([sys.executable, "-m", "venv", str(env)], f"cannot make a virtual environment for {name}")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary=:all:"]
    run([*pip, *torch_index(), *requirements], f"pip cannot install {' '.join(requirements)}")
    if alone:
        run([*pip, "--no-deps", *alone], f"pip cannot install {' '.join(alone)}")
    stamp.write_text(wanted)
    return python


def torch_index() -> list[str]:
    """Where torch's CPU wheel comes from beside pip's own index, as `make up TORCH_INDEX=...` was told."""
    index = os.environ.get("TORCH_INDEX")
    return ["--extra-index-url", index] if index else []


def run(command: Sequence[str], failure: str) -> None:
    """To its end. Unavailable: the failure, with the last line of what the command said."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith(("ERROR", "Error"))]
        reason = (errors or lines or [f"it ended with {done.returncode}"])[-1]
        raise Unavailable(f"{failure}: {reason}")

"""Brings the model onto this machine, in a process of its own: `python -m coordinator.launcher.prepare CONFIG`.

Downloading, converting and packing for the kernels block for minutes; as a process they can be ended at any moment,
with all that they started. Prints one line per step of progress (stage, done, total, separated by tabs, empty where
unknown) and last the model's folder, after a tab. What the operator must mend goes to stderr, exit code 2.
"""

import asyncio
import contextlib
import os
import signal
import sys
from importlib import import_module
from pathlib import Path

import msgspec

from common.config import ModelConfig
from common.errors import ConfigError
from common.model import fetch, store


def main() -> int:
    model = msgspec.json.decode(sys.argv[1], type=ModelConfig)
    try:
        folder = store.resolve(model.model, progress=_print_progress)
        if model.executor != "transformers":
            _pack(folder, model)
    except ConfigError as error:
        print(error.message, file=sys.stderr)
        return 2
    print(f"\t{folder}", flush=True)
    return 0


def _pack(folder: Path, model: ModelConfig) -> None:
    """Once, before the nodes ask for it; what they will leave to transformers is left alone."""
    prepared = import_module("common.model.prepared")  # brings numpy, which only this process needs
    with contextlib.suppress(prepared.UnpreparedError):
        prepared.open_prepared(folder, model, progress=_print_progress)


def demo_is_here() -> bool:
    return (store.cache_root() / "models" / fetch.DEMO_NAME).is_dir()


async def prepare(model: ModelConfig, progress: store.Progress) -> Path:
    """Run this module for `model`; its folder. ConfigError says what is wrong. Cancelling ends all it started."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", __name__, msgspec.json.encode(model).decode()),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,  # its group: pip and the converter end with it
    )
    try:
        return await _follow(process, progress)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _follow(process: asyncio.subprocess.Process, progress: store.Progress) -> Path:
    assert process.stdout is not None
    assert process.stderr is not None
    # Read all along: a child that nobody listens to stops at some 100 kB of warnings and progress bars.
    complaining = asyncio.create_task(process.stderr.read())
    folder: Path | None = None
    async for line in process.stdout:
        stage, *rest = line.decode().rstrip("\n").split("\t")
        if stage:
            done, total = (int(count) if count else None for count in rest)
            progress(stage, done, total)
        else:
            folder = Path(rest[0])
    if folder is None:
        complaint = (await complaining).decode(errors="replace").strip().splitlines()
        raise ConfigError(complaint[-1] if complaint else "preparing the model ended and gave no reason")
    return folder


def served_name(model: ModelConfig) -> str:
    """The name clients use: what was asked for, else a hub id, a folder's or file's own name, the demo's."""
    if model.served_name:
        return model.served_name
    if model.model == store.DEMO:
        return "SmolLM2-135M-Instruct"
    path = Path(model.model).expanduser()
    if path.exists():
        return path.resolve().name.removesuffix(".gguf")
    return model.model


def _print_progress(stage: str, done: int | None, total: int | None) -> None:
    # Flushed at once: a reader that is gone ends this process at its next step.
    print(stage, "" if done is None else done, "" if total is None else total, sep="\t", flush=True)


if __name__ == "__main__":
    sys.exit(main())

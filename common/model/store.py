"""From what an operator names to a folder that every process can map. No torch in here: the gateway asks too.

A model is a local folder, a GGUF file, a hub id, or `demo`. Whatever is not a ready folder is fetched and
converted once into the cache (`$BATON_CACHE`, else `~/.cache/baton`); processes that start together wait for
the one that got there first. A folder appears in the cache by one rename, so it is whole or absent.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.model import fetch

Progress = Callable[[str, int | None, int | None], None]
"""`progress(stage, done, total)`: counts are bytes or tensors, None where nobody knows."""

DEMO = "demo"
KEPT_WEIGHTS = "quantised.safetensors"
"""Of a converted folder: weights as the GGUF file stores them, beside the same ones in fp32 (`kept_weights`)."""
_CONVERTER_VERSION = 2  # raise it when a conversion's result changes: old folders are then left alone
_HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
_SAMPLE_BYTES = 256


def no_progress(stage: str, done: int | None, total: int | None) -> None:
    """Reports to nobody."""


def cache_root() -> Path:
    return Path(os.environ.get("BATON_CACHE") or Path.home() / ".cache" / "baton")


def resolve(model: str, *, progress: Progress = no_progress, cache: Path | None = None) -> Path:
    """The folder of `model`: config.json, *.safetensors, and tokenizer files where the source has them.

    Blocks while it downloads or converts. ConfigError says what to do: bad path, no network, no disk space.
    """
    models = (cache or cache_root()) / "models"
    if model == DEMO:
        return cached(models, fetch.DEMO_NAME, fetch.DEMO_DISK_BYTES, _build_demo, progress)
    if not model:
        raise ConfigError(f"model: is empty; give a folder, a .gguf file, a hub id or {DEMO!r}")
    path = Path(model).expanduser()
    if path.is_dir():
        return _ready_folder(path, models, progress)
    if path.is_file():
        return _from_gguf(path, models, progress)
    if path.suffix == ".gguf" or model[:1] in "./~" or not _HUB_ID.fullmatch(model):
        raise ConfigError(f"model: {model!r} does not exist; give a folder, a .gguf file, a hub id or {DEMO!r}")
    return _ready_folder(fetch.snapshot(model, progress), models, progress)


def _ready_folder(path: Path, models: Path, progress: Progress) -> Path:
    if not (path / "config.json").is_file():
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) == 1:
            return _from_gguf(ggufs[0], models, progress)
        found = f"it holds {len(ggufs)} .gguf files: name one" if ggufs else "it has no config.json"
        raise ConfigError(f"model: {path} is not a model folder; {found}")
    if not weight_files(path):
        raise ConfigError(f"model: {path} has no *.safetensors; save the weights again with save_pretrained")
    _require_whole(path)
    return path.resolve()


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the model's weights, each weight once."""
    return sorted(path for path in folder.glob("*.safetensors") if path.name != KEPT_WEIGHTS)


def _require_whole(path: Path) -> None:
    """ConfigError for a folder whose copying or downloading was broken off."""
    if not isinstance(_json(path / "config.json"), dict):
        raise ConfigError(f"model: {path / 'config.json'} is no JSON object; copy or download the model again")
    files = set(path.glob("*.safetensors"))
    index = path / "model.safetensors.index.json"
    if index.is_file():
        named = _json(index)
        shards = named.get("weight_map") if isinstance(named, dict) else None
        if not isinstance(shards, dict):
            raise ConfigError(f"model: {index} names no weights; copy or download the model again")
        files |= {path / name for name in shards.values()}
    for file in sorted(files):
        if not file.is_file() or file.stat().st_size != _promised_bytes(file):
            raise ConfigError(f"model: {file} is missing or incomplete; copy or download the model again")


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: cannot read {path} ({error}); copy or download the model again") from error


def _promised_bytes(path: Path) -> int:
    """What the header of a safetensors file says that its size is; -1 if there is no whole header."""
    with path.open("rb") as file:
        num_header_bytes = int.from_bytes(file.read(8), "little")
        if num_header_bytes > path.stat().st_size:
            return -1
        try:
            tensors = json.loads(file.read(num_header_bytes))
            ends = [entry["data_offsets"][1] for name, entry in tensors.items() if name != "__metadata__"]
        except (ValueError, AttributeError, LookupError, TypeError):
            return -1
        return 8 + num_header_bytes + max(ends, default=0)


def _from_gguf(path: Path, models: Path, progress: Progress) -> Path:
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ConfigError(f"model: {path} is not a GGUF file; give a folder, a .gguf file, a hub id or {DEMO!r}")
    name = f"{path.stem[:48]}-{_sampled(path).hexdigest()[:16]}-v{_CONVERTER_VERSION}"

    def build(folder: Path) -> Path:
        fetch.convert(path, folder / "model", progress)
        return folder / "model"

    return cached(models, name, path.stat().st_size, lambda folder, _: build(folder), progress)


def _build_demo(folder: Path, progress: Progress) -> Path:
    fetch.convert(fetch.download_demo(folder, progress), folder / "model", progress)
    return folder / "model"


def cached(
    models: Path, name: str, disk_bytes: int, build: Callable[[Path, Progress], Path], progress: Progress
) -> Path:
    """`models/name`, made by `build(scratch folder)` if it is not there yet: a folder or a file."""
    ready = models / name
    if ready.exists():
        return ready
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _lock(models / f"{name}.lock", progress):
            if ready.exists():  # somebody else made it while we waited
                return ready
            _require_disk(models, disk_bytes)
            scratch = models / f"{name}.partial"
            shutil.rmtree(scratch, ignore_errors=True)  # left by a process that was killed
            scratch.mkdir()
            try:
                build(scratch, progress).rename(ready)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise ConfigError(
            f"cannot write the model cache {models} ({error}); free space there or set BATON_CACHE to another folder"
        ) from error
    return ready


@contextmanager
def _lock(path: Path, progress: Progress) -> Iterator[None]:
    """One process at a time; the kernel lets go when the holder dies, so nobody waits for a corpse."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process to prepare the model", None, None)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _require_disk(folder: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise ConfigError(
            f"not enough disk space in {folder}: {needed_bytes / 2**20:.0f} MiB needed, {free_bytes / 2**20:.0f} MiB "
            "free; free some or set BATON_CACHE to another folder"
        )


def model_digest(folder: Path) -> str:
    """32 hex digits that differ when the weights, the configuration or the tokenizer do.

    Cheap enough for every start: whole small files, and of each weight file its header, its size and samples of
    every tensor (so a change of a few weights inside one tensor can pass unseen).
    """
    files = [folder / "config.json", folder / "tokenizer.json", *sorted(folder.glob("*.safetensors"))]
    stats = tuple((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files if path.is_file())
    return _digest(folder.resolve(), stats)


@lru_cache(maxsize=64)
def _digest(folder: Path, stats: tuple[tuple[str, int, int], ...]) -> str:
    whole = hashlib.sha256()
    for name, size, _ in stats:
        path = folder / name
        part = _safetensors_digest(path) if path.suffix == ".safetensors" else hashlib.sha256(path.read_bytes())
        whole.update(f"{name}\0{size}\0{part.hexdigest()}\0".encode())
    return whole.hexdigest()[:32]


def _safetensors_digest(path: Path) -> "hashlib._Hash":
    """https://huggingface.co/docs/safetensors: u64 header length, JSON header, tensors one after the other."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
        digest.update(header)
        data_start = file.tell()
        for name, entry in json.loads(header).items():
            if name == "__metadata__":
                continue
            start, end = entry["data_offsets"]
            for offset in (start, (start + end) // 2, max(start, end - _SAMPLE_BYTES)):
                file.seek(data_start + offset)
                digest.update(file.read(min(_SAMPLE_BYTES, end - offset)))
    return digest


def _sampled(path: Path) -> "hashlib._Hash":
    """A big file by its size, its first MiB (GGUF: the metadata) and 64 samples."""
    size = path.stat().st_size
    digest = hashlib.sha256(f"{size}\0".encode())
    with path.open("rb") as file:
        digest.update(file.read(1 << 20))
        for sample in range(64):
            file.seek(size * sample // 64)
            digest.update(file.read(4096))
    return digest

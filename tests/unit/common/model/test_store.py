"""What an operator may name a model by, and that a build happens once, whole or not at all."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.model import fetch, store
from common.model.store import model_digest, resolve

HEADER = b'{"__metadata__":{"format":"pt"},"w":{"dtype":"F32","shape":[1024],"data_offsets":[0,4096]}}'


def write_folder(folder: Path, *, weights: bytes = bytes(4096), tokenizer: str = "{}") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text(tokenizer)
    (folder / "model.safetensors").write_bytes(len(HEADER).to_bytes(8, "little") + HEADER + weights)
    return folder


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Conversions that were asked for; each writes a small folder instead."""
    asked: list[Path] = []

    def convert(gguf: Path, destination: Path, report: fetch.Report) -> None:
        asked.append(gguf)
        write_folder(destination)

    monkeypatch.setattr(fetch, "convert", convert)
    return asked


def write_gguf(path: Path, content: bytes = b"") -> Path:
    path.write_bytes(b"GGUF" + content)
    return path


def test_a_folder_is_used_where_it_is(tmp_path: Path) -> None:
    assert resolve(str(write_folder(tmp_path / "model"))) == tmp_path / "model"


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({}, "no config.json"),
        ({"config.json": "{}", "pytorch_model.bin": "x"}, "no \\*.safetensors"),
        ({"a.gguf": "GGUF", "b.gguf": "GGUF"}, "2 .gguf files: name one"),
    ],
)
def test_a_folder_that_is_no_model_is_refused_with_what_it_lacks(
    files: dict[str, str], why: str, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=why):
        resolve(str(tmp_path))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", b'{"model_type": "ll'),
        ("config.json", b"[]"),
        ("model.safetensors", b""),
        ("model.safetensors", len(HEADER).to_bytes(8, "little") + HEADER[:50]),
        ("model.safetensors", len(HEADER).to_bytes(8, "little") + HEADER + bytes(4095)),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1"),
        ("model.safetensors.index.json", b'{"weight_map": {"w": "model-00001-of-00002.safetensors"}}'),
        ("model.safetensors.index.json", b"{}"),
    ],
)
def test_a_folder_that_was_copied_in_part_is_refused(file: str, content: bytes, tmp_path: Path) -> None:
    (write_folder(tmp_path) / file).write_bytes(content)
    with pytest.raises(ConfigError, match="copy or download the model again"):
        resolve(str(tmp_path))


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/model", "nowhere.gguf", "~/nowhere", "a/b/c", "what?"])
def test_a_path_that_does_not_exist_is_refused_without_asking_the_hub(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "snapshot", lambda *_: pytest.fail("asked the hub"))
    with pytest.raises(ConfigError, match="does not exist"):
        resolve(name)


def test_an_empty_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="is empty"):
        resolve("")


def test_a_hub_id_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path / "snapshot")
    monkeypatch.setattr(fetch, "snapshot", lambda repository, _: folder if repository == "org/model" else None)
    assert resolve("org/model") == folder


def test_a_gguf_file_is_converted_once_and_again_when_its_content_changes(
    tmp_path: Path, conversions: list[Path]
) -> None:
    gguf = write_gguf(tmp_path / "m.gguf")
    first = resolve(str(gguf), cache=tmp_path / "cache")
    assert first.parent == tmp_path / "cache" / "models"
    assert resolve(str(gguf), cache=tmp_path / "cache") == first
    assert len(conversions) == 1
    write_gguf(gguf, b"other")
    assert resolve(str(gguf), cache=tmp_path / "cache") != first
    assert len(conversions) == 2


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path: Path, conversions: list[Path]) -> None:
    gguf = write_gguf(tmp_path / "m.gguf")
    resolve(str(tmp_path), cache=tmp_path / "cache")
    assert conversions == [gguf]


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"PK\3\4")
    with pytest.raises(ConfigError, match="not a GGUF file"):
        resolve(str(tmp_path / "model.bin"))


def test_a_failed_build_leaves_nothing_and_can_be_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf, models = write_gguf(tmp_path / "m.gguf"), tmp_path / "cache" / "models"

    def fail(source: Path, destination: Path, report: fetch.Report) -> None:
        destination.mkdir()
        raise ConfigError("it broke")

    monkeypatch.setattr(fetch, "convert", fail)
    with pytest.raises(ConfigError, match="it broke"):
        resolve(str(gguf), cache=tmp_path / "cache")
    assert [path.suffix for path in models.iterdir()] == [".lock"]
    monkeypatch.setattr(fetch, "convert", lambda source, destination, report: write_folder(destination))
    assert resolve(str(gguf), cache=tmp_path / "cache").is_dir()


def test_what_a_killed_process_left_is_cleared(tmp_path: Path, conversions: list[Path]) -> None:
    gguf = write_gguf(tmp_path / "m.gguf")
    ready = resolve(str(gguf), cache=tmp_path / "cache")
    ready.rename(ready.with_name(f"{ready.name}.partial"))
    assert resolve(str(gguf), cache=tmp_path / "cache") == ready
    assert not ready.with_name(f"{ready.name}.partial").exists()


def test_processes_that_start_together_build_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf, cache = write_gguf(tmp_path / "m.gguf"), tmp_path / "cache"
    building, go, waiting = threading.Event(), threading.Event(), threading.Event()
    builds: list[Path] = []

    def convert(source: Path, destination: Path, report: fetch.Report) -> None:
        builds.append(source)
        building.set()
        assert go.wait(30)
        write_folder(destination)

    monkeypatch.setattr(fetch, "convert", convert)
    found: list[Path] = []
    first = threading.Thread(target=lambda: found.append(resolve(str(gguf), cache=cache)))
    second = threading.Thread(
        target=lambda: found.append(resolve(str(gguf), cache=cache, progress=lambda *_: waiting.set()))
    )
    first.start()
    assert building.wait(30)
    second.start()
    assert waiting.wait(30)  # it says that it waits for the other
    go.set()
    first.join()
    second.join()
    assert len(builds) == 1
    assert found[0] == found[1]


def test_too_little_disk_space_is_said_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = store.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _: usage._replace(free=1 << 20))
    monkeypatch.setattr(fetch, "download_demo", lambda *_: pytest.fail("downloaded"))
    with pytest.raises(ConfigError, match=r"not enough disk space.*BATON_CACHE"):
        resolve("demo", cache=tmp_path)


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path, conversions: list[Path]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="BATON_CACHE"):
        resolve(str(write_gguf(tmp_path / "m.gguf")), cache=tmp_path / "file")


def test_a_conversion_that_fails_says_why(tmp_path: Path) -> None:
    gguf = write_gguf(tmp_path / "broken.gguf", b"\3\0\0\0")
    with pytest.raises(ConfigError, match=r"converting the model failed: .*broken\.gguf: this is no GGUF file"):
        fetch.convert(gguf, tmp_path / "out", lambda *_: None)
    assert not (tmp_path / "out").exists()


def test_the_digest_sees_weights_configuration_and_tokenizer(tmp_path: Path) -> None:
    digests = {
        model_digest(write_folder(tmp_path / "a")),
        model_digest(write_folder(tmp_path / "b", weights=bytes(4092) + b"\1\2\3\4")),
        model_digest(write_folder(tmp_path / "c", tokenizer='{"a": 1}')),
    }
    (write_folder(tmp_path / "d") / "config.json").write_text('{"model_type": "qwen2"}')
    digests.add(model_digest(tmp_path / "d"))
    assert len(digests) == 4
    assert all(len(digest) == 32 for digest in digests)
    assert model_digest(write_folder(tmp_path / "e")) == model_digest(tmp_path / "a")


def test_a_digest_follows_a_change_on_disk(tmp_path: Path) -> None:
    before = model_digest(write_folder(tmp_path / "m"))
    assert model_digest(write_folder(tmp_path / "m", weights=b"\7" * 4096)) != before


def test_the_store_imports_no_torch() -> None:
    code = "import sys, common.model.store; sys.exit(bool({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

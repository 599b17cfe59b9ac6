"""Compiling at first use: once per source, flags and machine, by whoever comes first; clear words when it fails."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.native.build import cache_dir, compiler, library


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source file, an empty cache, and a compiler that notes each run in `runs` and copies its input."""
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    script = tmp_path / "compiler"
    script.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo 1.0 && exit\necho run >> {tmp_path}/runs\n'
        f'grep -q broken {tmp_path}/kernel.cpp && echo "kernel.cpp:1: no" >&2 && exit 1\n'
        'while [ $# -gt 1 ]; do [ "$1" = -o ] && cp "$0" "$2"; shift; done\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    path = tmp_path / "kernel.cpp"
    path.write_text("int one() { return 1; }\n")
    return path


def runs(source: Path) -> int:
    log = source.with_name("runs")
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_a_library_is_compiled_once_and_found_again(source: Path) -> None:
    first = library(source)
    assert first.exists()
    assert first.parent == cache_dir()
    assert library(source) == first
    assert runs(source) == 1


def test_many_that_start_together_compile_once(source: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        paths = {future.result() for future in [pool.submit(library, source) for _ in range(8)]}
    assert len(paths) == 1
    assert runs(source) == 1


def test_source_headers_flags_and_compiler_each_make_another_library(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [library(source), library(source, extra_flags=("-DX",))]
    source.write_text("int two() { return 2; }\n")
    paths.append(library(source))
    source.with_name("part.h").write_text("// a header\n")
    paths.append(library(source))
    script = source.with_name("compiler")
    script.write_text(script.read_text().replace("1.0", "1.1"))
    paths.append(library(source))
    assert len(set(paths)) == len(paths)


def test_a_failed_compilation_says_why_and_leaves_nothing_behind(source: Path) -> None:
    source.write_text("broken\n")
    with pytest.raises(ConfigError, match=r"kernel\.cpp:1: no") as caught:
        library(source)
    assert "--attention reference" in caught.value.message
    assert [path.suffix for path in cache_dir().iterdir()] == [".lock"]


def test_without_a_compiler_the_error_says_what_to_install(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(source.parent / "nothing"))
    with pytest.raises(ConfigError, match=r"install g\+\+.*--attention reference"):
        compiler()


def test_a_compiler_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++ -m64")
    with pytest.raises(ConfigError, match="CXX='/nowhere/c\\+\\+'"):
        compiler()


def test_a_cache_that_cannot_be_written_is_named(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CACHE", str(source))  # a file
    with pytest.raises(ConfigError, match="set BATON_CACHE to a writable folder"):
        library(source)

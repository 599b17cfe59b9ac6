import os
import socket
from pathlib import Path

import pytest

from common.errors import ConfigError
from coordinator.launcher import checks


def test_a_port_in_use_is_named_with_its_holder_and_the_way_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} .* process {os.getpid()} .*make up PORT={port + 1}"):
            checks.require_free_port("127.0.0.1", port)
    checks.require_free_port("127.0.0.1", port)


def test_free_ports_are_free() -> None:
    checks.require_free_port("127.0.0.1", checks.free_port())


def test_too_little_memory_is_said_in_figures() -> None:
    with pytest.raises(ConfigError, match=r"2 nodes need about 3\.\d GB .* 1\.0 GB are free.*--kv-cache-memory"):
        checks.require_memory(weight_bytes=10**9, pool_bytes=10**9 // 2, num_nodes=2, available_bytes=10**9)


def test_weights_count_once_however_many_nodes_share_them() -> None:
    checks.require_memory(weight_bytes=10**9, pool_bytes=0, num_nodes=4, available_bytes=3 * 10**9)
    with pytest.raises(ConfigError):
        checks.require_memory(weight_bytes=10**9, pool_bytes=0, num_nodes=4, available_bytes=2 * 10**9)


def test_too_little_disk_is_said_also_for_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    checks.require_disk(tmp_path / "a" / "b", 1)
    with pytest.raises(ConfigError, match=r"too little disk: .*BATON_CACHE"):
        checks.require_disk(tmp_path / "a" / "b", 1 << 60)


def test_some_memory_is_available() -> None:
    assert checks.available_memory() > 0


def test_a_missing_compiler_is_noted_with_what_it_costs() -> None:
    [note] = checks.notes("auto", cpu_flags=frozenset({"avx2", "avx512f"}), compiler=None)
    assert "reference attention" in note
    assert "g++" in note


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="x86-64 vector extensions")
def test_a_cpu_without_avx512_is_noted_with_the_kernel_that_is_used() -> None:
    gcc = "/usr/bin/g++"
    assert checks.notes("auto", cpu_flags=frozenset({"avx2", "avx512f"}), compiler=gcc) == []
    assert "AVX2 attention kernel" in checks.notes("auto", cpu_flags=frozenset({"avx2"}), compiler=gcc)[0]
    assert "plain vector code" in checks.notes("auto", cpu_flags=frozenset(), compiler=gcc)[0]

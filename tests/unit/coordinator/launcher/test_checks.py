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


def test_a_reserved_port_is_nobody_elses_but_a_child_can_listen_there() -> None:
    with checks.reserved_port("127.0.0.1") as port:
        with pytest.raises(OSError, match="in use"), checks.reserved_port("127.0.0.1", port):
            pass
        for _ in range(2):  # a restarted child finds it free again
            with (
                socket.create_server(("127.0.0.1", port)),
                socket.create_connection(("127.0.0.1", port)),
                pytest.raises(OSError, match="in use"),
                checks.reserved_port("127.0.0.1", port),
            ):
                pass


def test_a_port_whose_last_connections_linger_can_be_reserved_but_one_that_is_listened_on_cannot() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        served, _ = listening.accept()
        with pytest.raises(OSError, match="in use"), checks.reserved_port("127.0.0.1", port):
            pass
        served.close()  # the first to close is the one that lingers
        client.close()
    with checks.reserved_port("127.0.0.1", port) as reserved:
        assert reserved == port


def test_too_little_memory_is_said_in_figures() -> None:
    with pytest.raises(ConfigError, match=r"2 nodes need about 2\.9 GB .* 1\.0 GB are free.*--kv-cache-memory"):
        checks.require_memory(
            shared_bytes=10**9, private_bytes=0, pool_bytes=5 * 10**8, num_nodes=2, available_bytes=10**9
        )


def test_weights_that_nodes_share_count_once() -> None:
    checks.require_memory(shared_bytes=10**9, private_bytes=0, pool_bytes=10**6, num_nodes=4, available_bytes=3 * 10**9)
    with pytest.raises(ConfigError):
        checks.require_memory(
            shared_bytes=0, private_bytes=10**9, pool_bytes=10**6, num_nodes=4, available_bytes=3 * 10**9
        )


def test_a_pool_that_sizes_itself_takes_a_tenth_of_what_is_free() -> None:
    checks.require_memory(shared_bytes=0, private_bytes=0, pool_bytes=0, num_nodes=2, available_bytes=13 * 10**8)
    with pytest.raises(ConfigError):
        checks.require_memory(shared_bytes=0, private_bytes=0, pool_bytes=0, num_nodes=2, available_bytes=10**9)


def test_weights_are_shared_in_the_type_they_are_stored_in_and_private_in_another(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}')
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    assert checks.weight_bytes(tmp_path, "bfloat16") == (1000, 0)
    assert checks.weight_bytes(tmp_path, "float32") == (0, 2000)


def test_some_memory_is_available() -> None:
    assert checks.available_memory() > 0


def test_a_missing_compiler_is_noted_with_what_it_costs() -> None:
    [note] = checks.notes("auto", cpu_flags=frozenset({"avx2", "avx512f"}), has_compiler=False)
    assert "reference attention" in note
    assert "g++" in note


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="x86-64 vector extensions")
def test_a_cpu_without_avx512_is_noted_with_the_kernel_that_is_used() -> None:
    assert checks.notes("auto", cpu_flags=frozenset({"avx2", "avx512f"}), has_compiler=True) == []
    assert "AVX2 attention kernel" in checks.notes("auto", cpu_flags=frozenset({"avx2"}), has_compiler=True)[0]
    assert "plain vector code" in checks.notes("auto", cpu_flags=frozenset(), has_compiler=True)[0]


def test_cxx_chooses_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    assert checks.find_compiler() is None
    monkeypatch.setenv("CXX", "sh -O2")
    assert checks.find_compiler() is not None

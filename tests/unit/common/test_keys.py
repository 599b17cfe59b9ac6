import os
from pathlib import Path

import pytest

from common.config import LinkConfig
from common.errors import ConfigError
from common.keys import Trust, create, is_local, load


def test_new_keys_can_be_loaded_and_are_nobody_elses(tmp_path: Path) -> None:
    create(tmp_path / "deep" / "keys")
    keys = load(tmp_path / "deep" / "keys")
    assert len({keys.server.public, keys.server.secret, keys.client.public, keys.client.secret}) == 4
    assert os.stat(tmp_path / "deep" / "keys").st_mode & 0o777 == 0o700
    assert Trust.of(LinkConfig(keys=str(tmp_path / "deep" / "keys"))).keys == keys


def test_what_is_there_is_never_overwritten(tmp_path: Path) -> None:
    create(tmp_path)
    before = load(tmp_path)
    with pytest.raises(ConfigError, match="never overwritten"):
        create(tmp_path)
    assert load(tmp_path) == before


def test_secrets_appear_in_no_text(tmp_path: Path) -> None:
    create(tmp_path)
    keys = load(tmp_path)
    for text in (repr(keys), str(Trust(keys=keys))):
        assert keys.server.secret.decode() not in text
        assert keys.client.secret.decode() not in text


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("not TOML", "no key file"),
        ("public = 'x'", "no key file"),
        ("public = 'x'\nsecret = 'x'", "wrong length"),
        ("public = 'ü'\nsecret = ''", "no key file"),
        (None, "cannot read"),
    ],
)
def test_a_file_that_is_no_key_is_named(tmp_path: Path, content: str | None, reason: str) -> None:
    create(tmp_path)
    (tmp_path / "client.key").unlink()
    if content is not None:
        (tmp_path / "client.key").write_text(content)
        (tmp_path / "client.key").chmod(0o600)
    with pytest.raises(ConfigError, match=reason) as caught:
        load(tmp_path)
    assert "client.key" in caught.value.message


def test_keys_that_everybody_can_read_are_refused(tmp_path: Path) -> None:
    create(tmp_path)
    (tmp_path / "server.key").chmod(0o644)
    with pytest.raises(ConfigError, match=r"everybody on this host can read .*chmod 600"):
        load(tmp_path)


def test_keys_in_no_folder_are_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot make keys"):
        create(tmp_path / "file" / "keys")


@pytest.mark.parametrize(
    "address",
    ["tcp://127.0.0.1:0", "tcp://127.9.9.9:1", "tcp://[::1]:7", "tcp://localhost:7", "tcp://lo:*", "ipc:///run/b", "x"],
)
def test_what_only_this_host_reaches_needs_no_keys(address: str) -> None:
    assert is_local(address)
    Trust().check_bind(address)


@pytest.mark.parametrize(
    "address",
    [
        "tcp://0.0.0.0:0",
        "tcp://*:7070",
        "tcp://[::]:7",
        "tcp://10.0.0.1:7",
        "tcp://eth0:7",
        "tcp://node:7",
        "ws://lo:1",
    ],
)
def test_what_others_reach_needs_keys_or_a_word(address: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"listen = .*baton keys new FOLDER.*--keys FOLDER.*--open-network"):
        Trust().check_bind(address)
    create(tmp_path)
    Trust(keys=load(tmp_path)).check_bind(address)
    Trust(open_network=True).check_bind(address)

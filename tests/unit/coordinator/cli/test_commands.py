"""The `baton` command from the outside."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.cli import COMMANDS, load_command

_HEAVY = ("torch", "transformers", "numpy", "aiohttp", "pydantic", "rich", "ucxx")
_NOBODY = "tcp://127.0.0.1:1"


def baton(*arguments: str) -> "subprocess.CompletedProcess[str]":
    program = "from coordinator.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=50, check=False
    )


def test_help_lists_every_command_with_a_line() -> None:
    done = baton("--help")
    assert done.returncode == 0
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    for name, command in COMMANDS.items():
        assert f"{name} {command.help}" in lines


def test_baton_alone_shows_its_help() -> None:
    done = baton()
    assert "prefill-node" in done.stdout + done.stderr


def test_commands_that_must_answer_at_once_load_nothing_heavy() -> None:
    commands = [
        ("--help",),
        ("version",),
        ("coordinator", "--help"),
        ("gateway", "--help"),
        ("prefill-node", "--help"),
        ("decode-node", "--help"),
        ("status", "--coordinator", _NOBODY),
        ("audit", "--coordinator", _NOBODY),
        ("keys", "--help"),
        ("chat", "--url", "http://127.0.0.1:1", "-m", "hello"),
    ]
    program = f"""
import json, sys
from coordinator.cli import run
loaded = {{}}
for arguments in {commands!r}:
    sys.argv[1:] = arguments
    try:
        run()
    except SystemExit:
        pass
    loaded[" ".join(arguments)] = [name for name in {_HEAVY!r} if name in sys.modules]
print(json.dumps(loaded), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
    assert "no coordinator at" in done.stderr
    assert json.loads(done.stderr.splitlines()[-1]) == {" ".join(arguments): [] for arguments in commands}


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_help_of_its_own(name: str) -> None:
    command = load_command(name)
    assert command.name == name
    assert command.help


def test_a_misspelt_command_is_refused_with_the_nearest() -> None:
    done = baton("statis")
    assert done.returncode == 2
    assert "Did you mean 'status'?" in done.stderr


def test_a_wrong_setting_is_one_line_and_exit_2() -> None:
    done = baton("coordinator", "--prefill-unavailable", "perhaps")
    assert (done.returncode, done.stderr) == (
        2,
        "baton: prefill_unavailable = 'perhaps' (from --prefill-unavailable): expected one of local, wait, fail\n",
    )


def test_status_without_a_coordinator_says_so_and_exits_with_1() -> None:
    done = baton("status", "--coordinator", _NOBODY)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith(f"baton: no coordinator at {_NOBODY} (")
    assert "`baton up` starts a cluster" in done.stderr


def test_audit_without_a_coordinator_says_so_and_exits_with_2() -> None:
    done = baton("audit", "--coordinator", _NOBODY)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"baton: no coordinator at {_NOBODY} (")


@pytest.mark.parametrize("value", ["soon", "nan", "-1"])
def test_status_says_what_is_wrong_with_its_own_flags(value: str) -> None:
    done = baton("status", f"--timeout={value}")
    assert done.returncode == 2
    assert f"'{value}' is no number of seconds" in done.stderr


def test_keys_new_makes_a_folder_that_its_owner_alone_reads_and_says_what_to_do_with_it(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    done = baton("keys", "new", str(folder))
    assert done.returncode == 0, done.stderr
    assert f"--keys {folder}" in done.stdout
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in folder.iterdir())
    again = baton("keys", "new", str(folder))
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)
    assert "never overwritten" in again.stderr


def test_keys_that_are_not_there_are_named() -> None:
    done = baton("status", "--keys", "/nowhere")
    assert done.returncode == 2
    assert "cannot read /nowhere/server.key" in done.stderr


def test_a_process_does_not_bind_beyond_its_host_without_keys() -> None:
    done = baton("coordinator", "--listen", "tcp://0.0.0.0:0")
    assert done.returncode == 2
    for word in ("listen", "baton keys new", "--keys", "--open-network"):
        assert word in done.stderr


def test_version_names_what_is_installed() -> None:
    assert baton("version").stdout.startswith("baton 0.")

"""Flags generated from config classes."""

import signal
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from msgspec import Meta
from typer.testing import CliRunner

from common.command_line import PlainCommand, process_command
from common.config import LinkConfig, Size
from common.errors import ConfigError
from common.rpc.base import Network

LINKS = LinkConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class OvenConfig:
    trays: Annotated[int, Meta(ge=1, description="Trays in it.")] = 1
    fan: Annotated[bool, Meta(description="Blow.")] = True
    room_size: Annotated[int, Size, Meta(description="How much fits.")] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KitchenConfig:
    chef: Annotated[str, Meta(description="Who cooks.")]
    oven: OvenConfig = OvenConfig()
    guests: Annotated[tuple[str, ...], Meta(description="Who eats.")] = ("Bob",)
    meal: Annotated[Literal["lunch", "supper"], Meta(description="When.")] = "lunch"
    links: LinkConfig = LINKS
    parent_pipe: int = -1


class Kitchen:
    """What the target was called with."""

    def __init__(self) -> None:
        self.config: KitchenConfig | None = None
        self.error: Exception | None = None

    async def serve(self, config: KitchenConfig, network: Network) -> None:
        self.config = config
        if self.error is not None:
            raise self.error

    def run(self, *flags: str, env: dict[str, str] | None = None) -> Any:
        app = typer.Typer(rich_markup_mode=None, add_completion=False)
        command = process_command("kitchen", KitchenConfig, "a_kitchen:serve", help="Cooks.")
        app.command(cls=PlainCommand)(command)
        return CliRunner().invoke(app, list(flags), env=env)


@pytest.fixture
def kitchen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kitchen]:
    kitchen = Kitchen()
    module = types.ModuleType("a_kitchen")
    module.serve = kitchen.serve  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_kitchen", module)
    monkeypatch.setattr("common.telemetry.configure", lambda *_, **__: None)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    interval_s = sys.getswitchinterval()
    yield kitchen
    sys.setswitchinterval(interval_s)
    for number, action in before.items():
        signal.signal(number, action)


def test_flags_reach_the_target_as_its_config(kitchen: Kitchen) -> None:
    done = kitchen.run(
        *("--chef", "Ada", "--trays", "2", "--no-fan", "--room-size", "1KiB", "--meal", "supper"),
        *("--guests", "Eve", "--guests", "Mallory"),
    )
    assert done.exit_code == 0, done.output
    assert kitchen.config == KitchenConfig(
        chef="Ada",
        oven=OvenConfig(trays=2, fan=False, room_size=1024),
        guests=("Eve", "Mallory"),
        meal="supper",
    )


def test_flags_that_are_not_given_leave_file_and_environment_alone(kitchen: Kitchen, tmp_path: Path) -> None:
    file = tmp_path / "kitchen.toml"
    file.write_text('chef = "file"\nguests = []\n[oven]\ntrays = 4\nfan = false\n')
    done = kitchen.run("--config", str(file), "--trays", "5", env={"BATON_KITCHEN_CHEF": "env"})
    assert done.exit_code == 0, done.output
    assert kitchen.config == KitchenConfig(chef="env", oven=OvenConfig(trays=5, fan=False), guests=())


def test_help_says_what_each_flag_is_its_default_and_its_variable(kitchen: Kitchen) -> None:
    text = " ".join(kitchen.run("--help").output.split())
    assert "Cooks." in text
    assert "--chef TEXT Who cooks. [required; env BATON_KITCHEN_CHEF]" in text
    assert "--trays INTEGER Trays in it. [default: 1; env BATON_OVEN_TRAYS]" in text
    assert "--room-size SIZE" in text
    assert "--fan / --no-fan" in text
    assert "--meal lunch|supper When. [default: lunch; env BATON_KITCHEN_MEAL]" in text
    assert "--guests TEXT Who eats. [default: Bob; env BATON_KITCHEN_GUESTS]" in text
    assert kitchen.config is None


def test_a_wrong_flag_is_one_line_and_exit_2_and_nothing_starts(kitchen: Kitchen) -> None:
    done = kitchen.run("--chef", "Ada", "--trays", "0")
    assert (done.exit_code, done.output) == (
        2,
        "baton: oven.trays = '0' (from --trays): expected a whole number, at least 1\n",
    )
    assert kitchen.config is None


def test_an_unknown_flag_is_refused_with_the_nearest(kitchen: Kitchen) -> None:
    done = kitchen.run("--chef", "Ada", "--tray", "1")
    assert done.exit_code == 2
    assert "--trays" in done.output


def test_a_target_that_cannot_start_for_its_settings_is_exit_2(kitchen: Kitchen) -> None:
    kitchen.error = ConfigError("chef = 'Ada': is on holiday")
    done = kitchen.run("--chef", "Ada")
    assert (done.exit_code, done.output) == (2, "baton: chef = 'Ada': is on holiday\n")


def test_two_fields_that_would_share_a_flag_are_our_bug() -> None:
    @dataclass(frozen=True)
    class Twice:
        oven: OvenConfig
        trays: int = 1

    Twice.__annotations__["oven"] = OvenConfig
    with pytest.raises(AssertionError, match="share one flag"):
        process_command("twice", Twice, "nowhere:serve", help="")

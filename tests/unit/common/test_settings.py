from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from msgspec import Meta

from common.config import CoordinatorConfig, EngineConfig, GatewayConfig, ModelConfig, NodeConfig, Size
from common.errors import ConfigError
from common.fields import parse_size, settings_of
from common.settings import load


@dataclass(frozen=True, slots=True, kw_only=True)
class OvenConfig:
    size: Annotated[int, Size, Meta(ge=0, description="How much fits.")] = 0
    trays: Annotated[int, Meta(ge=1, le=9)] = 1
    heat_s: Annotated[float, Meta(gt=0)] = 1.5
    fan: bool = False
    mode: Literal["bake", "grill"] = "bake"
    names: tuple[str, ...] = ()
    label: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KitchenConfig:
    chef: Annotated[str, Meta(description="Who cooks.")]
    oven: OvenConfig = OvenConfig(trays=3)
    doors: int = 1


def write(folder: Path, text: str) -> Path:
    file = folder / "kitchen.toml"
    file.write_text(text)
    return file


def load_kitchen(**sources: Any) -> KitchenConfig:
    return load(KitchenConfig, **{"env": {"BATON_KITCHEN_CHEF": "Ada"}, **sources})


def refusal(**sources: Any) -> str:
    with pytest.raises(ConfigError) as error:
        load_kitchen(**sources)
    return error.value.message


def test_what_is_not_set_has_its_default_and_a_sections_own_default_counts() -> None:
    assert load_kitchen() == KitchenConfig(chef="Ada", oven=OvenConfig(trays=3))


def test_later_sources_win_field_by_field(tmp_path: Path) -> None:
    file = write(tmp_path, 'chef = "file"\ndoors = 2\n[oven]\ntrays = 5\nmode = "grill"\n')
    config = load(
        KitchenConfig,
        file=file,
        env={"BATON_KITCHEN_CHEF": "env", "BATON_OVEN_TRAYS": "6"},
        flags={"oven.trays": "7", "oven.label": None},
    )
    assert config == KitchenConfig(chef="env", doors=2, oven=OvenConfig(trays=7, mode="grill"))


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("oven.size", "512MiB", 512 << 20),
        ("oven.size", "4096", 4096),
        ("oven.trays", "9", 9),
        ("oven.heat_s", "2", 2.0),
        ("oven.fan", "true", True),
        ("oven.fan", "0", False),
        ("oven.mode", "grill", "grill"),
        ("oven.names", "a, b,", ("a", "b")),
        ("oven.label", "12", "12"),
    ],
)
def test_text_becomes_the_fields_type(key: str, text: str, value: object) -> None:
    section, name = key.split(".")
    for sources in (
        {"flags": {key: text}},
        {"env": {"BATON_KITCHEN_CHEF": "Ada", f"BATON_{section}_{name}".upper(): text}},
    ):
        assert getattr(load_kitchen(**sources).oven, name) == value


def test_a_file_has_its_own_types(tmp_path: Path) -> None:
    text = '[oven]\nsize = "2GB"\nheat_s = 3\nfan = true\nnames = ["a,b", "c"]\n'
    assert load_kitchen(file=write(tmp_path, text)).oven == OvenConfig(
        trays=3, size=2_000_000_000, heat_s=3.0, fan=True, names=("a,b", "c")
    )
    assert refusal(file=write(tmp_path, '[oven]\ntrays = "5"\n')) == (
        f"oven.trays = '5' (from {tmp_path}/kitchen.toml): expected a whole number, at least 1, at most 9"
    )


def test_a_flag_given_several_times_is_a_list() -> None:
    assert load_kitchen(flags={"oven.names": ["a", "b,c"]}).oven.names == ("a", "b", "c")


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("oven.trays", "10", "a whole number, at least 1, at most 9"),
        ("oven.trays", "many", "a whole number, at least 1, at most 9"),
        ("oven.trays", "1.5", "a whole number, at least 1, at most 9"),
        ("oven.heat_s", "0", "a number, above 0"),
        ("oven.fan", "perhaps", "true or false"),
        ("oven.mode", "gril", "one of bake, grill; did you mean grill?"),
        ("oven.mode", "zzz", "one of bake, grill"),
        ("oven.size", "2XB", 'a size such as 1073741824, "512MiB" or "2GB", at least 0'),
        ("oven.size", "-1", 'a size such as 1073741824, "512MiB" or "2GB", at least 0'),
        ("oven.size", -1, 'a size such as 1073741824, "512MiB" or "2GB", at least 0'),
        ("oven.label", 5, "a string"),
    ],
)
def test_a_wrong_value_is_named_with_its_key_its_origin_and_what_is_right(
    key: str, value: object, expected: str
) -> None:
    flag = f"--{key.partition('.')[2].replace('_', '-')}"
    assert refusal(flags={key: value}) == f"{key} = {value!r} (from {flag}): expected {expected}"


def test_a_wrong_value_names_its_environment_variable() -> None:
    assert refusal(env={"BATON_KITCHEN_CHEF": "Ada", "BATON_OVEN_FAN": "x"}) == (
        "oven.fan = 'x' (from environment variable BATON_OVEN_FAN): expected true or false"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dors = 1", "unknown key dors (from {file}); did you mean doors?"),
        ("[oven]\ntrais = 1", "unknown key oven.trais (from {file}); did you mean oven.trays?"),
        ("oven = 3", "oven = 3 (from {file}): expected a table [oven] with oven.size, oven.trays, oven.heat_s, "),
        ("[doors]\nfront = 1", "doors = {{'front': 1}} (from {file}): expected a whole number"),
        ("oven =", "the settings file {file} is not valid TOML: "),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path, text)
    assert refusal(file=file).startswith(message.format(file=file))


def test_an_unknown_key_that_resembles_nothing_gets_the_list() -> None:
    assert refusal(flags={"zzz": 1}).startswith("unknown flag zzz = 1; known: chef, oven.size, oven.trays")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert refusal(file=tmp_path / "none.toml") == (
        f"cannot read the settings file {tmp_path}/none.toml: No such file or directory"
    )


def test_a_required_field_says_the_three_ways_to_set_it() -> None:
    assert refusal(env={}) == (
        "chef is not set; give --chef, BATON_KITCHEN_CHEF or chef in the settings file (Who cooks)"
    )


def test_a_misspelt_variable_is_refused_and_other_processes_variables_are_not() -> None:
    env = {"BATON_KITCHEN_CHEF": "Ada", "BATON_GATEWAY_PORT": "x", "BATON_LOG_LEVEL": "debug", "HOME": "/"}
    assert load_kitchen(env=env) == load_kitchen()
    assert refusal(env={**env, "BATON_OVEN_TRAIS": "1"}) == (
        "unknown environment variable BATON_OVEN_TRAIS=1; did you mean BATON_OVEN_TRAYS?"
    )


def test_variables_that_kubernetes_adds_for_a_service_are_no_settings() -> None:
    env = {
        "BATON_GATEWAY_MODEL": "m",
        "BATON_GATEWAY_PORT": "tcp://10.0.0.7:80",
        "BATON_GATEWAY_SERVICE_HOST": "10.0.0.7",
        "BATON_GATEWAY_SERVICE_PORT_HTTP": "80",
        "BATON_GATEWAY_PORT_80_TCP_ADDR": "10.0.0.7",
    }
    assert load(GatewayConfig, env=env) == GatewayConfig(model="m")


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("1B", 1),
        ("1kB", 1000),
        ("1 KiB", 1024),
        ("1K", 1024),
        ("1.5GiB", 3 << 29),
        ("2gb", 2_000_000_000),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "MiB", "1.", "-1", "1 MiB 2", "1e9", "1Mi"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="is no size"):
        parse_size(text)


@pytest.mark.parametrize("kind", [CoordinatorConfig, GatewayConfig, NodeConfig])
def test_every_setting_of_every_process_can_be_given_in_all_three_ways(kind: type[Any]) -> None:
    settings = settings_of(kind)
    for names in ([s.flag for s in settings], [s.env for s in settings], [s.key for s in settings]):
        assert len(set(names)) == len(names)
    assert all(setting.description for setting in settings)
    required = {setting.key: "x" for setting in settings if setting.is_required}
    defaults = {setting.key: setting.default for setting in settings if not setting.is_required}
    assert load(kind, env={}, flags=required) == load(kind, env={}, flags={**required, **defaults})


def test_the_sections_of_a_node() -> None:
    env = {"BATON_MODEL_MODEL": "m", "BATON_ENGINE_KV_CACHE_MEMORY": "1GiB", "BATON_NODE_COORDINATORS": "a,b"}
    assert load(NodeConfig, env=env) == NodeConfig(
        model=ModelConfig(model="m"), engine=EngineConfig(kv_cache_memory=1 << 30), coordinators=("a", "b")
    )


def test_a_peer_is_given_three_beats_at_least_before_it_is_lost() -> None:
    flags = {"model.model": "m", "links.beat_s": "0.2", "links.lost_after_s": "0.6"}
    assert load(NodeConfig, env={}, flags=flags).links.lost_after_s == 0.6
    with pytest.raises(ConfigError, match=r"links.lost_after_s = 0.5: expected at least three beats, 0.6"):
        load(NodeConfig, env={}, flags={**flags, "links.lost_after_s": "0.5"})
    with pytest.raises(ConfigError, match=r"links.lost_after_s = 4: .* 6 \(links.beat_s = 2\)"):
        load(NodeConfig, env={"BATON_LINKS_BEAT_S": "2"}, flags={"model.model": "m"})

"""Loads settings: the TOML file, then the environment, then flags; later wins.

Every field of a config class has a dotted key, e.g. `engine.kv_cache_memory`:

    file          [engine]
                  kv_cache_memory = "2GB"
    environment   BATON_ENGINE_KV_CACHE_MEMORY=2GB
    flag          --kv-cache-memory 2GB

A field that lies in no section has its class's name for one in the environment: `GatewayConfig.port` is
`port` in the file, `BATON_GATEWAY_PORT` and `--port`. A list is a TOML array, comma-separated text, or a
flag given several times. Unknown keys are refused in all three places.
"""

import dataclasses
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from common.errors import ConfigError
from common.fields import Given, Setting, convert, settings_of, suggest

T = TypeVar("T")

# A Kubernetes Service named baton-gateway puts BATON_GATEWAY_SERVICE_HOST, BATON_GATEWAY_PORT=tcp://... and
# the like into every pod of its namespace; they are no settings of ours.
_SERVICE_LINK_NAME = re.compile(r"_(SERVICE_HOST|SERVICE_PORT\w*|PORT_\d+_\w+)$")
_SERVICE_LINK_PORT = re.compile(r"(tcp|udp|sctp)://[\d.:a-f\[\]]+$")


def load(
    kind: type[T],
    *,
    file: Path | None = None,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> T:
    """Build `kind`. `env` None is the process's own; `flags` has dotted keys, None values were not given.

    ConfigError names the key, the value, where it came from and what would be right.
    """
    settings = {setting.key: setting for setting in settings_of(kind)}
    given: dict[str, Given] = {}
    if file is not None:
        given |= _from_file(file, settings)
    given |= _from_env(os.environ if env is None else env, settings)
    given |= _from_flags(flags or {}, settings)
    values = {key: convert(settings[key], item) for key, item in given.items()}
    for setting in settings.values():
        if setting.is_required and setting.key not in values:
            raise ConfigError(
                f"{setting.key} is not set; give {setting.flag}, {setting.env} or {setting.key} in the settings file "
                f"({setting.description.rstrip('.')})"
            )
    built: T = _build(kind, values, prefix="", default=dataclasses.MISSING)
    return built


def _build(kind: type[Any], values: Mapping[str, Any], *, prefix: str, default: Any) -> Any:
    hints = get_type_hints(kind)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        key = prefix + field.name
        if dataclasses.is_dataclass(hints[field.name]):
            fields[field.name] = _build(hints[field.name], values, prefix=f"{key}.", default=field.default)
        elif key in values:
            fields[field.name] = values[key]
    return kind(**fields) if default is dataclasses.MISSING else dataclasses.replace(default, **fields)


def _from_file(file: Path, settings: Mapping[str, Setting]) -> dict[str, Given]:
    try:
        tree = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the settings file {file}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"the settings file {file} is not valid TOML: {error}") from error
    return {
        key: Given(value, str(file), is_text=False)
        for key, value in _flatten(tree, prefix="", settings=settings, origin=str(file))
    }


def _flatten(
    table: Mapping[str, Any], *, prefix: str, settings: Mapping[str, Setting], origin: str
) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        key = prefix + name
        inside = tuple(known for known in settings if known.startswith(f"{key}."))
        if inside and isinstance(value, Mapping):
            yield from _flatten(value, prefix=f"{key}.", settings=settings, origin=origin)
        elif inside:
            raise ConfigError(f"{key} = {value!r} (from {origin}): expected a table [{key}] with {', '.join(inside)}")
        elif key in settings:
            yield key, value
        else:
            raise ConfigError(f"unknown key {key} (from {origin}); {suggest(key, tuple(settings))}")


def _from_env(env: Mapping[str, str], settings: Mapping[str, Setting]) -> dict[str, Given]:
    """Variables of other sections belong to other processes and are left alone."""
    by_name = {setting.env: setting for setting in settings.values()}
    sections = tuple(dict.fromkeys(setting.section for setting in settings.values()))
    given: dict[str, Given] = {}
    for name, text in env.items():
        if not name.startswith(sections) or _is_service_link(name, text):
            continue
        if name not in by_name:
            raise ConfigError(f"unknown environment variable {name}={text}; {suggest(name, tuple(by_name))}")
        given[by_name[name].key] = Given(text, f"environment variable {name}", is_text=True)
    return given


def _is_service_link(name: str, text: str) -> bool:
    if _SERVICE_LINK_NAME.search(name):
        return True
    return name.endswith("_PORT") and _SERVICE_LINK_PORT.match(text) is not None


def _from_flags(flags: Mapping[str, Any], settings: Mapping[str, Setting]) -> dict[str, Given]:
    given: dict[str, Given] = {}
    for key, value in flags.items():
        if key not in settings:
            raise ConfigError(f"unknown flag {key} = {value!r}; {suggest(key, tuple(settings))}")
        if value is not None:
            given[key] = Given(value, settings[key].flag, is_text=True)
    return given

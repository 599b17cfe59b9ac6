"""What can be set: the fields of the config classes one by one, with their names in a file, in the
environment and as a flag, and how a value is read into one."""

import dataclasses
import difflib
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from common.errors import ConfigError

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS |= {f"{_letter}B": 1000**_power, _letter: 1024**_power, f"{_letter}IB": 1024**_power}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One field. `section` begins its environment variable; `default` is `dataclasses.MISSING` if it is required."""

    key: str
    section: str
    annotation: Any
    type: Any  # the annotation without its metadata
    constraints: tuple[msgspec.Meta, ...]
    default: Any

    @property
    def name(self) -> str:
        return self.key.rpartition(".")[2]

    @property
    def env(self) -> str:
        return f"{self.section}{self.name.upper()}"

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def is_required(self) -> bool:
        return self.default is dataclasses.MISSING

    @property
    def description(self) -> str:
        return " ".join(meta.description for meta in self.constraints if meta.description)

    @property
    def is_size(self) -> bool:
        return any((meta.extra or {}).get("unit") == "bytes" for meta in self.constraints)

    @property
    def is_list(self) -> bool:
        return get_origin(self.type) is tuple

    @property
    def choices(self) -> tuple[str, ...]:
        return get_args(self.type) if get_origin(self.type) is Literal else ()


@dataclasses.dataclass(frozen=True, slots=True)
class Given:
    """A value and where it came from. `is_text`: it was typed as text, so "16" may be meant as a number."""

    value: Any
    origin: str
    is_text: bool


def settings_of(kind: type[Any]) -> tuple[Setting, ...]:
    """Every field of a config class, those of its sections included, in the order they are written."""
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__.removesuffix("Config"))
    return tuple(_walk(kind, prefix="", section=name, default=dataclasses.MISSING))


def parse_size(text: str) -> int:
    """Bytes of "512MiB", "2GB", "1.5 GiB" or "4096". KB is 1000 bytes, KiB and K are 1024. ValueError if it is none."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"{text!r} is no size")
    return round(float(match[1]) * _UNITS[match[2].upper()])


def convert(setting: Setting, given: Given) -> Any:
    """The value as the field's type; ConfigError names the key, the value, its origin and what would be right."""
    value = given.value
    try:
        if setting.is_size and isinstance(value, str):
            value = parse_size(value)
        elif setting.is_list and given.is_text:
            texts = [value] if isinstance(value, str) else value
            value = [part.strip() for text in texts for part in text.split(",") if part.strip()]
        is_text = given.is_text and isinstance(value, str)
        return msgspec.convert(value, setting.annotation, strict=not is_text)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(
            f"{setting.key} = {given.value!r} (from {given.origin}): expected {_expected(setting, given.value)}"
        ) from error


def suggest(name: str, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"


def _walk(kind: type[Any], *, prefix: str, section: str, default: Any) -> Iterator[Setting]:
    """`default` is the instance that stands in for the whole class, if it is a section that has one."""
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            assert isinstance(hint, type)
            path = f"{prefix}{field.name}"
            yield from _walk(hint, prefix=f"{path}.", section=path.replace(".", "_"), default=field.default)
            continue
        bare, *metas = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        yield Setting(
            key=prefix + field.name,
            section=f"BATON_{section}_".upper(),
            annotation=hint,
            type=bare,
            constraints=tuple(meta for meta in metas if isinstance(meta, msgspec.Meta)),
            default=field.default if default is dataclasses.MISSING else getattr(default, field.name),
        )


def _expected(setting: Setting, value: Any) -> str:
    if setting.choices:
        close = difflib.get_close_matches(str(value), setting.choices, n=1)
        return f"one of {', '.join(setting.choices)}" + (f"; did you mean {close[0]}?" if close else "")
    if setting.is_size:
        return f'a size such as 1073741824, "512MiB" or "2GB"{_bounds(setting)}'
    if setting.is_list:
        return "a list of strings"
    kinds = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
    return kinds[setting.type] + _bounds(setting)


def _bounds(setting: Setting) -> str:
    bounds = [
        f", {word} {bound}"
        for meta in setting.constraints
        for word, bound in (("at least", meta.ge), ("above", meta.gt), ("at most", meta.le), ("below", meta.lt))
        if bound is not None
    ]
    return "".join(bounds)

"""One command per process, its flags generated from the process's config class.

A package that is a process has a `__main__.py` of two lines:

    main = process_command("prefill-node", NodeConfig, "prefill_node.node:serve", help="...")
    if __name__ == "__main__": run_command(main)

`baton prefill-node` runs that same `main`. The target is `async def serve(config, network) -> None`; the network is
as `config.links` says. Its module is imported once the settings are known to be right, so that `--help` and a wrong
flag answer at once.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from typer.core import TyperCommand

from common import telemetry
from common.ending import end_with
from common.errors import ConfigError
from common.fields import Setting, settings_of
from common.settings import load

_Param = TypeVar("_Param")

_NETWORK = "common.rpc.link:ZmqNetwork"


def take_as_typed(params: list[_Param]) -> list[_Param]:
    """Keep typer from importing pydantic (150 ms) only to copy a string: we validate values ourselves."""
    for param in params:
        param.get_runtime_param = _AsTyped  # type: ignore[attr-defined]
    return params


class PlainCommand(TyperCommand):
    """Takes every value as it was typed."""

    def get_params(self, ctx: Any) -> list[Any]:
        return take_as_typed(super().get_params(ctx))


class _AsTyped:
    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        return () if value is None and param.multiple else value


def process_command(name: str, kind: type[Any], target: str, *, help: str) -> Callable[..., None]:
    """A typer command that loads `kind` and runs `target` ("module:function") until it ends or is told to."""
    settings = {setting.name: setting for setting in settings_of(kind)}
    assert len(settings) == len(settings_of(kind)), f"two fields of {kind.__name__} would share one flag"

    def command(**given: Any) -> None:
        flags = {setting.key: given[parameter] for parameter, setting in settings.items()}
        try:
            config = load(kind, file=Path(given["config"]) if given["config"] else None, flags=flags)
            label = getattr(config, "name", "") or name
            telemetry.configure(label, log_format=given["log_format"], level=given["log_level"])
        except ConfigError as error:
            fail(error)
        from common import process  # brings asyncio: 60 ms that --help need not pay

        main = functools.partial(_start, target, config)
        raise SystemExit(process.run(main, parent_pipe=config.parent_pipe))

    command.__name__ = name.replace("-", "_")
    command.__doc__ = help
    parameters = [
        _parameter(parameter, *_option(setting)) for parameter, setting in settings.items()
    ] + _common_options()
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def run_command(command: Callable[..., None]) -> NoReturn:
    """`command` as the whole program: what a package's `__main__` calls."""
    app = typer.Typer(rich_markup_mode=None, add_completion=False, pretty_exceptions_enable=False)
    app.command(cls=PlainCommand)(command)
    end_with(app)


def fail(error: ConfigError) -> NoReturn:
    """One line on stderr and exit code 2."""
    print(f"baton: {error.message}", file=sys.stderr)
    raise SystemExit(2) from error


def _start(target: str, config: Any) -> Any:
    serve, network = (_load(path) for path in (target, _NETWORK))
    return serve(config, network.of(config.links))


def _load(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)


def _parameter(name: str, annotation: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[annotation, option]
    )


def _option(setting: Setting) -> tuple[Any, Any]:
    """The typer option of one field. Its default is None, "not given", so that the file and environment count."""
    default = "required" if setting.is_required else f"default: {_shown(setting)}"
    help = f"{setting.description} [{default}; env {setting.env}]"
    if setting.type is bool:
        declaration = f"{setting.flag}/--no-{setting.flag.removeprefix('--')}"
        return bool | None, typer.Option(declaration, help=help, show_default=False)
    annotation = list[str] | None if setting.is_list else str | None
    return annotation, typer.Option(setting.flag, help=help, show_default=False, metavar=_metavar(setting))


def _common_options() -> list[inspect.Parameter]:
    def option(flag: str, metavar: str, help: str) -> inspect.Parameter:
        return _parameter(flag.replace("-", "_"), str | None, typer.Option(f"--{flag}", metavar=metavar, help=help))

    return [
        option("config", "FILE", "Settings file (TOML); the environment and flags override it."),
        option(
            "log-format", "|".join(telemetry.FORMATS), "How events are logged. [default: text; env BATON_LOG_FORMAT]"
        ),
        option("log-level", "|".join(telemetry.LEVELS), "Least level logged. [default: info; env BATON_LOG_LEVEL]"),
    ]


def _metavar(setting: Setting) -> str:
    if setting.choices:
        return "|".join(setting.choices)
    if setting.is_size:
        return "SIZE"
    return {int: "INTEGER", float: "NUMBER"}.get(setting.type, "TEXT")


def _shown(setting: Setting) -> str:
    if setting.is_list:
        return ",".join(setting.default)
    return str(setting.default) if setting.default != "" else "empty"

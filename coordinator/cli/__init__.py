"""The `baton` command: a table of commands, each imported when it is called.

`baton --help` reads the table alone. A command is a plain function with typer annotations.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from common.command_line import PlainCommand, fail, take_as_typed
from common.ending import end_with
from common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LazyCommand:
    target: str  # "module:function"
    help: str


COMMANDS = {
    "up": LazyCommand("coordinator.cli.up:main", "Start a whole cluster on this host."),
    "status": LazyCommand("coordinator.cli.status:main", "Show nodes, their states, pairs and load."),
    "audit": LazyCommand("coordinator.cli.audit:main", "Prove that nothing is left behind anywhere."),
    "drain": LazyCommand("coordinator.cli.drain:main", "Take nodes out of service without losing a request."),
    "chat": LazyCommand("coordinator.cli.chat:main", "Talk to the model in the terminal."),
    "coordinator": LazyCommand("coordinator.__main__:main", "Run a coordinator."),
    "gateway": LazyCommand("coordinator.gateway.__main__:main", "Run a gateway: the HTTP front."),
    "prefill-node": LazyCommand("prefill_node.__main__:main", "Run a prefill node."),
    "decode-node": LazyCommand("decode_node.__main__:main", "Run a decode node."),
    "keys": LazyCommand("coordinator.cli.keys:main", "Make the keys of a cluster."),
    "api-key": LazyCommand("coordinator.cli.api_key:main", "Make an API key for the gateway."),
    "version": LazyCommand("coordinator.cli.version:main", "Show what is installed."),
}


class BatonCommands(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_params(self, ctx: Any) -> list[Any]:
        return take_as_typed(super().get_params(ctx))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        if cmd_name not in self.commands:
            self.commands[cmd_name] = load_command(cmd_name)
        return self.commands[cmd_name]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.help) for name, command in COMMANDS.items()])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in COMMANDS:
            # typer looks for near matches among the commands it has, and it has none yet.
            self.commands.update(dict.fromkeys(COMMANDS))  # type: ignore[arg-type]
        return super().resolve_command(ctx, args)


def load_command(name: str) -> Any:
    """The command as typer runs it; imports its module."""
    module, _, function = COMMANDS[name].target.partition(":")
    app = typer.Typer(rich_markup_mode=None, add_completion=False)
    app.command(name, cls=PlainCommand)(getattr(import_module(module), function))
    return typer.main.get_command(app)


app = typer.Typer(
    cls=BatonCommands,
    rich_markup_mode=None,  # rich takes 100 ms to import
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    add_completion=False,
)


@app.callback()
def baton() -> None:
    """Serve large language models on a pool that reads prompts and a pool that writes answers."""


def main() -> NoReturn:
    end_with(run)


def run() -> None:
    try:
        app(prog_name="baton")
    except ConfigError as error:
        fail(error)

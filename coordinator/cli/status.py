"""`baton status`: what the coordinator sees, once or at every change."""

import asyncio
import json
import math
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from common.clock import new_id
from common.config import CoordinatorConfig
from common.errors import NodeError
from common.messages import Incarnation, NodeId, View, Watch
from common.rpc.base import Network
from coordinator.cli import links
from coordinator.cli.cluster_view import as_document, as_text

DEFAULT_COORDINATOR = CoordinatorConfig().listen
_CLEAR = "\x1b[H\x1b[2J"


def main(
    coordinator: Annotated[
        str, typer.Option(metavar="ENDPOINT", envvar="BATON_COORDINATOR", help="Where the coordinator listens.")
    ] = DEFAULT_COORDINATOR,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one line a view.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Print again at every change, until Ctrl-C.")] = False,
    timeout: Annotated[str, typer.Option(metavar="SECONDS", help="How long to wait for the coordinator.")] = "2",
    keys: links.Keys = "",
) -> None:
    """Show nodes, their states, pairs and load."""
    timeout_s = seconds(timeout, "--timeout")

    def show(view: View) -> bool:
        if as_json:
            print(json.dumps(as_document(view)), flush=True)
        else:
            is_terminal = sys.stdout.isatty()
            print((_CLEAR if watch and is_terminal else "") + as_text(view, colours=is_terminal), flush=True)
        return watch

    try:
        asyncio.run(each_view(links.network(keys), coordinator, show, timeout_s=timeout_s))
    except (NodeError, TimeoutError) as error:
        reason = error.message if isinstance(error, NodeError) else f"no answer within {timeout_s:g} s"
        print(
            f"baton: no coordinator at {coordinator} ({reason}). `baton up` starts a cluster; "
            "--coordinator or BATON_COORDINATOR says where another one is.",
            file=sys.stderr,
        )
        raise SystemExit(1) from error
    except KeyboardInterrupt:
        raise SystemExit(0) from None


def seconds(text: str, flag: str) -> float:
    """A flag's value. BadParameter in words of our own."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value >= 0:  # nan is neither
        raise typer.BadParameter(f"{text!r} is no number of seconds from 0 on", param_hint=flag)
    return value


async def each_view(network: Network, coordinator: str, show: Callable[[View], bool], *, timeout_s: float) -> None:
    """Show views for as long as `show` returns True.

    TimeoutError if the first takes longer than `timeout_s`; NodeError if the coordinator is not there or lost.
    """
    client = network.client(node=NodeId("status"), incarnation=Incarnation(new_id()))
    try:
        async with asyncio.timeout(timeout_s) as deadline, client.open(coordinator, Watch()) as call:
            async for item in call:
                deadline.reschedule(None)
                assert isinstance(item, View)
                if not show(item):
                    return
    finally:
        await client.close()

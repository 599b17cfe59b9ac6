"""`baton audit`: does everything that is held anywhere have a live owner?"""

import asyncio
import json
import sys
from typing import Annotated

import typer

from common.config import CoordinatorConfig
from common.errors import NodeError
from coordinator.auditor import Auditor
from coordinator.cli import links
from coordinator.cli.audit_view import as_document, as_text
from coordinator.cli.status import seconds

DEFAULT_COORDINATOR = CoordinatorConfig().listen


def main(
    coordinator: Annotated[
        list[str],
        typer.Option(
            metavar="ENDPOINT", envvar="BATON_COORDINATOR", help="Where a coordinator listens; once for each."
        ),
    ] = [DEFAULT_COORDINATOR],  # noqa: B006 - typer reads it and changes nothing
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one line.")] = False,
    idle: Annotated[bool, typer.Option("--idle", help="Demand that nothing is held at all.")] = False,
    wait: Annotated[str, typer.Option(metavar="SECONDS", help="Give what is amiss this long to clear up.")] = "0",
    keys: links.Keys = "",
) -> None:
    """Ask every process what it holds, and find what nobody alive owns.

    Exit 1 if there is something, 2 if no coordinator answers.
    """
    wait_s = seconds(wait, "--wait")
    try:
        report = asyncio.run(Auditor(links.network(keys), coordinator).audit(idle=idle, wait_s=wait_s))
    except NodeError as error:
        print(
            f"baton: no coordinator at {', '.join(coordinator)} ({error.message}). "
            "--coordinator or BATON_COORDINATOR says where one is.",
            file=sys.stderr,
        )
        raise SystemExit(2) from error
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    print(json.dumps(as_document(report)) if as_json else as_text(report, colours=sys.stdout.isatty()))
    raise SystemExit(1 if report.findings else 0)

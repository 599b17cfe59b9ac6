"""`baton api-key`."""

from pathlib import Path
from typing import Annotated

import typer

from common.messages import Priority
from coordinator.gateway.tenants import add_key


def main(
    file: Annotated[str, typer.Argument(metavar="FILE", help="File of API keys; made if it is not there.")],
    tenant: Annotated[str, typer.Option(help="Whose key it is: tenants share neither queue nor cache.")],
    priority: Annotated[
        str, typer.Option(help="Highest class the tenant may ask for: high, normal or low; normal unless ever said.")
    ] = "",
) -> None:
    """Make an API key for a tenant and print it, once: the file keeps its hash only."""
    if priority and priority not in list(Priority):
        raise typer.BadParameter(f"{priority!r} is none of {', '.join(Priority)}", param_hint="--priority")
    print(add_key(Path(file), tenant, Priority(priority) if priority else None))

"""`baton keys`: the keys of a cluster."""

from pathlib import Path
from typing import Annotated

import typer

from common.keys import create


def main(
    action: Annotated[str, typer.Argument(metavar="new", help="What to do: `new` is all there is.")],
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="Where the keys go; it must be empty or not exist.")],
) -> None:
    """Make a cluster's keys. With them its links are encrypted and authenticated."""
    if action != "new":
        raise typer.BadParameter(f"{action!r}: the only action is `new`", param_hint="new")
    create(Path(folder))
    print(
        f"Keys are in {folder}. Copy the folder to every host of the cluster, readable by Baton's user alone, and\n"
        f"give every process --keys {folder} (or BATON_LINKS_KEYS={folder}), baton status and its siblings too.\n"
        "Whoever can read it can do anything in the cluster."
    )

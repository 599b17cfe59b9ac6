"""How an operator's command reaches the processes of a cluster."""

from typing import TYPE_CHECKING, Annotated

import typer

from common.config import LinkConfig

if TYPE_CHECKING:
    from common.rpc.link import ZmqNetwork

Keys = Annotated[
    str,
    typer.Option("--keys", metavar="FOLDER", envvar="BATON_LINKS_KEYS", help="The cluster's keys, if it has any."),
]


def network(keys: str) -> "ZmqNetwork":
    """ConfigError if the keys cannot be used."""
    from common.rpc.link import ZmqNetwork  # 40 ms that --help need not pay

    return ZmqNetwork.of(LinkConfig(keys=keys))

"""When a cluster is whole: every node is listed as ready by its running process, and the gateway is ready too."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

import aiohttp

from common.errors import ConfigError, NodeError
from common.messages import NodeState, View, Watch
from common.rpc.base import Client

_RETRY_S = 0.1
_TIMEOUT_S = 2.0

Pids = Callable[[], Mapping[str, int]]


async def views(client: Client, coordinator: str) -> AsyncGenerator[View]:
    """What the coordinator sees, at once and at every change, for ever: over its restarts and before it is there."""
    while True:
        with contextlib.suppress(NodeError):
            async with client.open(coordinator, Watch()) as call:
                async for item in call:
                    if isinstance(item, View):
                        yield item
        await asyncio.sleep(_RETRY_S)


def ready_nodes(view: View, names: Sequence[str], pids: Mapping[str, int]) -> list[str]:
    """The names whose running process the coordinator lists as ready; what it still lists of a dead one is no news.

    ConfigError for a node that does not fit the cluster: waiting does not help.
    """
    ready = []
    for name in names:
        for node in view.nodes:
            if node.card.node == name and node.card.pid == pids.get(name):
                if node.state is NodeState.INCOMPATIBLE:
                    raise ConfigError(f"{name} does not fit the cluster: {node.reason}")
                if node.state is NodeState.READY:
                    ready.append(name)
    return ready


async def nodes_are_ready(
    client: Client, coordinator: str, names: Sequence[str], pids: Pids, *, on_ready: Callable[[str], None]
) -> None:
    """Return once all are at the same time; `on_ready` hears each name once."""
    told: dict[str, None] = {}
    async with contextlib.aclosing(views(client, coordinator)) as seen:
        async for view in seen:
            ready = ready_nodes(view, names, pids())
            for name in ready:
                if name not in told:
                    told[name] = None
                    on_ready(name)
            if len(ready) == len(names):
                return


async def gateway_is_ready(url: str) -> None:
    """Return once GET /ready answers 200."""
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(f"{url}/ready") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(_RETRY_S)

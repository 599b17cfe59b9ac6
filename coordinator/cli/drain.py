"""`baton drain`: take nodes out of service without losing a request."""

import asyncio
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from common.clock import new_id
from common.config import CoordinatorConfig
from common.errors import BatonError, NodeError, PeerLostError
from common.messages import Drain, DrainProgress, Incarnation, NodeCard, NodeId, NodeState, View, Watch
from common.rpc.base import Client, Network
from coordinator.cli import links
from coordinator.cli.status import seconds

DEFAULT_COORDINATOR = CoordinatorConfig().listen
_ANSWER_S = 5.0


def main(
    nodes: Annotated[list[str], typer.Argument(metavar="NODE...", help="Names as `baton status` shows them.")],
    timeout: Annotated[
        str, typer.Option(metavar="SECONDS", help="Then what still runs is moved by computing it again elsewhere.")
    ] = "300",
    coordinator: Annotated[
        str, typer.Option(metavar="ENDPOINT", envvar="BATON_COORDINATOR", help="Where the coordinator listens.")
    ] = DEFAULT_COORDINATOR,
    keys: links.Keys = "",
) -> None:
    """Take nodes out of service, one after the other: no new work, what runs moves to a peer or finishes.

    A drained node ends by itself with exit code 0, and whoever supervises it may start it again. The last node of its
    kind waits, for SECONDS at most, until one of those drained before it is back. Ctrl-C puts a node that is not empty
    yet back into service. Exit 1 if a node was not drained, 2 if no coordinator answers.
    """
    timeout_s = seconds(timeout, "--timeout")
    try:
        failures = asyncio.run(drain_in_turn(links.network(keys), coordinator, nodes, timeout_s=timeout_s))
    except (NodeError, TimeoutError) as error:
        reason = error.message if isinstance(error, NodeError) else f"no answer within {_ANSWER_S:g} s"
        print(
            f"baton: no coordinator at {coordinator} ({reason}). --coordinator or BATON_COORDINATOR says where one is.",
            file=sys.stderr,
        )
        raise SystemExit(2) from error
    except KeyboardInterrupt:
        print("baton: given up; a node that was not empty yet serves again", file=sys.stderr)
        raise SystemExit(130) from None
    raise SystemExit(1 if failures else 0)


async def drain_in_turn(network: Network, coordinator: str, names: Sequence[str], *, timeout_s: float) -> int:
    """How many were not drained."""
    client = network.client(node=NodeId("drain"), incarnation=Incarnation(new_id()))
    drained: list[NodeCard] = []
    try:
        for name in names:
            nodes = await _nodes_without(client, coordinator, name, drained, timeout_s)
            if nodes is not None and await _drain_one(client, nodes, name, timeout_s):
                drained.append(nodes[name])
        return len(names) - len(drained)
    finally:
        await client.close()


async def _nodes_without(
    client: Client, coordinator: str, name: str, drained: Sequence[NodeCard], timeout_s: float
) -> dict[str, NodeCard] | None:
    """The cluster once it can spare this node, None if that takes too long."""
    has_spoken = False
    try:
        async with asyncio.timeout(_ANSWER_S) as patience, client.open(coordinator, Watch()) as call:
            async for item in call:
                assert isinstance(item, View)
                if not _is_last(name, item, drained):
                    return {node.card.node: node.card for node in item.nodes}
                if not has_spoken:
                    print(f"{name}: waits until another node can do its work", flush=True)
                    patience.reschedule(asyncio.get_running_loop().time() + timeout_s)
                    has_spoken = True
    except TimeoutError:
        if not has_spoken:
            raise
        print(
            f"baton: {name} is not drained: no other node came to do its work within {timeout_s:g} s; "
            "drain it by itself if it is to go all the same",
            file=sys.stderr,
        )
        return None
    raise PeerLostError("it ended the watch")


def _is_last(name: str, view: View, drained: Sequence[NodeCard]) -> bool:
    """Is this the last node of its kind, now that others of it are drained? They are in view for a moment longer."""
    work = {node.card.node: (node.card.role, node.card.model) for node in view.nodes}
    if work.get(NodeId(name)) not in [(card.role, card.model) for card in drained]:
        return False
    gone = {card.incarnation for card in drained}
    return not any(
        node.state is NodeState.READY
        and node.card.incarnation not in gone
        and work[node.card.node] == work[NodeId(name)]
        for node in view.nodes
        if node.card.node != name
    )


async def _drain_one(client: Client, cards: dict[str, NodeCard], name: str, timeout_s: float) -> bool:
    card = cards.get(name)
    if card is None:
        print(f"baton: there is no node {name!r}; there is {', '.join(cards) or 'none'}", file=sys.stderr)
        return False
    said = DrainProgress(num_calls=-1)
    try:
        async with client.open(card.address, Drain(timeout_s), incarnation=card.incarnation) as call:
            async for item in call:
                assert isinstance(item, DrainProgress)
                if item.num_calls != said.num_calls:
                    print(f"{name}: {_words(item)}", flush=True)
                said = item
    except BatonError as error:
        if not (isinstance(error, PeerLostError) and said.num_calls == 0):  # it went a moment early
            print(f"baton: {name} is not drained: {error.message}", file=sys.stderr)
            return False
    print(f"{name}: drained", flush=True)
    return True


def _words(progress: DrainProgress) -> str:
    moved = f", {progress.num_evicted} of them told to go" if progress.num_evicted else ""
    return f"{progress.num_calls} request{'s' * (progress.num_calls != 1)} left{moved}"

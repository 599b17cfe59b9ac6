"""Prompts with the oracle's answers, and a caller below the gateway of a running cluster."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from common.clock import new_id
from common.messages import Incarnation, NodeAddress, NodeId, View
from common.rpc.link import ZmqNetwork
from tests.caller import Caller
from tests.process.reference import MIN_MARGIN

# Edges of a 16-token block, exact multiples of it, and lengths that take several chunks.
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 100, 128, 250, 256, 400, 512, 1000, 1500)


@dataclass(frozen=True, slots=True)
class Question:
    prompt: list[int]
    answer: list[int]


def questions(folder: Path, lengths: Sequence[int], *, num_tokens: int) -> list[Question]:
    """One question a length. Their margins are such that another token is another answer, never a tie."""
    program = Path(__file__).with_name("reference.py")
    command = [sys.executable, str(program), str(folder), str(num_tokens), *map(str, lengths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [len(one["prompt"]) for one in found] == list(lengths)
    assert all(one["margin"] > MIN_MARGIN > 1e-3 for one in found)
    return [Question(one["prompt"], one["answer"]) for one in found]


@asynccontextmanager
async def caller_of(coordinator: str) -> AsyncIterator[Caller]:
    network = ZmqNetwork()
    client = network.client(node=NodeId("test"), incarnation=Incarnation(new_id()))
    try:
        yield Caller(client, coordinator)
    finally:
        await client.close()
        await network.close()


def addresses_of(view: View) -> dict[str, NodeAddress]:
    """Of every node by its name: to say by hand who computes."""
    cards = [node.card for node in view.nodes]
    return {card.node: NodeAddress(card.node, card.incarnation, card.address, card.offers) for card in cards}


async def is_empty(caller: Caller, *, within_s: float = 30.0, fresh: bool = False) -> None:
    """Every node says that it holds no call, request or lease, and that every block is free.

    `fresh`: says so from now on. A node reports twice a second, so what it said last may be older than the question.
    """
    old = {view.card.incarnation: view.load for view in (await caller.view()).nodes} if fresh else {}
    held: dict[str, object] = {"nobody": "has said anything"}
    try:
        async with asyncio.timeout(within_s):
            while held:
                views = (await caller.view()).nodes
                held = {
                    view.card.node: view.load
                    for view in views
                    if (view.load.num_calls, view.load.num_running, view.load.num_waiting, view.load.leased_blocks)
                    != (0, 0, 0, 0)
                    or view.load.free_blocks != view.card.num_blocks
                    or view.load == old.get(view.card.incarnation)
                }
                held = held if views else {"nobody": "is there"}
    except TimeoutError:
        raise AssertionError(f"not empty within {within_s} s: {held}") from None

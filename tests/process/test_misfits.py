"""Nodes that do not fit a running cluster, and nodes that come back as something else: no wrong block is ever used."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from common.messages import NodeState, NodeView, Origin, Role, Routed, View
from tests.caller import Caller
from tests.process.cluster import BATON, BatonUp
from tests.process.parts import Parts, free_port, is_ready, seen
from tests.process.questions import addresses_of, caller_of
from tests.process.streams import nothing_is_held

pytestmark = [pytest.mark.process, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="session")]

NUM_CHATS = 10
NUM_TOKENS = 12


@pytest_asyncio.fixture(loop_scope="session")
async def parts(tiny_model: Path, tmp_path: Path) -> AsyncIterator[Parts]:
    async with Parts(tiny_model, tmp_path) as parts:
        yield parts


def node_of(view: View, name: str) -> NodeView:
    [found] = [node for node in view.nodes if node.card.node == name]
    return found


async def status(up: BatonUp) -> str:
    process = await asyncio.create_subprocess_exec(
        *(BATON, "status", "--coordinator", up.coordinator), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    return " ".join(out.decode().split())


async def test_nodes_of_another_block_size_kv_type_or_quantization_are_listed_with_the_reason_and_get_no_request(
    standing_pair: BatonUp, parts: Parts
) -> None:
    up = standing_pair
    expected = [await up.complete(f"chat {n}") for n in range(NUM_CHATS)]
    await asyncio.gather(
        parts.node(Role.DECODE, "larger-blocks", [up.coordinator], "--block-size", "32"),
        parts.node(Role.PREFILL, "smaller-numbers", [up.coordinator], "--dtype", "bfloat16"),
        parts.node(Role.DECODE, "fewer-bits", [up.coordinator], "--quantization", "int8"),
    )
    answers = await asyncio.gather(*[up.complete(f"chat {n}") for n in range(NUM_CHATS)])
    assert answers == expected
    view = await seen(up.coordinator, lambda view: is_ready(view, "decode-0"))
    reasons = {
        "larger-blocks": "block_size 32 here, 16 there",
        "smaller-numbers": "KV dtype bfloat16 (2 bytes) here",
        "fewer-bits": "quantization int8 here, none there",
    }
    shown = await status(up)
    for name, reason in reasons.items():
        misfit = node_of(view, name)
        assert misfit.state is NodeState.INCOMPATIBLE
        assert reason in misfit.reason
        assert reason in shown
        assert (misfit.load.num_generated_tokens, misfit.load.num_computed_prompt_tokens) == (0, 0)
    await nothing_is_held(up.coordinator)


async def test_a_node_at_the_place_of_a_killed_one_is_never_taken_for_it(standing_pair: BatonUp, parts: Parts) -> None:
    """Same name, same port, half as many blocks: who still asks for the old one gets nothing of the new one's."""
    up, listen = standing_pair, f"tcp://127.0.0.1:{free_port()}"
    await parts.node(Role.PREFILL, "prefill-9", [up.coordinator], "--listen", listen)
    async with caller_of(up.coordinator) as caller:
        old = await pair(caller, "prefill-9")
        assert await path_of(caller, old, 1) == "prefill"
        await parts.kill("prefill-9")
        await parts.node(Role.PREFILL, "prefill-9", [up.coordinator], "--listen", listen, "--kv-cache-memory", "8MiB")
        new = await pair(caller, "prefill-9")
        assert old.prefill is not None and new.prefill is not None
        assert old.prefill.address == new.prefill.address
        assert await path_of(caller, old, 2) == "fallback", "what is there now is another one"
        assert await path_of(caller, new, 3) == "prefill"
    view = await seen(up.coordinator, lambda view: node_of(view, "prefill-9").load.num_computed_prompt_tokens > 0)
    assert node_of(view, "prefill-9").load.num_computed_prompt_tokens == len(prompt(3)), "of the last one only"
    await nothing_is_held(up.coordinator)


def prompt(salt: int) -> list[int]:
    return [3 + (31 * salt + 7 * position) % 300 for position in range(200)]


async def pair(caller: Caller, prefill: str) -> Routed:
    """The cluster's decode node with this prefill node."""
    addresses = addresses_of(await caller.view())
    return Routed(addresses["decode-0"], addresses[prefill])


async def path_of(caller: Caller, routed: Routed, salt: int) -> str:
    """Who computed the prompt. The answer must be that of the cluster's own pair, which a tenant without any cached
    prefix asks."""
    answer = await caller.ask(prompt(salt), NUM_TOKENS, routed=routed)
    cold = Origin(tenant=f"tenant {salt}".encode())
    usual = await caller.ask(prompt(salt), NUM_TOKENS, routed=await pair(caller, "prefill-0"), origin=cold)
    assert usual.last is not None
    assert usual.last.cached_tokens == 0
    assert answer.tokens == usual.tokens
    assert answer.last is not None
    return answer.last.path

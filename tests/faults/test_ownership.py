"""Who holds which blocks while things go wrong: stale readers, late writers, refusals, clients that leave."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from common.errors import ContextLengthError, OverloadedError
from common.messages import Incarnation, NodeAddress, NodeId, Prefill, PrefillDone, Role, Routed
from common.rpc.base import IncomingCall
from tests.caller import Answer
from tests.cluster.cluster import TIMES, Cluster
from tests.cluster.requests import Requests, gateway
from tests.cluster.test_one_request import prompt


@pytest.fixture
async def requests(cluster: Cluster) -> AsyncIterator[Requests]:
    async with gateway(cluster) as requests:
        yield requests


def address_of(cluster: Cluster, name: str) -> NodeAddress:
    [card] = [node.card for node in cluster.coordinator.state.view().nodes if node.card.node == name]
    return NodeAddress(card.node, card.incarnation, card.address, card.offers)


async def dropped(*asks: "asyncio.Task[Answer]") -> None:
    for ask in asks:
        ask.cancel()
    await asyncio.wait(asks)


# --- reads of blocks that are somebody else's by now ------------------------------------------------------------


async def test_a_reader_that_was_away_never_decodes_what_its_blocks_became_meanwhile(cluster: Cluster) -> None:
    """Its prefill node took it for lost, freed the blocks and computed another prompt into them."""
    await cluster.start(Role.PREFILL, "prefill-0", num_blocks=5, prefix_cache=False)
    for name in ("decode-0", "decode-1"):
        await cluster.start(Role.DECODE, name)
    prefill, away = cluster.nodes["prefill-0"], cluster.nodes["decode-0"]
    pairs = [Routed(address_of(cluster, name), address_of(cluster, "prefill-0")) for name in ("decode-0", "decode-1")]
    cluster.faults.hold()
    cluster.faults.stubborn = True
    first = asyncio.create_task(cluster.caller.ask(prompt(70), 8, routed=pairs[0]))
    await cluster.faults.held.wait()
    cluster.network.partition(prefill.incarnation, away.incarnation)
    await cluster.until(prefill.is_empty)
    second = await cluster.caller.ask(prompt(75, salt=1), 1, routed=pairs[1])
    assert second.tokens == cluster.expected(prompt(75, salt=1), 1), "in the same five blocks; one token needs no read"
    cluster.faults.release()
    assert (await first).tokens == cluster.expected(prompt(70))
    assert away.brake.num_tokens == 70 + 7, "nothing that was read late was used"
    cluster.network.heal(prefill.incarnation, away.incarnation)


async def test_who_waits_for_room_at_decode_holds_nothing_at_prefill_and_loses_nothing_by_waiting(
    cluster: Cluster,
) -> None:
    """Twenty prompts for a pool of sixteen blocks, kept waiting for longer than a silent peer is believed in."""
    await cluster.start(Role.PREFILL, "prefill-0")
    await cluster.start(Role.DECODE, "decode-0", num_blocks=16)
    prefill, decode = cluster.nodes["prefill-0"], cluster.nodes["decode-0"]
    cluster.faults.hold()
    asks = [asyncio.create_task(cluster.asks_rightly(prompt(60, salt), 4)) for salt in range(20)]
    await cluster.until(lambda: decode.load.num_calls == 20 and cluster.faults.num_held == 4)
    waited_s = cluster.clock.now_s() + 2 * TIMES.lost_after_s
    num_calls: set[int] = set()

    def has_waited() -> bool:
        num_calls.add(prefill.load.num_calls)
        return cluster.clock.now_s() > waited_s

    await cluster.until(has_waited)
    assert num_calls == {4}, "as many as have room for their blocks"
    assert cluster.faults.num_held == 4, "leases last as long as their calls"
    cluster.faults.release()
    await asyncio.gather(*asks)
    assert prefill.brake.num_tokens == 20 * 60, "each prompt was computed once"


# --- refusals -----------------------------------------------------------------------------------------------------


async def test_what_decode_refuses_prefill_never_hears_of(cluster: Cluster) -> None:
    await cluster.start(Role.PREFILL, "prefill-0")
    await cluster.start(Role.DECODE, "decode-0", num_blocks=6, max_waiting=3)
    prefill, decode = cluster.nodes["prefill-0"], cluster.nodes["decode-0"]
    cluster.faults.hold()
    first = asyncio.create_task(cluster.asks_rightly(prompt(70), 8))
    await cluster.faults.held.wait()
    others = [asyncio.create_task(cluster.asks_rightly(prompt(70, salt), 8)) for salt in (1, 2, 3)]
    await cluster.until(lambda: decode.host.engine.num_waiting()[0] == 3)
    for salt in range(4, 10):
        with pytest.raises(OverloadedError):
            await cluster.ask(prompt(70, salt))
        assert (prefill.load.num_calls, prefill.brake.num_tokens) == (1, 70)
    cluster.faults.release()
    await asyncio.gather(first, *others)
    assert prefill.brake.num_tokens == 4 * 70


async def test_both_pools_agree_on_how_long_a_prompt_may_be(cluster: Cluster) -> None:
    """128 tokens fit: a prompt of 127 has room for one token, a longer one is refused before anybody computes."""
    await cluster.start_pools(num_blocks=8)
    await cluster.asks_rightly(prompt(126), 2)
    await cluster.asks_rightly(prompt(127), 1)
    prefill = cluster.nodes["prefill-0"].brake
    num_tokens = prefill.num_tokens
    for length in (128, 129, 500):
        with pytest.raises(ContextLengthError):
            await cluster.ask(prompt(length), 1)
    assert prefill.num_tokens == num_tokens


# --- clients that leave -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["not computed", "computed"])
async def test_a_client_that_leaves_while_prefill_is_frozen_leaves_nothing_on_either_side(
    cluster: Cluster, requests: Requests, moment: str
) -> None:
    await cluster.start_pools()
    prefill, decode = cluster.nodes["prefill-0"], cluster.nodes["decode-0"]
    if moment == "computed":
        cluster.faults.hold()
        request = requests.ask(prompt(50))
        await cluster.faults.held.wait()
    else:
        prefill.brake.hold_after(0)
        request = requests.ask(prompt(50))
        await cluster.until(lambda: prefill.load.num_calls == 1)
    cluster.network.freeze(prefill.incarnation)
    await request.leaves()
    await cluster.until(decode.is_empty, within_s=0.3)
    cluster.faults.release()
    prefill.brake.release()
    cluster.network.unfreeze(prefill.incarnation)
    await cluster.until(prefill.is_empty)


async def test_four_hundred_clients_that_leave_in_mid_transfer_leave_a_small_pool_as_it_was(
    cluster: Cluster, requests: Requests
) -> None:
    await cluster.start(Role.PREFILL, "prefill-0", num_blocks=16, prefix_cache=False)
    await cluster.start(Role.DECODE, "decode-0", num_blocks=1000)
    prefill = cluster.nodes["prefill-0"]
    for turn in range(4):
        cluster.faults.hold()
        asked = [requests.ask(prompt(60, turn * 100 + salt)) for salt in range(100)]
        await cluster.until(lambda: cluster.faults.num_held == 4)
        await asyncio.gather(*[request.leaves() for request in asked])
        cluster.faults.release()
        await cluster.is_empty()
        assert prefill.load.free_blocks == 16
    began_s = cluster.clock.now_s()
    await requests.ask(prompt(60, 999), 4).finishes_rightly()
    assert cluster.clock.now_s() - began_s < 10.0


async def test_a_prompt_that_was_given_up_is_gone_on_with_when_it_comes_again(
    cluster: Cluster, requests: Requests
) -> None:
    """A client that is less patient than its prompt is long, and tries again: no chunk is computed twice."""
    await cluster.start(Role.PREFILL, "prefill-0", max_step_tokens=32)
    await cluster.start(Role.DECODE, "decode-0")
    prefill = cluster.nodes["prefill-0"]
    for turn in range(3):
        prefill.brake.hold_after(1)
        request = requests.ask(prompt(200))
        await cluster.until(lambda turn=turn: len(prefill.brake.plans) == 2 * (turn + 1))
        await request.leaves()
        await cluster.until(lambda: prefill.load.num_calls == 0)
        prefill.brake.release()
        await cluster.until(prefill.is_empty)
    request = requests.ask(prompt(200))
    await request.finishes_rightly(num_attempts=1)
    assert request.session.cached_tokens == 192
    assert prefill.brake.num_tokens == 200


# --- a prefill node of another mind ------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [-1, 10**9])
async def test_a_token_that_the_model_has_not_is_taken_from_nobody(cluster: Cluster, token: int) -> None:
    async def draws_nonsense(call: IncomingCall) -> None:
        call.send(PrefillDone(token=token))
        async for _ in call:
            pass

    await cluster.start(Role.DECODE, "decode-0")
    rogue = NodeAddress(NodeId("rogue"), Incarnation("f" * 32), "tcp://rogue:1")
    server = await cluster.network.serve(
        rogue.address, {Prefill: draws_nonsense}, node=rogue.node, incarnation=rogue.incarnation
    )
    answer = await cluster.caller.ask(prompt(40), 8, routed=Routed(address_of(cluster, "decode-0"), rogue))
    assert answer.tokens == cluster.expected(prompt(40))
    await server.close()

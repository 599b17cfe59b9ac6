"""What can go wrong between the pools: reads that fail, stall, lie or are given up."""

import asyncio

import pytest

from common.errors import PeerLostError
from common.messages import Role
from tests.cluster.cluster import Cluster
from tests.cluster.test_one_request import prompt


@pytest.mark.parametrize("read", [1, 2, 4])
@pytest.mark.parametrize("kind", ["fail_reads", "stale_reads"])
async def test_a_read_that_fails_or_is_stale_costs_time_and_never_a_token(
    cluster: Cluster, read: int, kind: str
) -> None:
    await cluster.start(Role.PREFILL, "prefill-0", max_step_tokens=32)
    await cluster.start(Role.DECODE, "decode-0")
    getattr(cluster.faults, kind).add(read)
    await cluster.asks_rightly(prompt(120))


async def test_a_dropped_data_connection_is_made_up_for_at_home(cluster: Cluster) -> None:
    await cluster.start_pools()
    cluster.faults.hold()
    asking = asyncio.create_task(cluster.asks_rightly(prompt(50)))
    await cluster.faults.held.wait()
    cluster.faults.drop()
    await asking


async def test_a_caller_that_leaves_during_a_transfer_frees_both_pools_once_the_read_has_ended(
    cluster: Cluster,
) -> None:
    await cluster.start_pools()
    cluster.faults.hold()
    cluster.faults.stubborn = True
    asking = asyncio.create_task(cluster.ask(prompt(50)))
    await cluster.faults.held.wait()
    asking.cancel()
    await asyncio.wait([asking])
    prefill, decode = cluster.nodes["prefill-0"], cluster.nodes["decode-0"]
    await cluster.until(prefill.is_empty)
    assert decode.load.leased_blocks == 4, "the hardware may still write into these"
    cluster.faults.release()
    await cluster.until(decode.is_empty)


async def test_blocks_of_a_caller_that_left_are_not_given_to_the_next_before_the_late_writer_is_done(
    cluster: Cluster,
) -> None:
    await cluster.start(Role.PREFILL, "prefill-0")
    await cluster.start(Role.DECODE, "decode-0", num_blocks=6)
    cluster.faults.hold()
    cluster.faults.stubborn = True
    gone = asyncio.create_task(cluster.ask(prompt(70)))
    await cluster.faults.held.wait()
    gone.cancel()
    await asyncio.wait([gone])
    next_one = asyncio.create_task(cluster.asks_rightly(prompt(70, salt=1)))
    await cluster.until(lambda: cluster.nodes["decode-0"].load.num_waiting == 1)
    cluster.faults.release()
    await next_one


async def test_the_same_call_twice_at_once_is_two_calls(cluster: Cluster) -> None:
    await cluster.start_pools()
    cluster.faults.hold()
    both = [asyncio.create_task(cluster.asks_rightly(prompt(50))) for _ in range(2)]
    await cluster.faults.held.wait()
    cluster.faults.release()
    await asyncio.gather(*both)


@pytest.mark.parametrize("when", ["while computing", "while held", "before"])
async def test_a_killed_prefill_node_costs_no_request(cluster: Cluster, when: str) -> None:
    await cluster.start_pools()
    routed = await cluster.caller.route("fake", 50)
    if when == "before":
        await cluster.kill("prefill-0")
    else:
        cluster.faults.hold()
    asking = asyncio.create_task(cluster.caller.ask(prompt(50), 8, routed=routed))
    if when != "before":
        await cluster.faults.held.wait()
        await cluster.kill("prefill-0")
        cluster.faults.release()
    assert (await asking).tokens == cluster.expected(prompt(50))


async def test_a_frozen_prefill_node_costs_no_request(cluster: Cluster) -> None:
    await cluster.start_pools()
    cluster.network.freeze(cluster.nodes["prefill-0"].incarnation)
    await cluster.asks_rightly(prompt(50))
    cluster.network.unfreeze(cluster.nodes["prefill-0"].incarnation)


async def test_a_killed_decode_node_ends_its_calls_with_an_error(cluster: Cluster) -> None:
    await cluster.start_pools()
    cluster.faults.hold()
    asking = asyncio.create_task(cluster.ask(prompt(50)))
    await cluster.faults.held.wait()
    await cluster.kill("decode-0")
    with pytest.raises(PeerLostError):
        await asking


async def test_a_new_node_at_the_place_of_a_killed_one_serves_at_once(cluster: Cluster) -> None:
    await cluster.start_pools()
    await cluster.asks_rightly(prompt(50))
    await cluster.kill("prefill-0")
    await cluster.start(Role.PREFILL, "prefill-0", num_blocks=32)
    answer = await cluster.asks_rightly(prompt(50, salt=1))
    assert answer.routed is not None
    assert answer.routed.prefill is not None
    assert answer.routed.prefill.incarnation == cluster.nodes["prefill-0"].incarnation

"""A stream outlives its nodes: whatever dies, the client sees one answer, each token once, and one end."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from common.errors import DeadlineError, PeerLostError, UnavailableError
from common.messages import FinishReason, Incarnation, Role
from coordinator.gateway.session import SessionStatus
from tests.cluster.cluster import COORDINATOR, Cluster
from tests.cluster.requests import Request, Requests, gateway
from tests.cluster.test_one_request import prompt


@pytest.fixture
async def requests(cluster: Cluster) -> AsyncIterator[Requests]:
    async with gateway(cluster) as requests:
        yield requests


def hold_decode(cluster: Cluster, num_steps: int = 5) -> None:
    """Every decode node stops after so many steps from now: a stream has that many tokens, and the first."""
    for name, node in cluster.nodes.items():
        if name.startswith("decode"):
            node.brake.hold_after(num_steps)


def release(cluster: Cluster, *but: str) -> None:
    for name, node in cluster.nodes.items():
        if name not in but:
            node.brake.release()


async def mid_stream(cluster: Cluster, requests: Requests, length: int = 40, *, temperature: float = 0.0) -> Request:
    """A stream that has six of its tokens, and whose node is held before the next."""
    hold_decode(cluster)
    request = requests.ask(prompt(length), temperature=temperature)
    await request.has(6)
    return request


# --- the decode node ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 15, 16, 40])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_stream_goes_on_where_its_killed_node_left_it(
    cluster: Cluster, requests: Requests, temperature: float, length: int
) -> None:
    await cluster.start_pools(decode=2)
    request = await mid_stream(cluster, requests, length, temperature=temperature)
    await cluster.kill(request.decode_node)
    release(cluster)
    await request.finishes_rightly(num_attempts=2)
    assert request.session.num_failovers == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_stream_goes_on_where_its_frozen_node_left_it(
    cluster: Cluster, requests: Requests, temperature: float
) -> None:
    await cluster.start_pools(decode=2)
    request = await mid_stream(cluster, requests, temperature=temperature)
    frozen = request.decode_node
    cluster.network.freeze(cluster.nodes[frozen].incarnation)
    release(cluster)  # it even goes on computing: what it sends is late news
    await request.finishes_rightly(num_attempts=2)
    assert request.decode_node != frozen
    cluster.network.unfreeze(cluster.nodes[frozen].incarnation)


async def test_a_decode_node_that_dies_before_the_first_token_costs_an_attempt(
    cluster: Cluster, requests: Requests
) -> None:
    await cluster.start_pools(decode=2)
    prefill = cluster.nodes["prefill-0"].brake
    prefill.hold_after(0)
    request = requests.ask(prompt(40))
    await cluster.until(lambda: len(prefill.plans) == 1)
    await cluster.kill(request.decode_node)
    prefill.release()
    await request.finishes_rightly(num_attempts=2)


async def test_a_stream_waits_for_its_only_node_to_be_started_again(cluster: Cluster, requests: Requests) -> None:
    await cluster.start_pools()
    request = await mid_stream(cluster, requests)
    await cluster.kill("decode-0")
    await request.is_in(SessionStatus.PARKED)
    await cluster.start(Role.DECODE, "decode-0")
    await request.finishes_rightly(num_attempts=2)


async def test_a_stream_survives_its_node_twice(cluster: Cluster, requests: Requests) -> None:
    await cluster.start_pools(decode=2)
    request = await mid_stream(cluster, requests)
    await cluster.kill(request.decode_node)
    [left] = [node for name, node in cluster.nodes.items() if name.startswith("decode")]
    left.brake.hold_after(6)
    await request.has(len(request.answer.tokens) + 6)
    await cluster.kill(request.decode_node)
    await request.is_in(SessionStatus.PARKED)
    await cluster.start(Role.DECODE, "decode-2")
    await request.finishes_rightly(num_attempts=3)
    assert request.session.num_failovers == 2


async def test_a_request_waits_for_its_first_node(cluster: Cluster, requests: Requests) -> None:
    request = requests.ask(prompt(40))
    await request.is_in(SessionStatus.PARKED)
    await cluster.start_pools()
    await request.finishes_rightly(num_attempts=1)


async def test_patience_ends_with_what_failed_first(cluster: Cluster, requests: Requests) -> None:
    nobody = requests.ask(prompt(40), patience_s=0.2)
    assert isinstance(await nobody.fails(), UnavailableError)
    await cluster.start_pools()
    hold_decode(cluster)
    request = requests.ask(prompt(40), stream_patience_s=0.2)
    await request.has(6)
    await cluster.kill("decode-0")
    assert isinstance(await request.fails(), PeerLostError)


async def test_a_stop_string_is_found_behind_a_failover(cluster: Cluster, requests: Requests) -> None:
    await cluster.start_pools(decode=2)
    hold_decode(cluster)
    request = requests.ask(prompt(40), stop_after=10)
    await request.has(6)
    await cluster.kill(request.decode_node)
    release(cluster)
    await request.task
    assert request.answer.ends == [FinishReason.STOP]
    assert request.answer.tokens == request.oracle[: len(request.answer.tokens)]
    assert len(request.answer.tokens) == 10


# --- the prefill node ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["killed", "frozen"])
@pytest.mark.parametrize("num_chunks", [0, 1, 2, 3])
async def test_a_prefill_node_may_go_at_any_chunk(
    cluster: Cluster, requests: Requests, how: str, num_chunks: int
) -> None:
    await cluster.start(Role.PREFILL, "prefill-0", max_step_tokens=32)
    for name in ("decode-0", "decode-1"):
        await cluster.start(Role.DECODE, name)
    prefill = cluster.nodes["prefill-0"]
    other = await mid_stream(cluster, requests)
    release(cluster, other.decode_node)
    prefill.brake.hold_after(num_chunks)
    num_plans = len(prefill.brake.plans)
    request = requests.ask(prompt(120, salt=1))
    await cluster.until(lambda: len(prefill.brake.plans) == num_plans + num_chunks + 1)
    await gone(cluster, prefill.incarnation, how)
    release(cluster)
    await asyncio.gather(request.finishes_rightly(num_attempts=1), other.finishes_rightly(num_attempts=1))
    assert request.session.paths == ["fallback"]
    cluster.network.unfreeze(prefill.incarnation)


@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_a_prefill_node_may_go_while_its_blocks_are_pulled(
    cluster: Cluster, requests: Requests, how: str
) -> None:
    await cluster.start_pools()
    prefill = cluster.nodes["prefill-0"].incarnation
    cluster.faults.hold()
    request = requests.ask(prompt(120))
    await request.has(1)
    await gone(cluster, prefill, how)
    cluster.faults.release()
    await request.finishes_rightly(num_attempts=1)
    cluster.network.unfreeze(prefill)


@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_a_stream_does_not_notice_that_prefill_goes(cluster: Cluster, requests: Requests, how: str) -> None:
    await cluster.start_pools()
    prefill = cluster.nodes["prefill-0"].incarnation
    request = await mid_stream(cluster, requests)
    await gone(cluster, prefill, how)
    release(cluster)
    await request.finishes_rightly(num_attempts=1)
    assert request.session.paths == ["prefill"]
    cluster.network.unfreeze(prefill)


async def gone(cluster: Cluster, incarnation: Incarnation, how: str) -> None:
    if how == "frozen":
        cluster.network.freeze(incarnation)
        return
    [name] = [name for name, node in cluster.nodes.items() if node.incarnation == incarnation]
    await cluster.kill(name)


# --- links --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cut", "partitioned", "frozen"])
async def test_a_stream_comes_back_to_its_only_node_when_that_was_only_out_of_reach(
    cluster: Cluster, requests: Requests, how: str
) -> None:
    await cluster.start_pools()
    request = await mid_stream(cluster, requests)
    node, network = cluster.nodes["decode-0"].incarnation, cluster.network
    if how == "cut":
        network.cut(requests.incarnation, node)
    elif how == "partitioned":
        network.partition(requests.incarnation, node)
    else:
        network.freeze(node)
    await cluster.until(lambda: request.was(SessionStatus.PARKED))
    network.heal(requests.incarnation, node)
    network.unfreeze(node)
    release(cluster)
    await request.finishes_rightly()
    assert request.session.routed is not None
    assert request.session.routed.decode.incarnation == node


# --- the coordinator ----------------------------------------------------------------------------------------


async def test_a_failover_waits_for_a_coordinator(cluster: Cluster, requests: Requests) -> None:
    await cluster.start_pools(decode=2)
    request = await mid_stream(cluster, requests)
    cluster.kill_coordinator()
    await cluster.kill(request.decode_node)
    release(cluster)
    await request.is_in(SessionStatus.PARKED)
    await cluster.start_coordinator()
    await request.finishes_rightly(num_attempts=2)


@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_with_two_coordinators_one_may_go(cluster: Cluster, how: str) -> None:
    await cluster.second_coordinator()
    async with gateway(cluster) as requests:
        await cluster.start_pools(decode=2)
        await cluster.until(lambda: len(requests.watch.view.nodes) == 3)
        request = await mid_stream(cluster, requests)
        assert requests.watch.coordinator == COORDINATOR
        if how == "killed":
            cluster.kill_coordinator()
        else:
            cluster.network.freeze(cluster.coordinator_incarnation)
        await cluster.kill(request.decode_node)
        release(cluster)
        await request.finishes_rightly(num_attempts=2)
        newcomer = requests.ask(prompt(30))
        await newcomer.finishes_rightly(num_attempts=1)
        assert not newcomer.was(SessionStatus.PARKED)
        if how == "frozen":
            cluster.network.unfreeze(cluster.coordinator_incarnation)


# --- ends during a wait -------------------------------------------------------------------------------------


async def test_a_client_may_leave_while_its_stream_waits(cluster: Cluster, requests: Requests) -> None:
    await cluster.start_pools()
    request = await mid_stream(cluster, requests)
    await cluster.kill("decode-0")
    await request.is_in(SessionStatus.PARKED)
    await request.leaves()


async def test_a_deadline_ends_a_wait(cluster: Cluster, requests: Requests) -> None:
    await cluster.start_pools()
    hold_decode(cluster)
    request = requests.ask(prompt(40), within_s=1.5)
    await request.has(6)
    await cluster.kill("decode-0")
    await request.is_in(SessionStatus.PARKED)
    assert isinstance(await request.fails(), DeadlineError)

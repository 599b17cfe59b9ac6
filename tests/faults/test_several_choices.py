"""Several answers in one stream outlive their nodes: what is finished stays so, each other goes on where it was."""

import asyncio

import pytest

from common.messages import Role
from coordinator.gateway.session import SessionStatus
from tests.cluster.cluster import Cluster
from tests.cluster.requests import Request, Requests, gateway
from tests.cluster.test_one_request import prompt
from tests.faults.test_drain import crawling, drain, peer_of
from tests.faults.test_streams import hold_decode, release


async def mid_stream(
    cluster: Cluster,
    requests: Requests,
    length: int = 40,
    max_tokens: int = 300,
    *,
    stop_after: int = 1 << 30,
    stops_in: int | None = None,
) -> Request:
    """Three choices that have some of their tokens, and whose node is held before the next."""
    hold_decode(cluster, 8)
    request = requests.ask(prompt(length), max_tokens, temperature=1.0, n=3, stop_after=stop_after, stops_in=stops_in)
    await request.has(min(6, stop_after))
    return request


@pytest.mark.parametrize("length", [1, 15, 16, 40])
async def test_a_killed_decode_node_costs_no_choice_a_token(cluster: Cluster, length: int) -> None:
    await cluster.start_pools(decode=2)
    async with gateway(cluster) as requests:
        request = await mid_stream(cluster, requests, length)
        await cluster.kill(request.decode_node)
        release(cluster)
        await request.finishes_rightly(num_attempts=2)
        assert request.session.num_failovers == 1


async def test_what_choices_are_scored_by_survives_their_node(cluster: Cluster) -> None:
    await cluster.start_pools(decode=2)
    async with gateway(cluster) as requests:
        hold_decode(cluster, 8)
        request = requests.ask(prompt(40), 60, temperature=1.0, n=3, scored=True)
        await request.has(6)
        await cluster.kill(request.decode_node)
        release(cluster)
        await request.finishes_rightly(num_attempts=2)
        request.is_scored_rightly()


@pytest.mark.parametrize("stops_in", [0, 1])
async def test_a_choice_that_has_finished_is_not_asked_for_again(cluster: Cluster, stops_in: int) -> None:
    await cluster.start_pools(decode=2)
    async with gateway(cluster) as requests:
        request = await mid_stream(cluster, requests, stop_after=4, stops_in=stops_in)
        survivor = cluster.nodes[peer_of(request)]
        await cluster.kill(request.decode_node)
        release(cluster)
        await request.ends_rightly(num_attempts=2)
    prompt_and_two_answers = 40 + 2 * 300
    assert survivor.brake.num_tokens < prompt_and_two_answers


async def test_the_last_choice_that_is_left_goes_on_alone(cluster: Cluster) -> None:
    await cluster.start_pools(decode=2)
    async with gateway(cluster) as requests:
        hold_decode(cluster, 8)
        request = requests.ask(prompt(40), 300, temperature=1.0, n=2, stop_after=4, stops_in=0)
        await cluster.until(lambda: bool(request.answer.finishes[0]))
        await cluster.kill(request.decode_node)
        release(cluster)
        await request.ends_rightly(num_attempts=2)


@pytest.mark.parametrize("length", [1, 16, 90])
@pytest.mark.parametrize("stops_in", [None, 0, 2])
async def test_choices_move_together_while_they_run(cluster: Cluster, length: int, stops_in: int | None) -> None:
    await cluster.start_pools(decode=2)
    async with gateway(cluster) as requests:
        stop_after = 1 << 30 if stops_in is None else 4
        request = await mid_stream(cluster, requests, length, stop_after=stop_after, stops_in=stops_in)
        old, new = request.decode_node, peer_of(request)
        num_before = cluster.nodes["prefill-0"].brake.num_tokens
        draining = asyncio.create_task(drain(cluster, requests, old))
        await cluster.until(lambda: cluster.nodes[new].load.num_calls == 1)
        cluster.nodes[new].brake.release()
        await crawling(cluster, old, lambda: request.decode_node == new)
        release(cluster)
        assert (await draining).num_evicted == 0
        await request.ends_rightly(num_attempts=2)
        assert (request.session.num_moves, request.session.num_failovers) == (1, 0)
        assert request.session.path == "handover"
        assert cluster.nodes["prefill-0"].brake.num_tokens == num_before, "no prompt is asked for again"


async def test_a_prefill_node_killed_before_its_first_tokens_is_made_up_for_at_home(cluster: Cluster) -> None:
    await cluster.start(Role.PREFILL, "prefill-0", max_step_tokens=16)
    await cluster.start(Role.DECODE, "decode-0")
    cluster.nodes["prefill-0"].brake.hold_after(2)
    async with gateway(cluster) as requests:
        request = requests.ask(prompt(100), 40, n=3, temperature=1.0)
        await cluster.until(lambda: len(cluster.nodes["prefill-0"].brake.plans) == 3)
        await cluster.kill("prefill-0")
        await request.finishes_rightly(num_attempts=1)


async def test_blocks_that_are_lost_after_the_first_tokens_change_none_of_them(cluster: Cluster) -> None:
    await cluster.start_pools()
    cluster.faults.hold()
    async with gateway(cluster) as requests:
        request = requests.ask(prompt(100), 40, n=3, temperature=1.0)
        await request.has(1)
        await cluster.kill("prefill-0")
        cluster.faults.release()
        await request.finishes_rightly(num_attempts=1)


async def test_a_node_that_is_drained_before_it_decodes_lets_go_of_all_choices_at_once(cluster: Cluster) -> None:
    await cluster.start_pools(decode=2)
    prefill = cluster.nodes["prefill-0"].brake
    prefill.hold_after(0)
    async with gateway(cluster) as requests:
        request = requests.ask(prompt(40), n=3, temperature=1.0)
        await cluster.until(lambda: len(prefill.plans) == 1)
        await drain(cluster, requests, request.decode_node)
        prefill.release()
        await request.finishes_rightly(num_attempts=2)
        assert request.was(SessionStatus.STREAMING)

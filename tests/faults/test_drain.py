"""A node taken out of service while it works: every request goes on elsewhere or finishes, none notices."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from common.errors import NodeError, UnavailableError
from common.messages import Drain, DrainProgress, NodeState, Role
from coordinator.cli.drain import drain_in_turn
from tests.cluster.cluster import COORDINATOR, Cluster
from tests.cluster.requests import Request, Requests, gateway
from tests.cluster.test_one_request import prompt
from tests.faults.test_streams import hold_decode, release

MAX_TOKENS = 300


@pytest.fixture
async def requests(cluster: Cluster) -> AsyncIterator[Requests]:
    async with gateway(cluster) as requests:
        yield requests


async def drain(cluster: Cluster, requests: Requests, name: str, *, timeout_s: float = 10.0) -> DrainProgress:
    """What the node said last; it is empty then."""
    said = []
    address = await address_of(cluster, name)
    async with requests.client.open(address, Drain(timeout_s)) as call:
        async for item in call:
            assert isinstance(item, DrainProgress)
            said.append(item)
    assert said[-1].num_calls == 0
    assert cluster.nodes[name].host.draining.drained.is_set()
    return said[-1]


async def address_of(cluster: Cluster, name: str) -> str:
    return next(view.card.address for view in (await cluster.caller.view()).nodes if view.card.node == name)


async def mid_stream(cluster: Cluster, requests: Requests, length: int = 40, *, temperature: float = 0.0) -> Request:
    """A long stream that has six of its tokens, and whose node is held before the next."""
    hold_decode(cluster)
    request = requests.ask(prompt(length), MAX_TOKENS, temperature=temperature)
    await request.has(6)
    return request


async def crawling(cluster: Cluster, name: str, until: Callable[[], bool]) -> None:
    """The node goes on a step at a time, so that it is not done before `until` holds."""

    def one_more() -> bool:
        cluster.nodes[name].brake.hold_after(1)
        return until()

    await cluster.until(one_more)


def peer_of(request: Request) -> str:
    return "decode-1" if request.decode_node == "decode-0" else "decode-0"


def is_listed_as(cluster: Cluster, name: str, state: NodeState) -> bool:
    views = cluster.coordinator.state.view().nodes
    return any(view.card.node == name and view.state is state for view in views)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 90])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_running_stream_moves_while_it_runs(
    cluster: Cluster, requests: Requests, length: int, temperature: float
) -> None:
    await cluster.start_pools(decode=2)
    request = await mid_stream(cluster, requests, length, temperature=temperature)
    old, new = request.decode_node, peer_of(request)
    num_before = cluster.nodes[new].brake.num_tokens
    draining = asyncio.create_task(drain(cluster, requests, old))
    await cluster.until(lambda: cluster.nodes[new].load.num_calls == 1)
    cluster.nodes[new].brake.release()
    await crawling(cluster, old, lambda: request.decode_node == new)
    release(cluster)
    assert (await draining).num_evicted == 0
    await request.finishes_rightly(num_attempts=2)
    assert (request.session.num_moves, request.session.num_failovers) == (1, 0)
    assert request.session.path == "handover"
    full_blocks = (length + 5) // 16  # of what was computed when it was announced, at least
    computed = cluster.nodes[new].brake.num_tokens - num_before
    assert computed <= length + MAX_TOKENS - 16 * full_blocks, "blocks were computed again instead of pulled"


async def test_blocks_are_pulled_while_the_old_node_still_decodes(cluster: Cluster, requests: Requests) -> None:
    await cluster.start_pools(decode=2)
    request = await mid_stream(cluster, requests, 90)
    cluster.faults.hold()
    old, num_before = request.decode_node, len(request.answer.tokens)
    draining = asyncio.create_task(drain(cluster, requests, old))
    await crawling(cluster, old, cluster.faults.held.is_set)
    await crawling(cluster, old, lambda: len(request.answer.tokens) > num_before + 3)
    assert request.decode_node == old
    cluster.faults.release()
    await draining
    release(cluster)
    await request.finishes_rightly(num_attempts=2)


async def test_a_drained_node_is_listed_and_gets_nothing_new(cluster: Cluster, requests: Requests) -> None:
    await cluster.start_pools(prefill=2, decode=2)
    await drain(cluster, requests, "decode-0")
    await drain(cluster, requests, "prefill-1")
    await cluster.until(lambda: is_listed_as(cluster, "decode-0", NodeState.DRAINING))
    await cluster.until(lambda: is_listed_as(cluster, "prefill-1", NodeState.DRAINING))
    for salt in range(4):
        request = requests.ask(prompt(40, salt))
        await request.finishes_rightly(num_attempts=1)
        assert request.session.routed is not None
        assert request.session.routed.decode.node == "decode-1"
        assert request.session.routed.prefill is not None
        assert request.session.routed.prefill.node == "prefill-0"


async def test_what_comes_before_the_coordinator_knows_moves_on_at_once(cluster: Cluster, requests: Requests) -> None:
    await cluster.start_pools(decode=2)
    draining = cluster.nodes["decode-0"].host.draining
    asked: list[Request] = []
    while not any(request.session.num_moves for request in asked):  # sometimes it knows before they come
        draining.is_draining = False
        await cluster.until(lambda: all(one.state is NodeState.READY for one in cluster.coordinator.state.view().nodes))
        draining.is_draining = True
        asked = [requests.ask(prompt(40, salt)) for salt in range(6)]
        for request in asked:
            await request.finishes_rightly()
            assert request.session.num_failed == 0


async def test_a_request_that_waits_for_its_prompt_moves_at_once(cluster: Cluster, requests: Requests) -> None:
    await cluster.start_pools(decode=2)
    prefill = cluster.nodes["prefill-0"].brake
    prefill.hold_after(0)
    request = requests.ask(prompt(40))
    await cluster.until(lambda: len(prefill.plans) == 1)
    old = request.decode_node
    await drain(cluster, requests, old)
    prefill.release()
    await request.finishes_rightly(num_attempts=2)
    assert request.decode_node != old
    assert request.session.num_failovers == 0


async def test_the_last_decode_node_lets_its_streams_finish(cluster: Cluster, requests: Requests) -> None:
    await cluster.start_pools()
    request = await mid_stream(cluster, requests)
    draining = asyncio.create_task(drain(cluster, requests, "decode-0"))
    await cluster.until(lambda: cluster.nodes["decode-0"].host.draining.is_draining)
    release(cluster)
    await request.finishes_rightly(num_attempts=1)
    await draining


async def test_after_the_timeout_streams_go_on_elsewhere_by_replay(cluster: Cluster, requests: Requests) -> None:
    await cluster.start_pools(decode=2)
    request = await mid_stream(cluster, requests)
    cluster.faults.hold()  # the handover never gets its blocks
    old = request.decode_node
    draining = asyncio.create_task(drain(cluster, requests, old, timeout_s=0.5))
    release(cluster, old)
    await crawling(cluster, old, cluster.faults.held.is_set)
    assert (await draining).num_evicted == 1
    cluster.faults.release()
    release(cluster)
    await request.finishes_rightly()
    assert request.session.num_moves >= 1


@pytest.mark.parametrize("fault", ["fail", "stale", "drop"])
async def test_a_handover_that_fails_costs_nothing(cluster: Cluster, requests: Requests, fault: str) -> None:
    await cluster.start_pools(decode=2)
    request = await mid_stream(cluster, requests, 90)
    old = request.decode_node
    cluster.faults.hold()
    draining = asyncio.create_task(drain(cluster, requests, old))
    await crawling(cluster, old, cluster.faults.held.is_set)
    if fault == "drop":
        cluster.faults.drop()
    else:
        reads = cluster.faults.fail_reads if fault == "fail" else cluster.faults.stale_reads
        reads.update(range(100))
    cluster.faults.release()
    await cluster.until(lambda: cluster.nodes[peer_of(request)].load.num_calls == 0)
    cluster.faults.restore()
    release(cluster)
    await request.finishes_rightly(num_attempts=1)
    await draining


@pytest.mark.parametrize("who", ["old", "new"])
async def test_a_node_killed_during_a_handover_costs_no_token(cluster: Cluster, requests: Requests, who: str) -> None:
    await cluster.start_pools(decode=3)
    request = await mid_stream(cluster, requests, 90)
    old = request.decode_node
    cluster.faults.hold()
    draining = asyncio.create_task(drain(cluster, requests, old))
    await crawling(cluster, old, cluster.faults.held.is_set)
    new = next(name for name, node in cluster.nodes.items() if name != old and name[0] == "d" and node.load.num_calls)
    if who == "old":
        cluster.nodes[old].brake.release()
    await cluster.kill(old if who == "old" else new)
    cluster.faults.release()
    release(cluster)
    await request.finishes_rightly()
    if who == "old":
        with pytest.raises(NodeError):
            await draining
    else:
        await draining


async def test_a_client_that_leaves_during_a_handover_leaves_nothing(cluster: Cluster, requests: Requests) -> None:
    await cluster.start_pools(decode=2)
    request = await mid_stream(cluster, requests, 90)
    cluster.faults.hold()
    draining = asyncio.create_task(drain(cluster, requests, request.decode_node))
    await crawling(cluster, request.decode_node, cluster.faults.held.is_set)
    await request.leaves()
    cluster.faults.release()
    release(cluster)
    await draining


async def test_a_draining_prefill_node_waits_for_its_readers(cluster: Cluster, requests: Requests) -> None:
    await cluster.start_pools()
    cluster.faults.hold()
    request = requests.ask(prompt(50))
    await cluster.faults.held.wait()
    draining = asyncio.create_task(drain(cluster, requests, "prefill-0"))
    await cluster.until(lambda: cluster.nodes["prefill-0"].host.draining.is_draining)
    assert not draining.done()
    cluster.faults.release()
    await request.finishes_rightly(num_attempts=1)
    assert request.session.path == "prefill"
    await draining


async def test_a_drain_that_is_given_up_has_the_node_serve_again(cluster: Cluster, requests: Requests) -> None:
    await cluster.start_pools()
    request = await mid_stream(cluster, requests)
    draining = asyncio.create_task(drain(cluster, requests, "decode-0"))
    await cluster.until(lambda: is_listed_as(cluster, "decode-0", NodeState.DRAINING))
    draining.cancel()
    await asyncio.wait([draining])
    await cluster.until(lambda: is_listed_as(cluster, "decode-0", NodeState.READY))
    release(cluster)
    await request.finishes_rightly(num_attempts=1)
    await requests.ask(prompt(40, 1)).finishes_rightly()


async def test_every_node_in_turn_under_load(cluster: Cluster, requests: Requests) -> None:
    await cluster.start_pools(prefill=2, decode=2)
    asked = [requests.ask(prompt(20 + 7 * salt, salt), 120, temperature=salt % 2) for salt in range(12)]
    for name in list(cluster.nodes):
        asked += [requests.ask(prompt(30 + salt, 100 + salt), 60) for salt in range(3)]
        role = cluster.nodes[name].host.role
        await drain(cluster, requests, name)
        await cluster.stop(name)
        await cluster.start(role, name)
    for request in asked:
        await request.finishes_rightly()


async def test_a_second_drain_is_refused(cluster: Cluster, requests: Requests) -> None:
    await cluster.start_pools()
    request = await mid_stream(cluster, requests)
    first = asyncio.create_task(drain(cluster, requests, "decode-0"))
    await cluster.until(lambda: cluster.nodes["decode-0"].host.draining.is_draining)
    with pytest.raises(UnavailableError, match="already"):
        await drain(cluster, requests, "decode-0")
    release(cluster)
    await request.finishes_rightly()
    await first


async def test_nodes_named_in_one_command_go_one_at_a_time(
    cluster: Cluster, requests: Requests, capsys: pytest.CaptureFixture[str]
) -> None:
    await cluster.start_pools(decode=2)
    names = ["prefill-0", "decode-0", "decode-1"]  # a kind's only node, and the first of two, wait for nobody
    command = asyncio.create_task(drain_in_turn(cluster.network, COORDINATOR, names, timeout_s=5.0))
    await cluster.until(lambda: "decode-1: waits until another node can do its work" in capsys.readouterr().out)
    draining = {name: cluster.nodes[name].host.draining for name in names}
    assert [draining[name].drained.is_set() for name in names] == [True, True, False]
    assert not draining["decode-1"].is_draining
    await requests.ask(prompt(40, 1)).finishes_rightly()
    await cluster.stop("decode-0")
    await cluster.start(Role.DECODE, "decode-0")
    assert await command == 0
    assert draining["decode-1"].drained.is_set()


async def test_the_last_node_that_nobody_relieves_goes_on(
    cluster: Cluster, requests: Requests, capsys: pytest.CaptureFixture[str]
) -> None:
    await cluster.start_pools(decode=2)
    assert await drain_in_turn(cluster.network, COORDINATOR, ["decode-0", "decode-1"], timeout_s=0.2) == 1
    assert "decode-1 is not drained: no other node came to do its work within 0.2 s" in capsys.readouterr().err
    assert not cluster.nodes["decode-1"].host.draining.is_draining
    await requests.ask(prompt(40, 1)).finishes_rightly()

"""Several answers to one prompt: one prefill, one transfer, blocks shared on decode; each as if it were alone."""

import asyncio

import pytest

from common.messages import Role
from tests.cluster.cluster import Cluster
from tests.cluster.requests import gateway

LENGTHS = [1, 15, 16, 17, 33, 100]


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(7 * position + 11 * salt + length) % 90 + 5 for position in range(length)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("length", LENGTHS)
async def test_one_prefill_and_one_transfer_serve_all_choices(
    cluster: Cluster, length: int, temperature: float
) -> None:
    await cluster.start_pools()
    async with gateway(cluster) as requests:
        request = requests.ask(prompt(length), 20, n=3, temperature=temperature)
        await request.finishes_rightly(num_attempts=1)
        alone = requests.ask(prompt(length), 20, temperature=temperature)
        await alone.finishes_rightly()
    assert len(set(map(tuple, request.answer.all))) == (3 if temperature else 1)
    prefill, decode = cluster.nodes["prefill-0"], cluster.nodes["decode-0"]
    num_alone = sum(chunk.num_tokens for plan in prefill.brake.plans[1:] for chunk in plan.chunks)
    assert prefill.brake.num_tokens - num_alone == length, "the prompt is computed once"
    assert decode.load.num_generated_tokens == 3 * 19 + (19 if num_alone else 20)


@pytest.mark.parametrize("length", LENGTHS)
async def test_one_token_each_needs_no_transfer(cluster: Cluster, length: int) -> None:
    await cluster.start_pools()
    async with gateway(cluster) as requests:
        await requests.ask(prompt(length), 1, n=3, temperature=1.0).finishes_rightly()
    assert cluster.faults.num_reads == 0
    assert cluster.nodes["decode-0"].brake.plans == []


@pytest.mark.parametrize("length", LENGTHS)
async def test_without_a_prefill_pool_the_prompt_is_computed_once_at_home(cluster: Cluster, length: int) -> None:
    await cluster.start_pools(prefill=0)
    async with gateway(cluster) as requests:
        await requests.ask(prompt(length), 20, n=3, temperature=1.0).finishes_rightly()
    assert cluster.nodes["decode-0"].brake.num_tokens == length + 2 + 3 * 19


@pytest.mark.parametrize("prefill", [0, 1])
async def test_every_token_of_every_choice_is_scored_where_that_is_asked_for(cluster: Cluster, prefill: int) -> None:
    await cluster.start_pools(prefill=prefill)
    async with gateway(cluster) as requests:
        request = requests.ask(prompt(40), 20, n=3, temperature=1.0, scored=True)
        beside = requests.ask(prompt(30), 20, temperature=1.0)
        await request.finishes_rightly()
        await beside.finishes_rightly()
        request.is_scored_rightly()
        assert beside.session.choices[0].logprob == 0.0


async def test_a_cached_prompt_is_neither_computed_nor_pulled_again(cluster: Cluster) -> None:
    await cluster.start_pools()
    async with gateway(cluster) as requests:
        await requests.ask(prompt(64), 20, temperature=1.0).finishes_rightly()
        before = cluster.nodes["decode-0"].brake.num_tokens
        await requests.ask(prompt(64), 20, n=3, temperature=1.0).finishes_rightly()
    assert cluster.faults.num_reads == 1
    assert cluster.nodes["decode-0"].brake.num_tokens - before == 16 + 2 + 3 * 19


@pytest.mark.parametrize("prefill", [0, 1])
@pytest.mark.parametrize("ending", [0, 1, 2])
async def test_a_first_token_that_ends_one_choice_ends_no_other(cluster: Cluster, ending: int, prefill: int) -> None:
    await cluster.start_pools(prefill=prefill)
    async with gateway(cluster) as requests:
        stop = requests.ask(prompt(40), 1, n=3, temperature=1.0, seed=5)
        await stop.finishes_rightly()
        [token] = stop.answer.all[ending]
        request = requests.ask(prompt(40), 20, n=3, temperature=1.0, seed=5, stop_token_ids=(token,))
        await request.ends_rightly()
    assert [len(tokens) for tokens in request.answer.all] == [1 if choice == ending else 20 for choice in range(3)]


@pytest.mark.parametrize("stops_in", [0, 1, 2, None])
async def test_a_stop_string_stops_its_choice_alone(cluster: Cluster, stops_in: int | None) -> None:
    await cluster.start_pools()
    decode = cluster.nodes["decode-0"]
    decode.brake.hold_after(10)
    async with gateway(cluster) as requests:
        request = requests.ask(prompt(40), 300, n=3, temperature=1.0, stop_after=5, stops_in=stops_in)
        await cluster.until(lambda: bool(request.answer.finishes[stops_in or 0]))

        def one_more_step() -> bool:
            decode.brake.hold_after(1)
            return decode.load.num_running == (0 if stops_in is None else 2)

        await cluster.until(one_more_step)
        assert len(decode.brake.plans) < 200, "nobody wants the rest, nobody writes it"
        decode.brake.release()
        await request.ends_rightly(num_attempts=1)


@pytest.mark.parametrize("num_blocks", [13, 20])
async def test_in_a_pool_for_one_choice_all_finish(cluster: Cluster, num_blocks: int) -> None:
    await cluster.start(Role.PREFILL, "prefill-0")
    decode = await cluster.start(Role.DECODE, "decode-0", num_blocks=num_blocks)
    async with gateway(cluster) as requests:
        asked = [requests.ask(prompt(50, salt), 140, n=3, temperature=1.0) for salt in range(3)]
        for request in asked:
            await request.finishes_rightly()
    assert decode.load.num_preemptions


async def test_what_leaves_in_the_middle_leaves_nothing(cluster: Cluster) -> None:
    await cluster.start_pools()
    async with gateway(cluster) as requests:
        decode = cluster.nodes["decode-0"]
        decode.brake.hold_after(6)
        request = requests.ask(prompt(40), 200, n=4, temperature=1.0)
        await request.has(5)
        counting = asyncio.create_task(decode.host.holdings())

        def counted() -> bool:
            decode.brake.hold_after(1)
            return counting.done()

        await cluster.until(counted)
        holdings = counting.result()
        assert len(holdings.sequences) == 4
        assert {one.request for one in holdings.sequences} == {request.session.id}
        assert holdings.owned_blocks == holdings.used_blocks < sum(one.num_blocks for one in holdings.sequences)
        decode.brake.release()
        await request.leaves()

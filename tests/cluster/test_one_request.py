"""The path of one request, from a prompt to its last token: what a newcomer reads to see Baton work."""

import pytest

from common.messages import FinishReason, Role
from tests.cluster.cluster import Cluster

LENGTHS = [1, 15, 16, 17, 31, 32, 33, 48, 64, 200]


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(7 * position + 11 * salt + length) % 90 + 5 for position in range(length)]


@pytest.mark.parametrize("length", LENGTHS)
async def test_the_answer_through_both_pools_is_that_of_one_engine(cluster: Cluster, length: int) -> None:
    await cluster.start_pools()
    answer = await cluster.asks_rightly(prompt(length))
    assert answer.last is not None
    assert answer.last.finish is FinishReason.LENGTH
    prefill, decode = (cluster.nodes[name].brake for name in ("prefill-0", "decode-0"))
    assert prefill.num_tokens == length, "prefill computes the prompt, once"
    assert decode.num_tokens == 7, "decode computes one token a step, and none of the prompt"


@pytest.mark.parametrize("max_tokens", [1, 2])
@pytest.mark.parametrize("length", LENGTHS)
async def test_short_answers_cross_the_hand_over_whole(cluster: Cluster, length: int, max_tokens: int) -> None:
    await cluster.start_pools()
    await cluster.asks_rightly(prompt(length), max_tokens)
    assert (cluster.faults.num_reads > 0) == (max_tokens > 1), "a request for one token pulls nothing"


async def test_without_a_prefill_pool_the_decode_node_computes_the_prompt(cluster: Cluster) -> None:
    await cluster.start_pools(prefill=0)
    answer = await cluster.asks_rightly(prompt(40))
    assert answer.routed is not None
    assert answer.routed.prefill is None


async def test_a_stop_token_drawn_by_prefill_ends_the_request(cluster: Cluster) -> None:
    await cluster.start_pools()
    [first, *_] = cluster.expected(prompt(20))
    answer = await cluster.ask(prompt(20), stop_token_ids=(first,))  # type: ignore[arg-type]
    assert answer.tokens == [first]
    assert answer.last is not None
    assert answer.last.finish is FinishReason.STOP


async def test_long_prompts_are_pulled_while_they_are_computed(cluster: Cluster) -> None:
    await cluster.start(Role.PREFILL, "prefill-0", max_step_tokens=32)
    await cluster.start(Role.DECODE, "decode-0")
    await cluster.asks_rightly(prompt(200))
    assert cluster.faults.num_reads == len(cluster.nodes["prefill-0"].brake.plans) == 7


async def test_phases_add_up_to_what_the_caller_waited(cluster: Cluster) -> None:
    await cluster.start_pools()
    await cluster.asks_rightly(prompt(20))
    cluster.faults.delay_s = 0.3
    started_s = cluster.clock.now_s()
    answer = await cluster.asks_rightly(prompt(40))
    waited_s = cluster.clock.now_s() - started_s
    assert answer.last is not None
    phases = answer.last.phases
    assert phases is not None
    assert phases["transfer"] >= 0.25
    assert sum(phases.values()) == pytest.approx(waited_s, abs=0.1)


async def test_a_prefix_cached_at_decode_is_not_pulled_again(cluster: Cluster) -> None:
    await cluster.start_pools()
    await cluster.asks_rightly(prompt(64))
    again = await cluster.asks_rightly(prompt(64))
    assert again.last is not None
    assert again.last.cached_tokens == 48
    assert cluster.faults.num_reads == 1

import os

import pytest

from common.engine.request import Chunk, EngineRequest, StepPlan
from common.errors import ConfigError
from common.kv_cache.memory import PoolMemory, allocate
from common.messages import BlockId, Incarnation, KVLayout, LayerKV, RequestId, Sampling
from common.model.fake import FakeRunner, fake_layout, fake_oracle
from tests.unit.common.engine.rig import plain_memory

LENGTHS = (1, 15, 16, 17, 31, 32, 33, 48)
GREEDY = Sampling(max_tokens=8, seed=1, temperature=0.0)
RANDOM = Sampling(max_tokens=8, seed=1)


def request_of(num_tokens: int, blocks: list[int], *, sampling: Sampling = RANDOM) -> EngineRequest:
    return EngineRequest(
        id=RequestId("r"),
        tokens=[7 * position % 101 for position in range(num_tokens)],
        num_prompt_tokens=num_tokens,
        sampling=sampling,
        blocks=[BlockId(block) for block in blocks],
    )


def run(runner: FakeRunner, request: EngineRequest, start: int = 0, *, samples: bool = True) -> list[int]:
    return runner.execute(StepPlan((Chunk(request, start, len(request.tokens) - start, samples),)))


@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("sampling", [GREEDY, RANDOM])
def test_tokens_drawn_from_the_pool_are_the_oracles(num_tokens: int, num_layers: int, sampling: Sampling) -> None:
    runner = FakeRunner(plain_memory(8, num_layers=num_layers))
    request = request_of(num_tokens, [5, 2, 7, 0], sampling=sampling)
    expected = fake_oracle(request.tokens, 4, sampling, num_layers=num_layers)
    start = 0
    for token in expected:
        assert run(runner, request, start) == [token]
        start = len(request.tokens)
        request.tokens.append(token)


def test_a_prompt_in_chunks_draws_what_it_draws_whole() -> None:
    runner = FakeRunner(plain_memory(4))
    request = request_of(40, [3, 1, 0])
    assert runner.execute(StepPlan((Chunk(request, 0, 16, False),))) == []
    assert runner.execute(StepPlan((Chunk(request, 16, 7, False),))) == []
    assert run(runner, request, 23) == fake_oracle(request.tokens, 1, RANDOM)


def test_several_requests_in_a_step_do_not_disturb_each_other() -> None:
    runner = FakeRunner(plain_memory(4))
    one, other = request_of(20, [3, 1]), request_of(9, [0])
    plan = StepPlan((Chunk(one, 0, 20, True), Chunk(other, 0, 9, True)))
    assert runner.execute(plan) == fake_oracle(one.tokens, 1, RANDOM) + fake_oracle(other.tokens, 1, RANDOM)


def test_a_wrong_block_a_wrong_order_a_stale_block_and_a_torn_block_each_give_a_wrong_token() -> None:
    memory = plain_memory(4)
    runner = FakeRunner(memory)
    request = request_of(48, [0, 1, 2])
    [right] = run(runner, request)
    sampled = Chunk(request, 47, 1, True)

    def drawn(blocks: list[int]) -> int:
        request.blocks = [BlockId(block) for block in blocks]
        return runner.execute(StepPlan((sampled,)))[0]

    assert drawn([0, 1, 2]) == right
    assert drawn([0, 3, 2]) != right
    assert drawn([1, 0, 2]) != right
    memory.blocks[1, 40] ^= 1
    assert drawn([0, 1, 2]) != right


def test_greedy_draws_ignore_the_seed_and_random_ones_follow_it() -> None:
    tokens = list(range(20))

    def oracle(seed: int, temperature: float) -> list[int]:
        return fake_oracle(tokens, 8, Sampling(max_tokens=8, seed=seed, temperature=temperature))

    assert oracle(1, 0.0) == oracle(2, 0.0)
    assert oracle(1, 1.0) != oracle(2, 1.0)


def test_the_oracle_ends_with_a_stop_token_and_at_the_longest_sequence() -> None:
    free = fake_oracle([1, 2], 8, RANDOM)
    stopping = Sampling(max_tokens=8, seed=1, stop_token_ids=(free[2],))
    assert fake_oracle([1, 2], 8, stopping) == free[:3]
    assert fake_oracle([1, 2], 8, RANDOM, max_model_len=5) == free[:3]


def test_a_real_pool_and_a_wider_layout_serve_as_well() -> None:
    layout = KVLayout(8, "float32", 4, (LayerKV(3, 8, 4), LayerKV(1, 2, 6)))
    memory: PoolMemory = allocate(layout, 3, Incarnation("0" * 32))
    try:
        request = request_of(20, [2, 0, 1])
        assert run(FakeRunner(memory), request) == fake_oracle(request.tokens, 1, RANDOM, num_layers=2)
    finally:
        os.close(memory.fd)


def test_a_layout_without_room_for_the_words_is_refused() -> None:
    layout = KVLayout(16, "bfloat16", 2, fake_layout().layers)
    memory = plain_memory(1)
    with pytest.raises(ConfigError):
        FakeRunner(PoolMemory(memory.incarnation, layout, memory.blocks, memory.generations))

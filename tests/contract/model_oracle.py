"""Prompts, what transformers answers to them, and the real scheduler and pool: chunked and staggered."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM

from common.engine.request import Chunk, EngineRequest, StepPlan, sampling_of
from common.engine.scheduler import Scheduler
from common.kv_cache.block_pool import BlockPool
from common.kv_cache.prefix_cache import root_hash
from common.messages import BlockId, RequestId, Sampling
from tests.tiny_models import VOCAB_SIZE

BLOCK_SIZE = 16
NUM_TOKENS = 8
MIN_MARGIN = 1e-3
LENGTHS = (1, 15, 16, 17, 31, 32, 33, 48, 200)
FAST_FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "mixtral")
SEEDS = {"gemma3_text": 1, "phi3": 1, "deepseek_v3": 1, "gpt2": 1}
"""Seeds of weights whose answers to PROMPTS have clear margins, where 0 is not one."""

_DRAWN = Sampling(NUM_TOKENS, seed=5)
_random = np.random.default_rng(7)
PROMPTS = [_random.integers(3, VOCAB_SIZE, length).tolist() for length in LENGTHS]


class Running(Protocol):
    max_model_len: int
    num_host_blocks: int

    def execute(self, plan: StepPlan) -> list[int]: ...
    def copy_blocks(self, copies: Sequence[tuple[BlockId, BlockId]]) -> None: ...
    def logits(self, plan: StepPlan) -> npt.NDArray[np.float32]: ...


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    margin: float  # the smallest, between the two best logits


@cache
def oracle(folder: Path) -> tuple[Answer, ...]:
    """What transformers generates greedily for PROMPTS, one at a time, with its own attention and cache."""
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    found = tuple(_generate(model, prompt) for prompt in PROMPTS)
    assert min(answer.margin for answer in found) > MIN_MARGIN, "choose another seed: a tie would prove nothing"
    assert len({token for answer in found for token in answer.tokens}) > 24, "answers that hardly depend on anything"
    return found


def _generate(model: Any, prompt: list[int]) -> Answer:
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = torch.cat(out.logits).float().topk(2, dim=-1).values
    return Answer(out.sequences[0, len(prompt) :].tolist(), float((best[:, 0] - best[:, 1]).min()))


def serve(runner: Running, *, num_blocks: int = 128, max_step_tokens: int = 40) -> list[list[int]]:
    """Answers to PROMPTS from the scheduler: one more arrives with every step, long ones run in chunks.

    With a host tier all are asked twice, and what the first answers left there comes back for the second.
    """
    pool = BlockPool(num_blocks, np.zeros(num_blocks, np.int64), runner.num_host_blocks)
    scheduler = _scheduler(runner, pool, max_step_tokens=max_step_tokens)
    prompts = PROMPTS * 2 if runner.num_host_blocks else PROMPTS
    requests = [_request(index, prompt) for index, prompt in enumerate(prompts)]
    arriving = requests[:]
    while arriving or scheduler.ids:
        if arriving:
            scheduler.add(arriving.pop(0))
        plan = scheduler.schedule()
        assert plan.chunks, "nothing runs and something waits"
        runner.copy_blocks(pool.take_copies())
        scheduler.update(plan, runner.execute(plan))
        scheduler.check_invariants()
    assert pool.num_free == num_blocks
    assert bool(pool.host.num_in) == bool(runner.num_host_blocks)
    return [request.tokens[request.num_prompt_tokens :] for request in requests[-len(PROMPTS) :]]


def _scheduler(runner: Running, pool: BlockPool, *, max_step_tokens: int = 40) -> Scheduler:
    return Scheduler(
        pool,
        block_size=BLOCK_SIZE,
        max_running=6,
        max_step_tokens=max_step_tokens,
        max_step_s=60.0,
        max_model_len=runner.max_model_len,
        admit_whole=False,
        root_of=(lambda _: root_hash(model_digest="")) if runner.num_host_blocks else None,
    )


def _request(index: int, prompt: list[int], blocks: list[BlockId] | None = None) -> EngineRequest:
    sampling = Sampling(max_tokens=NUM_TOKENS, seed=0, temperature=0)
    return EngineRequest(RequestId(f"{index:032x}"), list(prompt), len(prompt), sampling, blocks=blocks or [])


def assert_choices_share_blocks_and_are_right(runner: Running) -> None:
    """Three answers to a prompt, from shared blocks, are those that come alone; a prefill draws their first tokens."""
    for prompt in (prompt for prompt in PROMPTS if len(prompt) in (1, 16, 33, 200)):
        together = _drawn(runner, prompt, (0, 1, 2))
        assert together == [_drawn(runner, prompt, (choice,))[0] for choice in range(3)]
        assert len(set(map(tuple, together))) == 3
        blocks = [BlockId(block) for block in range(-(-len(prompt) // BLOCK_SIZE))]
        request = EngineRequest(RequestId("p"), list(prompt), len(prompt), _DRAWN, blocks=blocks)
        request.also = tuple(sampling_of(_DRAWN, choice) for choice in (1, 2))
        firsts = runner.execute(StepPlan((Chunk(request, 0, len(prompt), 3),)))
        assert firsts == [tokens[0] for tokens in together]


def _drawn(runner: Running, prompt: list[int], choices: tuple[int, ...]) -> list[list[int]]:
    pool = BlockPool(128, np.zeros(128, np.int64), runner.num_host_blocks)
    scheduler = _scheduler(runner, pool)
    requests = [
        EngineRequest(RequestId(f"{choice}"), list(prompt), len(prompt), sampling_of(_DRAWN, choice))
        for choice in choices
    ]
    scheduler.add(requests[0], requests[1:], len(prompt))
    while scheduler.ids:
        plan = scheduler.schedule()
        runner.copy_blocks(pool.take_copies())
        scheduler.update(plan, runner.execute(plan))
    return [request.tokens[len(prompt) :] for request in requests]


def whole_plan() -> StepPlan:
    """All PROMPTS in one step, each in blocks of its own."""
    width = -(-max(LENGTHS) // BLOCK_SIZE)
    requests = [
        _request(i, prompt, [BlockId(block) for block in range(i * width, (i + 1) * width)])
        for i, prompt in enumerate(PROMPTS)
    ]
    return StepPlan(tuple(Chunk(request, 0, len(request.tokens), True) for request in requests))


def assert_rows_keep_their_bits(runner: Running) -> None:
    """Logits alone, batched and chunked."""
    plan = whole_plan()
    batched = runner.logits(plan)
    for request, row in zip([chunk.request for chunk in plan.chunks], batched, strict=True):
        alone = runner.logits(StepPlan((Chunk(request, 0, len(request.tokens), True),)))
        assert np.array_equal(alone[0], row)
        last = None
        for start, size in _cuts(len(request.tokens)):
            last = runner.logits(StepPlan((Chunk(request, start, size, True),)))
        assert last is not None
        assert np.array_equal(last[0], row)


def _cuts(length: int) -> Iterator[tuple[int, int]]:
    """Chunks of 23 tokens, the last three tokens one by one."""
    start = 0
    while start < length:
        size = min(23, length - 3 - start) if start < length - 3 else 1
        yield start, size
        start += size

"""Every architecture answers as `transformers` itself does: the real scheduler and pool, chunked and staggered."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from common.attention.base import BACKENDS
from common.attention.native import NativeAttention
from common.config import ModelConfig
from common.engine.request import Chunk, EngineRequest, StepPlan
from common.engine.scheduler import Scheduler
from common.errors import ConfigError
from common.kv_cache.block_pool import BlockPool
from common.messages import BlockId, RequestId, Sampling
from common.model import loader
from common.model.loader import LoadedModel
from common.model.runner import TransformersRunner, pick_backend, settle_row_floor
from tests.tiny_models import CONFIGS, VOCAB_SIZE, save_model

BLOCK_SIZE = 16
NUM_TOKENS = 8
MIN_MARGIN = 1e-3
LENGTHS = (1, 15, 16, 17, 31, 32, 33, 48, 200)
FAST = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "mixtral")
FAMILIES = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in CONFIGS]

SEEDS = {"gemma3_text": 1, "phi3": 1, "deepseek_v3": 1, "gpt2": 1}
"""Seeds of weights whose answers to PROMPTS have clear margins, where 0 is not one."""

_random = np.random.default_rng(7)
PROMPTS = [_random.integers(3, VOCAB_SIZE, length).tolist() for length in LENGTHS]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda family: save_model(family, tmp_path_factory.mktemp(family), seed=SEEDS.get(family, 0)))


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    margin: float  # the smallest, between the two best logits


@pytest.fixture(scope="module")
def oracle(folder_of: Callable[[str], Path]) -> Callable[[str], list[Answer]]:
    """What transformers generates greedily for PROMPTS, one at a time, with its own attention and cache."""

    @cache
    def answers(family: str) -> list[Answer]:
        auto: Any = AutoModelForCausalLM
        model = auto.from_pretrained(folder_of(family), dtype=torch.float32, attn_implementation="eager").eval()
        found = [_generate(model, prompt) for prompt in PROMPTS]
        assert min(answer.margin for answer in found) > MIN_MARGIN, "choose another seed: a tie would prove nothing"
        assert len({token for answer in found for token in answer.tokens}) > 24, (
            "answers that hardly depend on anything"
        )
        return found

    return answers


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


def load(folder: Path, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return loader.load(folder, dtype=dtype, block_size=BLOCK_SIZE, quantization="none")


def make_runner(loaded: LoadedModel, attention: str = "auto", *, num_blocks: int = 128) -> TransformersRunner:
    if attention == "native" and (reason := NativeAttention.available()):
        pytest.skip(reason)
    backend = pick_backend(attention, loaded, num_threads=1)  # a model that native cannot run is a failure
    floor = settle_row_floor(loaded, ModelConfig(model="tiny", threads=1, quantization="none"))
    pool = torch.full((num_blocks, loaded.layout.block_elements), float("nan"), dtype=torch.float32)
    return TransformersRunner(loaded, backend, pool.to(getattr(torch, loaded.layout.dtype)), row_floor=floor)


def serve(runner: TransformersRunner, *, num_blocks: int = 128, max_step_tokens: int = 40) -> list[list[int]]:
    """Answers to PROMPTS from the scheduler: one more arrives with every step, long ones run in chunks."""
    pool = BlockPool(num_blocks, np.zeros(num_blocks, np.int64))
    scheduler = Scheduler(
        pool,
        block_size=BLOCK_SIZE,
        max_running=6,
        max_step_tokens=max_step_tokens,
        max_step_s=60.0,
        max_model_len=runner.max_model_len,
        admit_whole=False,
        root_of=None,
    )
    requests = [_request(index, prompt) for index, prompt in enumerate(PROMPTS)]
    arriving = requests[:]
    while arriving or scheduler.ids:
        if arriving:
            scheduler.add(arriving.pop(0))
        plan = scheduler.schedule()
        assert plan.chunks, "nothing runs and something waits"
        scheduler.update(plan, runner.execute(plan))
        scheduler.check_invariants()
    assert pool.num_free == num_blocks
    return [request.tokens[request.num_prompt_tokens :] for request in requests]


def _request(index: int, prompt: list[int], blocks: list[BlockId] | None = None) -> EngineRequest:
    sampling = Sampling(max_tokens=NUM_TOKENS, seed=0, temperature=0)
    return EngineRequest(RequestId(f"{index:032x}"), list(prompt), len(prompt), sampling, blocks=blocks or [])


@pytest.mark.parametrize("attention", sorted(BACKENDS))
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_equal_those_of_transformers(
    family: str, attention: str, folder_of: Callable[[str], Path], oracle: Callable[[str], list[Answer]]
) -> None:
    answers = serve(make_runner(load(folder_of(family)), attention))
    assert answers == [answer.tokens for answer in oracle(family)]


def test_answers_survive_a_pool_that_forces_preemption(
    folder_of: Callable[[str], Path], oracle: Callable[[str], list[Answer]]
) -> None:
    runner = make_runner(load(folder_of("qwen3")), num_blocks=16)
    assert serve(runner, num_blocks=16) == [answer.tokens for answer in oracle("qwen3")]


@pytest.mark.parametrize(
    ("family", "fault"), [("mistral", {"window": None}), ("gemma2", {"softcap": 0.0}), ("llama", {"scale": 0.3})]
)
def test_an_attention_parameter_left_out_is_seen(
    family: str, fault: dict[str, Any], folder_of: Callable[[str], Path], oracle: Callable[[str], list[Answer]]
) -> None:
    loaded = load(folder_of(family))
    broken = replace(loaded, layers=tuple(replace(layer, **fault) for layer in loaded.layers))
    assert serve(make_runner(broken)) != [answer.tokens for answer in oracle(family)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_have_the_same_bits_alone_batched_and_chunked(
    family: str, dtype: torch.dtype, folder_of: Callable[[str], Path]
) -> None:
    runner = make_runner(load(folder_of(family), dtype))
    width = -(-max(LENGTHS) // BLOCK_SIZE)
    requests = [
        _request(i, prompt, [BlockId(block) for block in range(i * width, (i + 1) * width)])
        for i, prompt in enumerate(PROMPTS)
    ]
    batched = runner.logits(StepPlan(tuple(Chunk(r, 0, len(r.tokens), True) for r in requests)))
    for request, row in zip(requests, batched, strict=True):
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


@pytest.mark.parametrize("family", ["bloom", "falcon", "mamba2", "falcon_h1", "qwen3_next", "llama4_text"])
def test_an_architecture_that_cannot_work_is_refused_by_name(family: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(f'{{"model_type": "{family}"}}')
    with pytest.raises(ConfigError, match=f"{family} cannot be served"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("gpt_neo", "attention classes of its own"),
        ("xglm", "do not call AttentionInterface exactly once"),
        ("doge", "attention_mask"),
        ("bert", "not causal"),
        ("phimoe", "sees 20 tokens only"),
    ],
)
def test_what_the_dry_run_cannot_honour_is_refused(family: str, why: str, tmp_path: Path) -> None:
    extra: dict[str, dict[str, Any]] = {
        "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
        "phimoe": {"sliding_window": 20, "num_local_experts": 4, "num_experts_per_tok": 2},
    }
    save_model(family, tmp_path, **{"num_hidden_layers": 2, **extra.get(family, {})})
    with pytest.raises(ConfigError, match=why):
        load(tmp_path)

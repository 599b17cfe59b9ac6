"""Every architecture answers as `transformers` itself does: the real scheduler and pool, chunked and staggered."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from common.attention.base import BACKENDS
from common.attention.native import NativeAttention
from common.config import ModelConfig
from common.errors import ConfigError
from common.kv_cache.tensor_pool import open_host_tier
from common.model import loader
from common.model.loader import LoadedModel
from common.model.transformers_runner import TransformersRunner, pick_backend, settle_row_floor
from tests.contract.model_oracle import (
    BLOCK_SIZE,
    FAST_FAMILIES,
    SEEDS,
    assert_choices_share_blocks_and_are_right,
    assert_rows_keep_their_bits,
    oracle,
    serve,
)
from tests.tiny_models import CONFIGS, save_model

FAMILIES = [pytest.param(name, marks=() if name in FAST_FAMILIES else pytest.mark.slow) for name in CONFIGS]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda family: save_model(family, tmp_path_factory.mktemp(family), seed=SEEDS.get(family, 0)))


def load(folder: Path, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return loader.load(folder, dtype=dtype, block_size=BLOCK_SIZE, quantization="none")


def make_runner(
    loaded: LoadedModel, attention: str = "auto", *, num_blocks: int = 128, num_host_blocks: int = 0
) -> TransformersRunner:
    if attention == "native" and (reason := NativeAttention.available()):
        pytest.skip(reason)
    backend = pick_backend(attention, loaded, num_threads=1)  # a model that native cannot run is a failure
    floor = settle_row_floor(loaded, ModelConfig(model="tiny", threads=1, quantization="none"))
    pool = torch.full((num_blocks, loaded.layout.block_elements), float("nan"), dtype=torch.float32)
    pool = pool.to(getattr(torch, loaded.layout.dtype))
    host = open_host_tier(loaded.layout, num_host_blocks * loaded.layout.block_bytes, torch.device("cpu"))
    return TransformersRunner(loaded, backend, pool, row_floor=floor, host=host)


@pytest.mark.parametrize("attention", sorted(BACKENDS.keys() - {"triton"}))  # it has its own, in tests/gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_equal_those_of_transformers(family: str, attention: str, folder_of: Callable[[str], Path]) -> None:
    answers = serve(make_runner(load(folder_of(family)), attention))
    assert answers == [answer.tokens for answer in oracle(folder_of(family))]


def test_several_answers_share_blocks(folder_of: Callable[[str], Path]) -> None:
    assert_choices_share_blocks_and_are_right(make_runner(load(folder_of("llama"))))


def test_answers_survive_a_pool_that_forces_preemption(folder_of: Callable[[str], Path]) -> None:
    runner = make_runner(load(folder_of("qwen3")), num_blocks=16)
    assert serve(runner, num_blocks=16) == [answer.tokens for answer in oracle(folder_of("qwen3"))]


def test_answers_are_the_same_from_blocks_that_were_in_host_memory(folder_of: Callable[[str], Path]) -> None:
    runner = make_runner(load(folder_of("qwen3")), num_blocks=16, num_host_blocks=64)
    assert serve(runner, num_blocks=16) == [answer.tokens for answer in oracle(folder_of("qwen3"))]


@pytest.mark.parametrize(
    ("family", "fault"), [("mistral", {"window": None}), ("gemma2", {"softcap": 0.0}), ("llama", {"scale": 0.3})]
)
def test_an_attention_parameter_left_out_is_seen(
    family: str, fault: dict[str, Any], folder_of: Callable[[str], Path]
) -> None:
    loaded = load(folder_of(family))
    broken = replace(loaded, layers=tuple(replace(layer, **fault) for layer in loaded.layers))
    assert serve(make_runner(broken)) != [answer.tokens for answer in oracle(folder_of(family))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_have_the_same_bits_alone_batched_and_chunked(
    family: str, dtype: torch.dtype, folder_of: Callable[[str], Path]
) -> None:
    runner = make_runner(load(folder_of(family), dtype))
    assert_rows_keep_their_bits(runner)


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

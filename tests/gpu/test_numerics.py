"""The Triton kernels compiled and run on a GPU, against the reference on the same GPU and against transformers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from common.attention.base import AttentionBatch
from common.attention.reference import ReferenceAttention
from common.attention.triton import TritonAttention
from common.config import EngineConfig, ModelConfig
from common.kv_cache.tensor_pool import open_pool
from common.messages import Incarnation
from common.model import loader
from common.model.runner import load_runner
from common.model.transformers_runner import TransformersRunner, pick_backend
from tests.contract.model_oracle import BLOCK_SIZE, NUM_TOKENS, PROMPTS, serve
from tests.contract.test_attention import SHAPES
from tests.tiny_models import save_model
from tests.unit.common.attention.scene import Scene, Sequence, draw

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
LARGE: dict[str, dict[str, Any]] = {
    "large, bfloat16": {"heads": (32, 8), "dims": (128, 128), "dtype": torch.bfloat16},
    "large, float16": {"heads": (16, 2), "dims": (128, 128), "dtype": torch.float16},
    "latent attention": {"heads": (4, 4), "dims": (192, 128), "dtype": torch.bfloat16},
    "large, float32": {"heads": (8, 2), "dims": (128, 128)},
}
KINDS = {**SHAPES, **LARGE}
LENGTHS = [1, 15, 16, 17, 64, 65, 513, 1500]


class SceneOnGpu(Scene):
    def batch(self, parts: list[tuple[int, int, int]]) -> AttentionBatch:
        batch = super().batch(parts)
        names = ("starts", "context_lens", "block_tables", "row_blocks", "row_offsets")
        return replace(batch, **{name: getattr(batch, name).cuda() for name in names})


def on_gpu(scene: Scene) -> SceneOnGpu:
    layer = replace(scene.layer, sinks=None if scene.layer.sinks is None else scene.layer.sinks.cuda())
    sequences = [Sequence(s.query.cuda(), s.key.cuda(), s.value.cuda(), s.blocks) for s in scene.sequences]
    return SceneOnGpu(layer, scene.block_size, scene.pool.cuda(), sequences)


def whole(scene: Scene) -> list[tuple[int, int, int]]:
    return [(index, 0, sequence.query.shape[0]) for index, sequence in enumerate(scene.sequences)]


@pytest.mark.parametrize("kind", KINDS)
def test_attention_agrees_with_the_reference(kind: str) -> None:
    scene = on_gpu(draw(lengths=LENGTHS, **KINDS[kind]))
    expected = scene.step(ReferenceAttention(), whole(scene))
    stored = scene.pool.clone()
    scene.empty_pool()
    for out, right in zip(scene.step(TritonAttention(), whole(scene), padding_rows=3), [*expected, None], strict=True):
        if right is None:
            assert not out.any()
        else:
            torch.testing.assert_close(out, right, atol=TOLERANCE[out.dtype], rtol=TOLERANCE[out.dtype])
    torch.testing.assert_close(scene.pool, stored, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_alone_batched_and_chunked(kind: str) -> None:
    scene, backend = on_gpu(draw(lengths=[70, 1, 700, 1300], **KINDS[kind])), TritonAttention()
    batched = scene.step(backend, whole(scene))
    for part in whole(scene):
        assert torch.equal(scene.step(backend, [part])[0], batched[part[0]])
    steps = (
        [(2, 100, 333), (0, 69, 70), (3, 1299, 1300)],
        [(2, 699, 700), (3, 1298, 1299), (1, 0, 1)],
        [(3, 511, 530)],
    )
    for parts in steps:
        for (index, first, last), out in zip(parts, scene.step(backend, parts), strict=True):
            assert torch.equal(out, batched[index][first:last]), (index, first, last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_are_copied_bit_for_bit(dtype: torch.dtype) -> None:
    from common.kv_cache.triton_copy import copy_blocks, gather_blocks, scatter_blocks

    bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype]
    start = torch.randint(-(2**15), 2**15, (70, 50_001), dtype=bits, device="cuda")
    pool, expected = start.clone().view(dtype), start.clone()
    sources, targets = torch.arange(0, 20, device="cuda"), torch.arange(40, 60, device="cuda")
    copy_blocks(pool, sources, targets)
    expected[targets] = start[sources]
    assert torch.equal(pool.view(bits), expected)
    blocks = torch.randperm(70, device="cuda")[:33].int()
    staging = torch.empty(33, 50_001, dtype=dtype, device="cuda")
    gather_blocks(pool, blocks, staging)
    assert torch.equal(staging.view(bits), expected[blocks.long()])
    other = torch.zeros_like(pool)
    scatter_blocks(staging, blocks, other)
    assert torch.equal(other.view(bits)[blocks.long()], expected[blocks.long()])


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3"])
def test_a_whole_model_answers_as_transformers_does(family: str, tmp_path: Path) -> None:
    folder = save_model(family, tmp_path, seed=1 if family == "deepseek_v3" else 0)
    cuda = torch.device("cuda")
    loaded = loader.load(folder, dtype=torch.float32, block_size=BLOCK_SIZE, device=cuda, quantization="none")
    backend = pick_backend("auto", loaded, num_threads=1)
    assert backend.name == "triton"
    _, pool = open_pool(loaded.layout, 128, Incarnation("gpu"), cuda)
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval().cuda()
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt], device="cuda")
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None
        )
        expected.append(out[0, len(prompt) :].tolist())
    assert serve(TransformersRunner(loaded, backend, pool, row_floor=0)) == expected


def test_a_node_s_runner_loads_and_answers_on_the_device(tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path)
    config = ModelConfig(model=str(folder), device="cuda", dtype="bfloat16", quantization="none")
    runner, memory = load_runner(config, EngineConfig(kv_cache_memory=64 << 20), Incarnation("gpu"))
    assert memory.fd == -1
    answers = serve(runner, num_blocks=128)
    assert [len(answer) for answer in answers] == [NUM_TOKENS] * len(PROMPTS)

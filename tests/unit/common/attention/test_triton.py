"""The Triton kernels in Triton's interpreter: what the contract's short contexts do not reach."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from common.attention.base import AttentionBatch
from common.attention.triton import TritonAttention
from common.engine.request import Chunk, EngineRequest, Sampling, StepPlan
from common.errors import ConfigError
from common.messages import BlockId, RequestId
from common.model import loader
from common.model.transformers_runner import TransformersRunner, pick_backend
from tests.tiny_models import save_model
from tests.unit.common.attention.interpreter import like_a_gpu
from tests.unit.common.attention.scene import draw, plain_attention

if (reason := TritonAttention.available()) is not None:
    pytest.skip(f"triton attention: {reason}", allow_module_level=True)

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window, softcap, sinks, odd head dims": {
        "window": 41,
        "softcap": 20.0,
        "sinks": True,
        "dims": (20, 12),
        "heads": (3, 1),
    },
    "more heads a group than rows a tile": {"heads": (18, 1), "dtype": torch.bfloat16, "dims": (32, 16)},
    "float16": {"dtype": torch.float16, "heads": (2, 2), "dims": (16, 16)},
}


@pytest.fixture(autouse=True)
def _interpreter() -> Iterator[None]:
    with like_a_gpu():
        yield


@pytest.mark.parametrize("kind", KINDS)
def test_a_context_in_splits_is_exact_and_changes_no_bit_of_a_row(kind: str) -> None:
    scene = draw(lengths=[70, 31, 50], **KINDS[kind])
    backend = TritonAttention(split_tokens=32)
    expected = scene.step(backend, [(i, 0, len(s.key)) for i, s in enumerate(scene.sequences)])
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[expected[0].dtype]
    for out, sequence in zip(expected, scene.sequences, strict=True):
        torch.testing.assert_close(out.double(), plain_attention(scene, sequence), atol=tolerance, rtol=tolerance)
    # One row each through the split kernel, beside each other, beside a chunk, and in fewer rows a tile
    mixed = [(0, 69, 70), (1, 30, 31), (2, 45, 50)]
    for other, parts in (
        (backend, mixed[:2]),
        (backend, mixed),
        (TritonAttention(split_tokens=32, prefill_rows=32), mixed[1:]),
    ):
        for (i, first, last), out in zip(parts, scene.step(other, parts, padding_rows=2), strict=False):
            assert torch.equal(out, expected[i][first:last])


def test_a_split_before_the_window_is_never_read() -> None:
    scene = draw(lengths=[100], window=20)
    backend = TritonAttention(split_tokens=32)
    (expected,) = scene.step(backend, [(0, 0, 100)])
    for block in scene.sequences[0].blocks[:4]:  # positions 0..63; row 99 sees 80..99
        scene.pool[block] = float("nan")
    (last,) = scene.step(backend, [(0, 99, 100)])
    assert torch.equal(last[0], expected[99])


def test_a_step_without_rows_gives_zeros_for_its_padding() -> None:
    scene = draw(lengths=[1])
    none = torch.empty(0, dtype=torch.int32)
    batch = AttentionBatch(
        pool=scene.pool,
        block_size=scene.block_size,
        starts=torch.zeros(1, dtype=torch.int32),
        context_lens=none,
        block_tables=none.view(0, 0),
        row_blocks=none.long(),
        row_offsets=none.long(),
    )
    for num_rows in (0, 3):
        query, key, value = torch.ones(3, num_rows, 6, 64)
        out = TritonAttention().attend(scene.layer, query, key[:, :2], value[:, :2], batch)
        assert torch.equal(out, torch.zeros(num_rows, 6, 64))
    assert scene.pool.isnan().all()


def test_a_whole_model_answers_as_with_the_reference(tmp_path: Path) -> None:
    loaded = loader.load(save_model("gemma2", tmp_path), dtype=torch.float32, block_size=16, quantization="none")
    found = []
    for name in ("reference", "triton"):
        pool = torch.full((4, loaded.layout.block_elements), float("nan"))
        runner = TransformersRunner(loaded, pick_backend(name, loaded, num_threads=1), pool, row_floor=0)
        tokens = list(range(40, 67))
        request = EngineRequest(
            RequestId("0" * 32),
            tokens,
            27,
            Sampling(max_tokens=9, seed=0, temperature=0),
            blocks=[BlockId(2), BlockId(0)],
        )
        found.append(
            [runner.logits(StepPlan((Chunk(request, start, size, True),))) for start, size in ((0, 26), (26, 1))]
        )
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4, atol=1e-4)


def test_the_backend_follows_the_device(tmp_path: Path) -> None:
    loaded = loader.load(save_model("llama", tmp_path), dtype=torch.float32, block_size=16, quantization="none")
    assert pick_backend("auto", loaded, num_threads=1).name in ("native", "reference")
    elsewhere = replace(loaded, module=SimpleNamespace(device=torch.device("cuda")))
    assert pick_backend("auto", elsewhere, num_threads=1).name == "reference"  # the interpreter is no answer there
    with pytest.raises(ConfigError, match="native is not available: it is for the CPU"):
        pick_backend("native", elsewhere, num_threads=1)
    with pytest.raises(ConfigError, match="TRITON_INTERPRET"):
        pick_backend("triton", elsewhere, num_threads=1)


def test_layers_that_cannot_run_are_named() -> None:
    backend, layer = TritonAttention(), draw(lengths=[1]).layer
    assert backend.unsupported(layer, torch.float16, 16) is None
    assert "float64" in (backend.unsupported(layer, torch.float64, 16) or "")
    assert "5 heads" in (backend.unsupported(replace(layer, num_heads=5), torch.float32, 16) or "")
    assert "above 512" in (backend.unsupported(replace(layer, v_head_dim=513), torch.float32, 16) or "")
    assert "3 sinks" in (backend.unsupported(replace(layer, sinks=torch.zeros(3)), torch.float32, 16) or "")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_are_copied_bit_for_bit_and_nothing_else_is(dtype: torch.dtype) -> None:
    from common.kv_cache.triton_copy import copy_blocks, gather_blocks, scatter_blocks

    bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype]
    start = torch.randint(-(2**15), 2**15, (7, 1300), dtype=bits)  # NaNs of every kind among them
    pool, expected = start.clone().view(dtype), start.clone()
    copy_blocks(pool, torch.tensor([2, 5]), torch.tensor([6, 0]))
    expected[6], expected[0] = start[2], start[5]
    assert torch.equal(pool.view(bits), expected)

    staging = torch.zeros(4, 1300, dtype=dtype)
    blocks = torch.tensor([6, 1, 3], dtype=torch.int32)
    gather_blocks(pool, blocks, staging)
    assert torch.equal(staging.view(bits)[:3], expected[[6, 1, 3]])
    assert not staging[3].any()

    other = torch.zeros_like(pool)
    scatter_blocks(staging, blocks, other)
    assert torch.equal(other.view(bits)[[6, 1, 3]], expected[[6, 1, 3]])
    assert not other.view(bits)[[0, 2, 4, 5]].any()
    with pytest.raises(ValueError, match="are no blocks of 1300"):
        gather_blocks(pool, blocks, staging.double())
    copy_blocks(pool, blocks[:0], blocks[:0])


def compiled(tmp_path: Path, capability: int, dtype: str, head_dim: int) -> list[dict[str, Any]]:
    """What `compile_for_gpu` reports. Its own process, for in this one the kernels are the interpreter's."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.common.attention.compile_for_gpu", str(capability), dtype, str(head_dim)],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_every_number_of_rows_takes_the_same_tensor_core_instruction(tmp_path: Path) -> None:
    rows, split, merge = compiled(tmp_path, 90, "bfloat16", 64)
    for kernel in (rows, split):
        assert kernel["mma.sync"] > 0
        assert kernel["wgmma.mma_async"] == 0, "last bits of its own"
        assert kernel["cp.async.c"] > 0, "K and V are not loaded ahead"
    assert [kernel["fma.rn.f32"] for kernel in (rows, split, merge)] == [0, 0, 0], "a product and a sum in one"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_kernels_compile_for_every_gpu_and_fit_its_shared_memory(tmp_path: Path) -> None:
    for capability in (80, 89, 90, 100):
        for dtype in ("float32", "float16", "bfloat16"):
            for head_dim in (64, 128, 256):
                for kernel in compiled(tmp_path, capability, dtype, head_dim):
                    assert kernel["wgmma.mma_async"] == 0
                    assert kernel["shared"] <= 99 << 10, (
                        capability,
                        dtype,
                        head_dim,
                        kernel,
                    )  # the least: capability 8.9

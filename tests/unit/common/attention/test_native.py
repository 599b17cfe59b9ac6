"""The native kernel against attention written out plainly, and against itself: same bits however rows are grouped."""

import ctypes
import dataclasses
import random

import pytest
import torch

from common.attention import native
from common.attention.native import NativeAttention, load_library
from common.native.build import library
from tests.unit.common.attention.scene import Scene, draw, plain_attention

BF16 = torch.bfloat16
KINDS: dict[str, dict] = {
    "plain": {},
    "one head per kv head": {"heads": (3, 3)},
    "seven heads per kv head": {"heads": (7, 1)},
    "window": {"window": 37},
    "window of one": {"window": 1},
    "window beyond a tile": {"window": 100, "heads": (4, 1)},
    "softcap": {"softcap": 5.0, "magnitude": 4.0},
    "sinks": {"sinks": True},
    "sinks, window and softcap": {"sinks": True, "window": 70, "softcap": 20.0},
    "head dims 80 and 96": {"dims": (80, 96)},
    "head dims 128 and 256": {"dims": (128, 256), "heads": (2, 1)},
    "latent attention": {"dims": (192, 128), "heads": (2, 2)},
    "odd head dims": {"dims": (21, 13), "heads": (4, 2)},
    "blocks of 1": {"block_size": 1, "dims": (8, 8)},
    "blocks of 7": {"block_size": 7, "dims": (16, 24)},
    "blocks of 256": {"block_size": 256},
    "bf16 KV": {"kv_dtype": BF16},
    "bf16": {"dtype": BF16},
    "bf16, odd head dims": {"dtype": BF16, "dims": (36, 20)},
    "bf16 rows, fp32 KV": {"dtype": BF16, "kv_dtype": torch.float32},
}


@pytest.fixture(scope="module")
def backend() -> NativeAttention:
    reason = NativeAttention.available()
    if reason is not None:
        pytest.skip(f"native attention: {reason}")
    return NativeAttention()


def whole(scene: Scene, backend: NativeAttention) -> list[torch.Tensor]:
    """Every sequence in one step, each as a single chunk."""
    scene.empty_pool()
    return scene.step(backend, [(i, 0, len(s.key)) for i, s in enumerate(scene.sequences)])


@pytest.mark.parametrize("kind", KINDS)
def test_every_row_agrees_with_attention_in_double_precision(backend: NativeAttention, kind: str) -> None:
    scene = draw(lengths=[1, 15, 64, 65, 200], **KINDS[kind])
    tolerance = 1e-5 if scene.sequences[0].query.dtype is torch.float32 else 2**-8
    for sequence, out in zip(scene.sequences, whole(scene, backend), strict=True):
        torch.testing.assert_close(out.double(), plain_attention(scene, sequence), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_decoded_alone_as_in_a_prefill(backend: NativeAttention, kind: str) -> None:
    scene = draw(lengths=[131, 66], **KINDS[kind])
    together = whole(scene, backend)
    scene.empty_pool()
    for i, sequence in enumerate(scene.sequences):
        for position in range(len(sequence.key)):
            (alone,) = scene.step(backend, [(i, position, position + 1)])
            assert torch.equal(alone[0], together[i][position]), position


@pytest.mark.parametrize("seed", range(12))
def test_chunks_batches_and_threads_change_no_bit(backend: NativeAttention, seed: int) -> None:
    drawn = random.Random(seed)
    kind = KINDS[drawn.choice(list(KINDS))]
    scene = draw(seed=seed, lengths=[drawn.randint(1, 260) for _ in range(drawn.randint(1, 5))], **kind)
    expected = whole(scene, backend)
    scene.empty_pool()
    threaded = NativeAttention(num_threads=drawn.randint(2, 4))
    done = [0] * len(expected)
    while unfinished := [i for i, sequence in enumerate(scene.sequences) if done[i] < len(sequence.key)]:
        parts = []
        for i in drawn.sample(unfinished, drawn.randint(1, len(unfinished))):
            left = len(scene.sequences[i].key) - done[i]
            parts.append((i, done[i], done[i] + min(left, drawn.choice([1, 1, 2, 5, 16, 33, 100]))))
        outs = scene.step(drawn.choice([backend, threaded]), parts)
        for (i, first, last), out in zip(parts, outs, strict=True):
            assert torch.equal(out, expected[i][first:last]), (kind, i, first, last)
            done[i] = last


def test_long_prefills_split_into_many_items_change_no_bit(backend: NativeAttention) -> None:
    scene = draw(lengths=[700], heads=(9, 3))  # several runs of tokens for each kv head
    (expected,) = whole(scene, backend)
    threaded = NativeAttention(num_threads=3)
    for _ in range(5):
        assert torch.equal(whole(scene, threaded)[0], expected)
    assert torch.equal(expected[:1], scene.step(backend, [(0, 0, 1)])[0])


def test_keys_and_values_land_where_the_batch_says_and_nowhere_else(backend: NativeAttention) -> None:
    for kv_dtype in (torch.float32, BF16):
        scene = draw(lengths=[35, 3], kv_dtype=kv_dtype)
        layer, size = scene.layer, scene.block_size
        whole(scene, backend)
        expected = torch.full_like(scene.pool, float("nan"))
        for sequence in scene.sequences:
            for position in range(len(sequence.key)):
                row = expected[sequence.blocks[position // size]]
                for head in range(layer.num_kv_heads):
                    at = head * size + position % size
                    for offset, rows in ((layer.k_offset, sequence.key), (layer.v_offset, sequence.value)):
                        row[offset + at * 64 : offset + (at + 1) * 64] = rows[position, head]
        assert torch.equal(scene.pool.isnan(), expected.isnan())
        assert torch.equal(scene.pool.nan_to_num(), expected.nan_to_num())


def test_padding_rows_come_out_zero_and_are_stored_nowhere(backend: NativeAttention) -> None:
    scene = draw(lengths=[20])
    plain = whole(scene, backend)[0]
    stored = scene.pool.clone()
    scene.empty_pool()
    out, padding = scene.step(backend, [(0, 0, 20)], padding_rows=12)
    assert torch.equal(out, plain)
    assert torch.equal(padding, torch.zeros_like(padding))
    assert torch.equal(scene.pool.nan_to_num(), stored.nan_to_num())


def test_what_a_row_may_not_see_does_not_reach_it_even_as_nan(backend: NativeAttention) -> None:
    scene = draw(lengths=[90, 40], sinks=True)
    expected = whole(scene, backend)
    scene.sequences[0].value[50:] = float("nan")
    scene.sequences[0].key[50:] = float("inf")
    spoiled = whole(scene, backend)
    assert torch.equal(spoiled[0][:50], expected[0][:50])
    assert torch.equal(spoiled[1], expected[1])
    assert spoiled[0][50:].isnan().all(), "what a row does see must show"


def test_blocks_before_the_window_are_never_read(backend: NativeAttention) -> None:
    scene = draw(lengths=[150], window=20)
    (expected,) = whole(scene, backend)
    for block in scene.sequences[0].blocks[:8]:  # positions 0..127; row 149 sees 130..149
        scene.pool[block] = float("nan")
    scene.sequences[0].blocks[:8] = [10**9] * 8
    (last,) = scene.step(backend, [(0, 149, 150)])
    assert torch.equal(last[0], expected[149])


def test_rows_may_be_strided_views(backend: NativeAttention) -> None:
    scene = draw(lengths=[33])
    (expected,) = whole(scene, backend)
    sequence = scene.sequences[0]
    batch = scene.batch([(0, 0, 33)])
    by_head = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (sequence.query, sequence.key, sequence.value)]
    assert torch.equal(backend.attend(scene.layer, *by_head, batch), expected)
    by_element = [x.permute(2, 0, 1).contiguous().permute(1, 2, 0) for x in by_head]
    assert torch.equal(backend.attend(scene.layer, *by_element, batch), expected)


def test_one_batch_serves_several_layers_and_types(backend: NativeAttention) -> None:
    scenes = [draw(seed=1, lengths=[30]), draw(seed=2, lengths=[30], kv_dtype=BF16), draw(seed=3, lengths=[50])]
    expected = [whole(scene, NativeAttention())[0] for scene in scenes]
    for _ in range(2):
        for scene, out in zip(scenes, expected, strict=True):
            assert torch.equal(whole(scene, backend)[0], out)


def test_a_batch_that_does_not_fit_the_kernel_is_refused(backend: NativeAttention) -> None:
    scene = draw(lengths=[5])
    sequence, batch = scene.sequences[0], scene.batch([(0, 0, 5)])
    wrong = dataclasses.replace(batch, starts=batch.starts.long())
    with pytest.raises(ValueError, match="contiguous"):
        backend.attend(scene.layer, sequence.query, sequence.key, sequence.value, wrong)


def test_layers_that_cannot_run_are_named(backend: NativeAttention) -> None:
    layer = draw(lengths=[1]).layer
    assert backend.unsupported(layer, torch.float32, 16) is None
    assert backend.unsupported(layer, BF16, 1) is None
    assert "float16" in (backend.unsupported(layer, torch.float16, 16) or "")
    uneven = dataclasses.replace(layer, num_heads=5)
    assert "5 heads" in (backend.unsupported(uneven, torch.float32, 16) or "")
    few_sinks = dataclasses.replace(layer, sinks=torch.zeros(3))
    assert "3 sinks" in (backend.unsupported(few_sinks, torch.float32, 16) or "")


def test_the_kernel_s_exponential_is_within_its_documented_error(backend: NativeAttention) -> None:
    kernel = load_library(library(native._SOURCE))
    x = torch.cat([torch.linspace(-125, 0, 200_001), torch.linspace(-1, 0, 100_001)])
    y = x.clone()
    kernel.baton_exp2(ctypes.c_void_p(y.data_ptr()), ctypes.c_int64(y.numel()))
    exact = torch.exp2(x.double())
    assert ((y.double() - exact) / exact).abs().max() < 1.2e-7
    edges = torch.tensor([0.0, -0.0, -125.01, -1e30, -float("inf"), float("nan")])
    kernel.baton_exp2(ctypes.c_void_p(edges.data_ptr()), ctypes.c_int64(6))
    assert edges[:5].tolist() == [1, 1, 0, 0, 0]
    assert edges[5].isnan()


def test_the_kernel_s_tanh_is_within_its_documented_error(backend: NativeAttention) -> None:
    kernel = load_library(library(native._SOURCE))
    x = torch.cat([torch.linspace(-20, 20, 200_001), torch.logspace(-30, 0, 1001), torch.tensor([100.0, -100.0])])
    y = x.clone()
    kernel.baton_tanh(ctypes.c_void_p(y.data_ptr()), ctypes.c_int64(y.numel()))
    exact = torch.tanh(x.double())
    assert ((y.double() - exact).abs() <= 2e-7 * exact.abs()).all()


@pytest.mark.slow
def test_every_vector_width_computes_the_same_bits(backend: NativeAttention) -> None:
    """What AVX512 and NEON would compute: their code with this machine's instructions."""
    for kind in ("plain", "seven heads per kv head", "softcap", "odd head dims", "bf16"):
        scene = draw(lengths=[1, 70, 200], **KINDS[kind])
        expected = whole(scene, backend)
        for width in (4, 16):
            other = NativeAttention()
            flags = (f"-DBATON_WIDTH={width}", "-O1", "-Wno-psabi")
            other._attend = load_library(library(native._SOURCE, extra_flags=flags)).baton_attend
            assert all(torch.equal(a, b) for a, b in zip(whole(scene, other), expected, strict=True)), (kind, width)

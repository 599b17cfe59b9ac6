"""The contract of `common.attention.base`, over every backend in the registry."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from common.attention.base import BACKENDS, AttentionBackend
from common.registry import load
from tests.unit.common.attention.interpreter import like_a_gpu
from tests.unit.common.attention.scene import Scene, draw, plain_attention

SHAPES: dict[str, dict[str, Any]] = {
    "grouped heads": {},
    "one head each": {"heads": (4, 4), "dims": (32, 32)},
    "one key head": {"heads": (5, 1), "dims": (80, 80)},
    "keys wider than values": {"heads": (4, 2), "dims": (24, 16)},
    "odd dimensions": {"heads": (3, 1), "dims": (20, 12)},
    "wide heads": {"heads": (2, 1), "dims": (256, 256)},
    "window": {"window": 20},
    "window of one": {"window": 1},
    "softcap": {"softcap": 30.0, "magnitude": 8.0},
    "sinks": {"sinks": True},
    "window, softcap and sinks": {"window": 17, "softcap": 20.0, "sinks": True},
    "large scores": {"magnitude": 12.0},
    "blocks of five": {"block_size": 5},
    "bfloat16": {"dtype": torch.bfloat16},
    "bfloat16 pool": {"kv_dtype": torch.bfloat16},
}
# Triton's interpreter takes a second where the others take milliseconds
INTERPRETED = ("odd dimensions", "window, softcap and sinks", "blocks of five", "bfloat16 pool")
CASES = [(name, shape) for name in sorted(BACKENDS) for shape in (INTERPRETED if name == "triton" else SHAPES)]
LENGTHS = [1, 15, 16, 17, 31, 32, 33, 48, 100]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def make(name: str, *, num_threads: int = 1) -> AttentionBackend:
    """The backend, or a skip that names it and why it cannot run here."""
    cls = load(BACKENDS, name, kind="attention backend")
    reason = cls.available()
    if reason is not None:
        pytest.skip(f"attention backend {name}: {reason}")
    backend: AttentionBackend = cls(num_threads=num_threads)
    return backend


@pytest.fixture(autouse=True)
def _interpreter() -> Iterator[None]:
    with like_a_gpu():
        yield


@pytest.fixture(params=sorted(BACKENDS))
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    return make(request.param)


def supported(backend: AttentionBackend, scene: Scene) -> Scene:
    reason = backend.unsupported(scene.layer, scene.pool.dtype, scene.block_size)
    if reason is not None:
        pytest.skip(f"attention backend {backend.name}: {reason}")
    return scene


def whole(scene: Scene) -> list[tuple[int, int, int]]:
    return [(index, 0, sequence.query.shape[0]) for index, sequence in enumerate(scene.sequences)]


@pytest.mark.parametrize(("backend", "shape"), CASES, indirect=["backend"])
def test_attention_is_the_softmax_over_each_rows_own_context(backend: AttentionBackend, shape: str) -> None:
    scene = supported(backend, draw(lengths=LENGTHS, **SHAPES[shape]))
    for out, sequence in zip(scene.step(backend, whole(scene)), scene.sequences, strict=True):
        torch.testing.assert_close(
            out.double(), plain_attention(scene, sequence), atol=TOLERANCE[out.dtype], rtol=TOLERANCE[out.dtype]
        )


@pytest.mark.parametrize(("backend", "shape"), CASES, indirect=["backend"])
def test_a_row_has_the_same_bits_alone_batched_and_chunked(backend: AttentionBackend, shape: str) -> None:
    scene = supported(backend, draw(lengths=[33, 1, 70, 16], **SHAPES[shape]))
    batched = scene.step(backend, whole(scene))
    scene.empty_pool()
    alone = [scene.step(backend, [part])[0] for part in reversed(whole(scene))][::-1]
    scene.empty_pool()
    # Chunks that start and end inside blocks, staggered, then single rows: as a busy engine cuts them
    chunked: list[list[torch.Tensor]] = [[] for _ in scene.sequences]
    steps = (
        [(0, 0, 7), (2, 0, 16)],
        [(0, 7, 32), (2, 16, 19), (1, 0, 1)],
        [(3, 0, 15), (2, 19, 69), (0, 32, 33)],
        [(2, 69, 70), (3, 15, 16)],
    )
    for parts in steps:
        for (index, _, _), out in zip(parts, scene.step(backend, parts, padding_rows=3), strict=False):
            chunked[index].append(out)
    for index, out in enumerate(batched):
        assert torch.equal(out, alone[index])
        assert torch.equal(out, torch.cat(chunked[index]))


@pytest.mark.parametrize("name", ["native", "reference"])
def test_threads_change_no_bits(name: str) -> None:
    scene = supported(make(name), draw(lengths=[300, 5, 64]))
    expected = scene.step(make(name), whole(scene))
    for got, one in zip(scene.step(make(name, num_threads=2), whole(scene)), expected, strict=True):
        assert torch.equal(got, one)


def test_keys_and_values_land_in_their_slots_and_nowhere_else(backend: AttentionBackend) -> None:
    scene = supported(backend, draw(lengths=[20, 3]))
    scene.step(backend, [(0, 0, 20), (1, 0, 3)], padding_rows=5)
    layer, size, expected = scene.layer, scene.block_size, torch.full_like(scene.pool, float("nan"))
    for sequence in scene.sequences:
        for position in range(sequence.key.shape[0]):
            block = expected[sequence.blocks[position // size]]
            for rows, offset in ((sequence.key, layer.k_offset), (sequence.value, layer.v_offset)):
                heads, dim = rows.shape[1:]
                slot = block[offset : offset + heads * size * dim].view(heads, size, dim)[:, position % size]
                slot.copy_(rows[position])
    torch.testing.assert_close(scene.pool, expected, rtol=0, atol=0, equal_nan=True)


def test_padding_rows_come_out_zero(backend: AttentionBackend) -> None:
    scene = supported(backend, draw(lengths=[9]))
    *_, padding = scene.step(backend, [(0, 0, 9)], padding_rows=7)
    assert torch.equal(padding, torch.zeros_like(padding))


def test_what_others_left_behind_the_context_is_never_read(backend: AttentionBackend) -> None:
    scene = supported(backend, draw(lengths=[19]))
    clean = scene.step(backend, whole(scene))[0]
    scene.pool.fill_(1e30)
    assert torch.equal(scene.step(backend, whole(scene))[0], clean)


def test_a_dtype_that_is_no_float_is_unsupported(backend: AttentionBackend) -> None:
    layer = replace(draw(lengths=[1]).layer, window=4)
    assert backend.unsupported(layer, torch.int32, 16)

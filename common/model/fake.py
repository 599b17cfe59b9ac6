"""A model without weights whose every answer proves that its KV blocks are right. No torch.

Computing a token writes its id, its position and its layer into its slot of the pool. Drawing reads the
whole context *back* through the block table, hashes it in order and takes the token from the hash. So a
wrong block, a wrong order, a block overwritten too early or pulled too late gives a wrong token, and
`fake_oracle`, which has no pool, says what the right ones are.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from common.engine.request import EngineRequest, StepPlan
from common.errors import ConfigError
from common.kv_cache.host_tier import copy_rows
from common.kv_cache.memory import PoolMemory
from common.messages import BlockId, KVLayout, LayerKV, RequestId, Sampling

VOCAB_SIZE = 32_000
_WORDS = 4  # per token and layer: id and position in K, a mix of the three and the layer in V
_MASK = (1 << 64) - 1

Words = npt.NDArray[np.uint64]
T = TypeVar("T", int, npt.NDArray[np.int64])


def fake_layout(*, num_layers: int = 1, block_size: int = 16) -> KVLayout:
    """The smallest layout that the fake model can write into: 16 bytes a token and layer."""
    return KVLayout(block_size, "float32", 4, tuple(LayerKV(1, 2, 2) for _ in range(num_layers)))


class FakeRunner:
    """A `model.base.Runner` over any layout of 4-byte elements and at least two of them per head.

    `before_step` sees every plan first: it may advance a clock, take notes, or raise to make the step fail.
    """

    def __init__(
        self,
        memory: PoolMemory,
        *,
        max_model_len: int = 2048,
        vocab_size: int = VOCAB_SIZE,
        model_digest: str = "fake",
        num_host_blocks: int = 0,
        quantization: str = "none",
        before_step: Callable[[StepPlan], None] | None = None,
    ) -> None:
        layout = memory.layout
        if layout.itemsize != 4 or any(min(layer.k_head_dim, layer.v_head_dim) < 2 for layer in layout.layers):
            raise ConfigError("the fake model needs a layout with 4-byte elements and head dimensions of at least 2")
        self.layout = layout
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.model_digest = model_digest
        self.quantization = quantization
        self._before_step = before_step
        self._block_size = layout.block_size
        self._weights = _weights(max_model_len, len(layout.layers))
        self._slots = _slots(memory)
        self.num_host_blocks = num_host_blocks
        self.logprobs: dict[RequestId, list[float]] = {}
        self._blocks = memory.blocks
        self._host = np.full((num_host_blocks, layout.block_bytes), 0x5A, np.uint8)

    def rest(self) -> None:
        """See `Runner.rest`: its cores are nobody's business."""

    def execute(self, plan: StepPlan) -> list[int]:
        if self._before_step is not None:
            self._before_step(plan)
        for chunk in plan.chunks:
            self._write(chunk.request, chunk.start, chunk.num_tokens)
        self.logprobs = {}
        return [
            token
            for chunk in plan.chunks
            if chunk.samples
            for token in self._draw(chunk.request, chunk.start + chunk.num_tokens)
        ]

    def copy_blocks(self, copies: Sequence[tuple[BlockId, BlockId]]) -> None:
        copy_rows(self._blocks, self._host, copies)

    def _write(self, request: EngineRequest, start: int, num_tokens: int) -> None:
        if num_tokens == 1:  # the hot case: plain numbers are several times faster than arrays of one
            block, offset = request.blocks[start // self._block_size], start % self._block_size
            for layer, (keys, values) in enumerate(self._slots):
                keys[block, offset] = request.tokens[start], start
                values[block, offset] = _mix(request.tokens[start], start, layer), layer + 1
            return
        positions = np.arange(start, start + num_tokens)
        blocks = np.array(request.blocks)[positions // self._block_size]
        offsets = positions % self._block_size
        tokens = np.array(request.tokens[start : start + num_tokens])
        for layer, (keys, values) in enumerate(self._slots):
            words = _words(tokens, positions, layer)
            keys[blocks, offsets] = words[:, :2]
            values[blocks, offsets] = words[:, 2:]

    def _draw(self, request: EngineRequest, num_tokens: int) -> list[int]:
        table = np.array(request.blocks[: -(-num_tokens // self._block_size)])
        context = 0
        for slots, weights in zip(self._slots, self._weights, strict=True):
            for half, slot in enumerate(slots):
                read = slot[table].reshape(-1, 2)[:num_tokens]
                context += int((read * weights[half, :num_tokens]).sum())
        tokens = [
            _drawn(context, sampling, num_tokens, self.vocab_size) for sampling in (request.sampling, *request.also)
        ]
        if request.sampling.scored:
            self.logprobs[request.id] = [fake_logprob(token, num_tokens) for token in tokens]
        return tokens


def fake_logprob(token: int, position: int) -> float:
    """What the fake model says it gave a token; it gives all the same, so this stands for nothing."""
    return -float(_mixed((token << 20) + position) % 1000) / 100


def fake_oracle(
    tokens: Sequence[int],
    num_new: int,
    sampling: Sampling,
    *,
    vocab_size: int = VOCAB_SIZE,
    num_layers: int = 1,
    max_model_len: int = 2048,
) -> list[int]:
    """The next `num_new` tokens after `tokens`; fewer if a stop token, which is the last then, comes first."""
    weights = _weights(max_model_len, num_layers)
    known, new = list(tokens), list[int]()
    context = _context(np.array(known), 0, weights)
    while len(new) < num_new:
        token = _drawn(context, sampling, len(known), vocab_size)
        new.append(token)
        known.append(token)
        if token in sampling.stop_token_ids or len(known) >= max_model_len:
            break
        context += _context(np.array([token]), len(known) - 1, weights)
    return new


def _slots(memory: PoolMemory) -> list[tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]]:
    """By layer, the first two elements of the first head's K and V: [num_blocks, block_size, 2], in the pool itself."""
    layout = memory.layout
    pool = memory.blocks.view(np.uint32)
    slots, offset = [], 0
    for layer in layout.layers:
        views = []
        for head_dim in (layer.k_head_dim, layer.v_head_dim):
            head = pool[:, offset : offset + layout.block_size * head_dim]
            views.append(head.reshape(-1, layout.block_size, head_dim)[:, :, :2])
            assert np.shares_memory(views[-1], pool)
            offset += layout.block_size * layer.num_kv_heads * head_dim
        slots.append((views[0], views[1]))
    return slots


def _words(tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], layer: int) -> npt.NDArray[np.uint32]:
    """What a layer keeps of tokens: [num_tokens, 4]."""
    words = np.empty((len(tokens), _WORDS), np.uint32)
    words[:, 0] = tokens
    words[:, 1] = positions
    words[:, 2] = _mix(tokens, positions, layer)
    words[:, 3] = layer + 1
    return words


def _mix(token: T, position: T, layer: int) -> T:
    return (token * 2_654_435_761 + position * 40_503 + layer) & 0xFFFFFFFF


@lru_cache
def _weights(max_model_len: int, num_layers: int) -> Words:
    """A fixed odd multiplier for each word of the context: [num_layers, 2 (K, V), max_model_len, 2]."""
    word = np.arange(1, max_model_len * num_layers * _WORDS + 1, dtype=np.uint64)
    word *= np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    # Positions first: a word's multiplier does not depend on `max_model_len`.
    return (word | np.uint64(1)).reshape(max_model_len, num_layers, 2, 2).transpose(1, 2, 0, 3).copy()


def _context(tokens: npt.NDArray[np.int64], start: int, weights: Words) -> int:
    """The part of the context's hash that tokens at positions `start ...` add."""
    positions = np.arange(start, start + len(tokens))
    context = 0
    for layer, (of_keys, of_values) in enumerate(weights[:, :, start : start + len(tokens)]):
        words = _words(tokens, positions, layer)
        context += int((words[:, :2] * of_keys).sum()) + int((words[:, 2:] * of_values).sum())
    return context


def _drawn(context: int, sampling: Sampling, position: int, vocab_size: int) -> int:
    """A greedy draw depends on the context alone, any other on seed and position as well."""
    state = context & _MASK
    if sampling.temperature > 0:
        state ^= _mixed((sampling.seed << 20) + position)
    return _mixed(state) % vocab_size


def _mixed(word: int) -> int:
    """splitmix64's finaliser (Steele, Lea, Flood 2014), as in `_weights`."""
    word = (word + 0x9E3779B97F4A7C15) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)

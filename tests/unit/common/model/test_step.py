"""A plan as tensors: where tokens, blocks and logits lie, with and without padding."""

import pytest
import torch

from common.engine.request import Chunk, EngineRequest
from common.errors import InternalError
from common.messages import BlockId, RequestId, Sampling
from common.model.step_tensors import step_tensors

POOL = torch.zeros(32, 8)


def chunk(tokens: list[int], blocks: list[int], start: int, num_tokens: int, *, samples: bool = True) -> Chunk:
    request = EngineRequest(
        RequestId("0" * 32), tokens, len(tokens), Sampling(max_tokens=1, seed=0), blocks=[BlockId(b) for b in blocks]
    )
    return Chunk(request, start, num_tokens, samples)


def test_chunks_lie_one_after_the_other() -> None:
    first = chunk(list(range(100, 110)), [7, 3, 9, 1], 3, 4, samples=False)  # rows 3..6 of ten, three blocks later
    second = chunk(list(range(200, 206)), [5, 2], 5, 1)
    third = chunk([50, 51], [8], 0, 2)
    step = step_tensors((first, second, third), POOL, 4, row_floor=0)
    assert step.ids.tolist() == [[103, 104, 105, 106, 205, 50, 51]]
    assert step.positions.tolist() == [[3, 4, 5, 6, 5, 0, 1]]
    assert (step.logit_rows.tolist(), step.num_sampling) == ([4, 6], 2)
    batch = step.batch
    assert batch.starts.tolist() == [0, 4, 5, 7]
    assert batch.context_lens.tolist() == [7, 6, 2]
    assert [batch.block_tables[s].tolist() for s in range(3)] == [[7, 3], [5, 2], [8, 0]]
    assert batch.row_blocks.tolist() == [7, 3, 3, 3, 2, 8, 8]
    assert batch.row_offsets.tolist() == [3, 0, 1, 2, 1, 0, 1]
    assert (batch.starts.dtype, batch.context_lens.dtype, batch.block_tables.dtype) == (torch.int32,) * 3
    assert batch.num_seqs == 3


def test_padding_comes_last_and_belongs_to_nobody() -> None:
    step = step_tensors(
        (chunk([9, 8, 7], [1], 0, 3), chunk([6], [2], 0, 1), chunk([5], [3], 0, 1)), POOL, 4, row_floor=4
    )
    assert step.ids.tolist() == [[9, 8, 7, 6, 5, 0, 0, 0]]
    assert step.positions.tolist() == [[0, 1, 2, 0, 0, 0, 0, 0]]
    assert step.batch.starts.tolist() == [0, 3, 4, 5]
    assert step.batch.row_blocks.shape == step.batch.row_offsets.shape == (5,)
    assert (step.logit_rows.tolist(), step.num_sampling) == ([2, 3, 4, 4], 3)


def test_a_step_that_samples_nothing_needs_no_logits() -> None:
    step = step_tensors((chunk([1, 2, 3], [0], 0, 2, samples=False),), POOL, 4, row_floor=4)
    assert (step.logit_rows.shape, step.num_sampling) == ((0,), 0)


def test_an_attention_layer_outside_a_step_is_our_bug() -> None:
    from transformers import AttentionInterface

    from common.attention.hook import ATTENTION

    attention = AttentionInterface()[ATTENTION]
    states = torch.zeros(1, 1, 1, 1)
    with pytest.raises(InternalError, match="outside a step"):
        attention(torch.nn.Module(), states, states, states)

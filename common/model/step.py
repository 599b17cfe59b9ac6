"""A step's plan as the tensors of one flattened batch: the chunks' tokens one after the other, then padding."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from common.attention.base import AttentionBatch
from common.engine.request import Chunk
from common.model.rows import padded


@dataclass(frozen=True, slots=True)
class StepTensors:
    """Inputs of one forward pass. Padding rows are token 0 at position 0 and belong to no sequence."""

    ids: torch.Tensor  # int64 [1, rows]
    positions: torch.Tensor  # int64 [1, rows]
    logit_rows: torch.Tensor  # int64: rows whose logits are needed, the last one repeated as padding
    num_sampling: int
    batch: AttentionBatch


def step_tensors(chunks: Sequence[Chunk], pool: torch.Tensor, block_size: int, *, row_floor: int) -> StepTensors:
    """Lay out `chunks`; all tensors on the pool's device. Cost: microseconds a sequence."""
    num_rows = sum(chunk.num_tokens for chunk in chunks)
    ids = np.zeros(padded(num_rows, row_floor), np.int64)
    positions = np.zeros_like(ids)
    row_blocks = np.empty(num_rows, np.int64)
    starts, context_lens, sampling = [0], [], []
    max_context = max(chunk.start + chunk.num_tokens for chunk in chunks)
    tables = np.zeros((len(chunks), -(-max_context // block_size)), np.int32)
    for seq, chunk in enumerate(chunks):
        row, end = starts[-1], chunk.start + chunk.num_tokens
        num_blocks = -(-end // block_size)
        tables[seq, :num_blocks] = chunk.request.blocks[:num_blocks]
        if chunk.num_tokens == 1:
            ids[row], positions[row] = chunk.request.tokens[chunk.start], chunk.start
            row_blocks[row] = chunk.request.blocks[num_blocks - 1]
        else:
            rows = slice(row, row + chunk.num_tokens)
            ids[rows] = chunk.request.tokens[chunk.start : end]
            positions[rows] = np.arange(chunk.start, end)
            row_blocks[rows] = tables[seq, positions[rows] // block_size]
        starts.append(row + chunk.num_tokens)
        context_lens.append(end)
        if chunk.samples:
            sampling.append(starts[-1] - 1)
    logit_rows = sampling + sampling[-1:] * (padded(len(sampling), row_floor) - len(sampling))

    def tensor(values: "np.ndarray | list[int]", dtype: type[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values, dtype)).to(pool.device)

    return StepTensors(
        ids=tensor(ids, np.int64)[None],
        positions=tensor(positions, np.int64)[None],
        logit_rows=tensor(logit_rows, np.int64),
        num_sampling=len(sampling),
        batch=AttentionBatch(
            pool=pool,
            block_size=block_size,
            starts=tensor(starts, np.int32),
            context_lens=tensor(context_lens, np.int32),
            block_tables=tensor(tables, np.int32),
            row_blocks=tensor(row_blocks, np.int64),
            row_offsets=tensor(positions[:num_rows] % block_size, np.int64),
        ),
    )

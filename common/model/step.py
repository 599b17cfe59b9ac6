"""A step's plan as the arrays of one flattened batch: the chunks' tokens one after the other."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from common.engine.request import Chunk

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepArrays:
    """Inputs of one forward pass; see `attention.base.AttentionBatch` for what the last five say."""

    ids: Int64s  # [rows]
    positions: Int64s  # [rows]
    logit_rows: Int64s  # rows whose logits are needed, ascending
    starts: Int32s  # [num_seqs + 1]
    context_lens: Int32s  # [num_seqs]
    block_tables: Int32s  # [num_seqs, max_blocks]
    row_blocks: Int64s  # [rows]
    row_offsets: Int64s  # [rows]


def step_arrays(chunks: Sequence[Chunk], block_size: int) -> StepArrays:
    """Lay out `chunks`. Cost: microseconds a sequence."""
    num_rows = sum(chunk.num_tokens for chunk in chunks)
    ids, positions, row_blocks = np.empty((3, num_rows), np.int64)
    starts, context_lens, logit_rows = [0], [], []
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
            logit_rows.append(starts[-1] - 1)
    return StepArrays(
        ids=ids,
        positions=positions,
        logit_rows=np.asarray(logit_rows, np.int64),
        starts=np.asarray(starts, np.int32),
        context_lens=np.asarray(context_lens, np.int32),
        block_tables=tables,
        row_blocks=row_blocks,
        row_offsets=positions % block_size,
    )

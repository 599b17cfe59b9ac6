"""A step's arrays as torch tensors, with padding rows where a model's row floor asks for them (`rows`)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from common.attention.base import AttentionBatch
from common.engine.request import Chunk
from common.model.rows import padded
from common.model.step import step_arrays


@dataclass(frozen=True, slots=True)
class StepTensors:
    """Inputs of one forward pass. Padding rows are token 0 at position 0 and belong to no sequence."""

    ids: torch.Tensor  # int64 [1, rows]
    positions: torch.Tensor  # int64 [1, rows]
    logit_rows: torch.Tensor  # int64: rows whose logits are needed, the last one repeated as padding
    num_sampling: int
    batch: AttentionBatch


def step_tensors(chunks: Sequence[Chunk], pool: torch.Tensor, block_size: int, *, row_floor: int) -> StepTensors:
    """Lay out `chunks`; all tensors on the pool's device."""
    arrays = step_arrays(chunks, block_size)
    num_sampling = arrays.logit_rows.shape[0]

    def tensor(array: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]") -> torch.Tensor:
        return torch.from_numpy(array).to(pool.device)

    def wide(array: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]", mode: str) -> torch.Tensor:
        missing = padded(array.shape[0], row_floor) - array.shape[0]
        return tensor(np.pad(array, (0, missing), mode=mode)) if missing else tensor(array)  # type: ignore[call-overload]

    return StepTensors(
        ids=wide(arrays.ids, "constant")[None],
        positions=wide(arrays.positions, "constant")[None],
        logit_rows=wide(arrays.logit_rows, "edge"),
        num_sampling=num_sampling,
        batch=AttentionBatch(
            pool=pool,
            block_size=block_size,
            starts=tensor(arrays.starts),
            context_lens=tensor(arrays.context_lens),
            block_tables=tensor(arrays.block_tables),
            row_blocks=tensor(arrays.row_blocks),
            row_offsets=tensor(arrays.row_offsets),
        ),
    )

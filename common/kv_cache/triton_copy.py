"""Whole blocks copied on a GPU: forks inside the pool, and between scattered blocks and one contiguous staging buffer.

One launch however many blocks there are. Importing this needs triton. Indices are int32 or int64 on the pool's
device; staging buffers are [at least as many blocks as named, block_elements], of the pool's type and device.
"""

import torch
import triton
import triton.language as tl

_PIECE = 1024  # words that one program copies
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def copy_blocks(pool: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """`pool[targets[i]] = pool[sources[i]]`; no target may be a source or another target."""
    _copy(pool, pool, sources, targets, sources.shape[0])


def gather_blocks(pool: torch.Tensor, blocks: torch.Tensor, staging: torch.Tensor) -> None:
    """`staging[i] = pool[blocks[i]]`."""
    _copy(pool, staging, blocks, None, blocks.shape[0])


def scatter_blocks(staging: torch.Tensor, blocks: torch.Tensor, pool: torch.Tensor) -> None:
    """`pool[blocks[i]] = staging[i]`; no block twice."""
    _copy(staging, pool, None, blocks, blocks.shape[0])


def _copy(
    source: torch.Tensor,
    target: torch.Tensor,
    source_rows: torch.Tensor | None,
    target_rows: torch.Tensor | None,
    num_rows: int,
) -> None:
    if (source.dtype, source.device, source.shape[1]) != (target.dtype, target.device, target.shape[1]):
        raise ValueError(
            f"blocks of {source.shape[1]} {source.dtype} on {source.device} are no blocks of {target.shape[1]} "
            f"{target.dtype} on {target.device}"
        )
    if num_rows == 0:
        return
    word = _WORDS[source.dtype.itemsize]  # bits are copied, NaNs' too
    row_words = source.shape[1]
    _copy_rows[(-(-row_words // _PIECE), num_rows)](
        source.view(word),
        target.view(word),
        source_rows,
        target_rows,
        source.stride(0),
        target.stride(0),
        row_words,
        FROM_ROWS=source_rows is not None,
        TO_ROWS=target_rows is not None,
        PIECE=_PIECE,
    )


@triton.jit
def _copy_rows(
    source,
    target,
    source_rows,
    target_rows,
    source_stride,
    target_stride,
    row_words,
    FROM_ROWS: tl.constexpr,
    TO_ROWS: tl.constexpr,
    PIECE: tl.constexpr,
):
    """`target[target_rows[i]] = source[source_rows[i]]`, or row i itself where there are no indices.

    Grid: [ceil(row_words / PIECE), number of rows].
    """
    index = tl.program_id(1).to(tl.int64)
    here = index
    there = index
    if FROM_ROWS:
        here = tl.load(source_rows + index).to(tl.int64)
    if TO_ROWS:
        there = tl.load(target_rows + index).to(tl.int64)
    element = tl.program_id(0) * PIECE + tl.arange(0, PIECE)
    real = element < row_words
    piece = tl.load(source + here * source_stride + element, mask=real)
    tl.store(target + there * target_stride + element, piece, mask=real)

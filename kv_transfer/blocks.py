"""What every transport checks and waits for, whatever carries the bytes."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from common.errors import StaleBlockError, TransferError
from common.kv_cache.memory import PoolMemory
from common.messages import BlockId, BlockRef, KVLayout
from kv_transfer.layout import mismatch

T = TypeVar("T")


def check_destination(refs: Sequence[BlockRef], into: Sequence[BlockId], num_blocks: int) -> None:
    """TransferError unless every reference has its own block inside a local pool of `num_blocks`."""
    if len(refs) != len(into):
        raise TransferError(f"{len(refs)} blocks cannot be read into {len(into)}")
    if len(set(into)) != len(into):
        raise TransferError("a block is named twice as destination of one read")
    if into and not (min(into) >= 0 and max(into) < num_blocks):
        raise TransferError(f"destination blocks {min(into)}..{max(into)} reach outside a pool of {num_blocks}")


def check_source(refs: Sequence[BlockRef], num_blocks: int) -> None:
    """TransferError unless every reference lies inside the owner's pool of `num_blocks`."""
    for ref in refs:
        if not 0 <= ref.block < num_blocks:
            raise TransferError(f"block {ref.block} is outside the owner's pool of {num_blocks}")


def check_generations(refs: Sequence[BlockRef], generations: npt.NDArray[np.int64]) -> None:
    """StaleBlockError if the owner has reused any of these blocks. Call it before and after taking the bytes.

    No barrier is needed around it: the interpreter's lock, given up and taken back by every copy and every
    socket call in between, is one.
    """
    now = generations[[ref.block for ref in refs]].tolist() if refs else []
    for ref, generation in zip(refs, now, strict=True):
        if generation != ref.generation:
            raise StaleBlockError(f"block {ref.block} is at generation {generation}, {ref.generation} was promised")


def check_readable(pool: PoolMemory, refs: Sequence[BlockRef], secret: bytes) -> None:
    """StaleBlockError unless the blocks may be handed out under this secret now, and are what was promised."""
    if not pool.grants.allows(secret, refs):
        raise StaleBlockError("the blocks were not promised to this call, or the call has ended")
    check_generations(refs, pool.generations)


def check_layout(ours: KVLayout, theirs: KVLayout) -> None:
    """TransferError naming the difference if the two pools' layouts differ."""
    reason = mismatch(ours, theirs)
    if reason is not None:
        raise TransferError(f"the pools do not fit each other: {reason}")


_MAX_RUN_BLOCKS = 16


def runs(refs: Sequence[BlockRef], into: Sequence[BlockId]) -> Iterator[tuple[int, int, int]]:
    """(source, destination, length) of what can be copied in one piece; at most 16 blocks, so that a stop is
    soon obeyed. Every piece takes the interpreter's lock once, which a busy engine thread makes dear."""
    source = destination = length = 0
    for ref, block in zip(refs, into, strict=True):
        if 0 < length < _MAX_RUN_BLOCKS and (ref.block, block) == (source + length, destination + length):
            length += 1
            continue
        if length:
            yield source, destination, length
        source, destination, length = ref.block, block, 1
    if length:
        yield source, destination, length


async def settled(work: asyncio.Future[T], on_cancel: Callable[[], None]) -> T:
    """The result of `work`, awaited to its end however often the caller is cancelled.

    At the first cancellation `on_cancel` is told to hurry `work` along; CancelledError is raised only once
    `work` is done, so that whatever it was writing to is at rest.
    """
    cancelled = False
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            if not cancelled:
                on_cancel()
            cancelled = True
    try:
        if cancelled:
            if not work.cancelled():
                work.exception()  # looked at, lest the loop complains about an error nobody saw
            raise asyncio.CancelledError
        return work.result()
    finally:
        del work  # an error's traceback holds this frame: without this, a cycle that keeps mappings and blocks alive

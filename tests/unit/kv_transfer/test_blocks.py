import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import StaleBlockError, TransferError
from common.messages import BlockId, BlockRef, Generation
from kv_transfer.blocks import check_destination, check_generations, check_source, runs, settled


def refs(*blocks: int) -> list[BlockRef]:
    return [BlockRef(BlockId(block), Generation(0)) for block in blocks]


def ids(*blocks: int) -> list[BlockId]:
    return [BlockId(block) for block in blocks]


def test_neighbours_on_both_sides_are_copied_in_one_piece() -> None:
    assert list(runs(refs(4, 5, 6, 9, 10, 3), ids(0, 1, 2, 3, 5, 6))) == [(4, 0, 3), (9, 3, 1), (10, 5, 1), (3, 6, 1)]


@given(st.lists(st.integers(0, 60), max_size=80), st.permutations(range(80)))
def test_runs_cover_every_pair_once_and_in_order(sources: list[int], destinations: list[int]) -> None:
    into = sorted(destinations[: len(sources)]) if len(sources) % 2 else destinations[: len(sources)]
    pieces = list(runs(refs(*sources), ids(*into)))
    pairs = [(source + k, destination + k) for source, destination, length in pieces for k in range(length)]
    assert pairs == list(zip(sources, into, strict=True))
    assert all(length <= 16 for _, _, length in pieces)


def test_a_destination_is_distinct_and_inside_the_pool() -> None:
    check_destination(refs(0, 0), ids(0, 7), 8)
    check_destination([], [], 0)
    for blocks in (ids(0), ids(3, 3), ids(0, 8), ids(-1, 0)):
        with pytest.raises(TransferError):
            check_destination(refs(0, 1), blocks, 8)


def test_a_source_is_inside_the_owners_pool() -> None:
    check_source(refs(0, 7), 8)
    for block in (-1, 8, 1 << 70):
        with pytest.raises(TransferError):
            check_source(refs(0, block), 8)


def test_one_moved_generation_makes_the_read_stale() -> None:
    generations = np.zeros(8, np.int64)
    check_generations(refs(1, 2), generations)
    generations[2] = 1
    check_generations(refs(1), generations)
    with pytest.raises(StaleBlockError, match="block 2 is at generation 1, 0 was promised"):
        check_generations(refs(1, 2), generations)


async def test_settled_outlives_cancellation_and_asks_for_haste_once() -> None:
    work: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    asked: list[str] = []
    waiting = asyncio.ensure_future(settled(work, lambda: asked.append("hurry")))
    for _ in range(3):
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.sleep(0)
        assert not waiting.done()
    work.set_result(1)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert asked == ["hurry"]


async def test_settled_gives_the_result_and_the_error() -> None:
    work: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    work.set_result(5)
    assert await settled(work, lambda: None) == 5
    failed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    failed.set_exception(StaleBlockError("moved"))
    with pytest.raises(StaleBlockError, match="moved"):
        await settled(failed, lambda: None)

"""Who is kept in host memory and who is dropped for it."""

import random

from hypothesis import given
from hypothesis import strategies as st

from common.kv_cache.block_pool import BlockPool
from common.kv_cache.host_tier import HostTier
from common.messages import BlockHash, BlockId


def content(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "big"))


def test_the_least_recently_used_content_is_dropped() -> None:
    tier = HostTier(2, first_id=10)
    assert tier.keep(content(1)) == (10, None)
    assert tier.keep(content(2)) == (11, None)
    tier.touch(content(1))
    assert tier.keep(content(3)) == (11, content(2))
    assert tier.lookup(content(2)) is None
    assert tier.lookup(content(1)) == 10
    tier.check_invariants()


def test_what_is_about_to_be_copied_in_is_not_dropped() -> None:
    tier = HostTier(2, first_id=10)
    tier.keep(content(1))
    tier.keep(content(2))
    with tier.pinned([BlockId(10)]):
        assert tier.keep(content(3)) == (11, content(2))
    with tier.pinned([BlockId(10), BlockId(11)]):
        assert tier.keep(content(4)) == (None, None)
    assert tier.keep(content(4)) == (10, content(1))


def test_what_is_not_worth_it_is_tried_every_now_and_then() -> None:
    tier = HostTier(200, first_id=10)
    tier.is_worth_it = False
    kept = [tier.keep(content(number))[0] is not None for number in range(128)]
    assert kept.count(True) == 2


@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(0, 8))
def test_copies_made_in_order_bring_every_block_the_content_of_its_name(
    seed: int, num_blocks: int, num_host_blocks: int
) -> None:
    """Random claims, names and releases, the copies made late and all at once."""
    rng, pool = random.Random(seed), BlockPool(num_blocks, [0] * num_blocks, num_host_blocks)
    rows: list[int] = [-1] * (num_blocks + num_host_blocks)
    known: dict[BlockHash, bool] = {}
    held: list[tuple[list[BlockId], list[int]]] = []
    for _ in range(60):
        wanted = [rng.randrange(9) for _ in range(rng.randint(1, 3))]
        wanted = list(dict.fromkeys(wanted))
        shared = [place for number in wanted if (place := pool.lookup(content(number))) is not None]
        numbers = [number for number in wanted if pool.lookup(content(number)) is not None]
        missing = [number for number in wanted if number not in numbers]
        table = pool.claim(shared, len(missing))
        if table is not None:
            held.append((table, numbers + missing))
        if table is None or rng.random() < 0.6:  # else more is decided before the copies are made
            for source, target in pool.take_copies():
                rows[target] = rows[source]
            for blocks, values in held:
                for block, value in zip(blocks, values, strict=True):
                    if pool.lookup(content(value)) != block:
                        rows[block] = value  # computed
                        pool.name(block, content(value))
                    assert rows[block] == value
            while held and rng.random() < 0.8:
                blocks, _ = held.pop(rng.randrange(len(held)))
                pool.free(blocks)
        for name, is_offered in pool.changes:
            assert known.get(name, False) != is_offered
            known[name] = is_offered
        pool.changes.clear()
        for number in range(9):
            assert known.get(content(number), False) == (pool.lookup(content(number)) is not None)
        pool.check_invariants([blocks for blocks, _ in held])

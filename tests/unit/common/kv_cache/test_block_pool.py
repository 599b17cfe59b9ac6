import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.kv_cache.block_pool import BlockPool
from common.messages import BlockHash, BlockId, BlockRef, Generation


def pool_of(num_blocks: int) -> BlockPool:
    return BlockPool(num_blocks, [0] * num_blocks)


def claimed(pool: BlockPool, count: int) -> list[BlockId]:
    blocks = pool.allocate(count)
    assert blocks is not None
    return blocks


def named(pool: BlockPool, *contents: bytes) -> list[BlockId]:
    blocks = claimed(pool, len(contents))
    for block, content in zip(blocks, contents, strict=True):
        pool.name(block, BlockHash(content))
    return blocks


def test_a_generation_moves_when_a_block_is_handed_out_and_at_no_other_time() -> None:
    pool = pool_of(1)
    [block] = named(pool, b"a")
    assert pool.ref(block) == BlockRef(block, Generation(1))
    pool.free([block])
    pool.share(block)
    pool.share(block)
    pool.free([block, block])
    assert pool.ref(block).generation == 1
    assert claimed(pool, 1) == [block]
    assert pool.ref(block).generation == 2


def test_a_claim_that_does_not_fit_changes_nothing() -> None:
    pool = pool_of(3)
    claimed(pool, 1)
    assert pool.allocate(3) is None
    assert pool.num_free == 2
    assert sum(pool.ref(BlockId(block)).generation for block in range(3)) == 1


def test_a_cached_block_that_is_shared_does_not_count_as_free_for_the_same_claim() -> None:
    pool = pool_of(2)
    [hit] = named(pool, b"a")
    pool.free([hit])
    assert pool.claim([hit], 2) is None
    assert pool.num_cached == 1
    assert pool.claim([hit], 1) is not None
    assert pool.num_free == 0


def test_a_claim_leaves_the_spare_blocks() -> None:
    pool = pool_of(4)
    assert pool.claim([], 3, spare=2) is None
    assert pool.claim([], 2, spare=2) is not None


def test_free_blocks_go_before_cached_ones_and_the_longest_unused_of_those_first() -> None:
    pool = pool_of(3)
    a, b, plain = *named(pool, b"a", b"b"), claimed(pool, 1)[0]
    pool.free([b])
    pool.free([a])
    pool.free([plain])
    assert claimed(pool, 3) == [plain, b, a]


def test_the_end_of_a_sequence_is_reused_before_its_beginning() -> None:
    pool = pool_of(3)
    blocks = named(pool, b"1", b"2", b"3")
    pool.free(blocks)
    assert claimed(pool, 2) == [blocks[2], blocks[1]]
    assert pool.lookup(BlockHash(b"1")) == blocks[0]


def test_a_block_keeps_its_name_until_it_is_handed_out_anew() -> None:
    pool = pool_of(1)
    [block] = named(pool, b"a")
    pool.free([block])
    assert pool.lookup(BlockHash(b"a")) == block
    claimed(pool, 1)
    assert pool.lookup(BlockHash(b"a")) is None


def test_the_same_content_twice_has_one_name_and_the_second_block_is_plain() -> None:
    pool = pool_of(2)
    first, second = named(pool, b"a", b"a")
    assert pool.lookup(BlockHash(b"a")) == first
    pool.free([second])
    assert pool.num_cached == 0
    pool.free([first])
    assert pool.num_cached == 1
    pool.check_invariants([])


def test_names_given_and_lost_are_noted_in_order() -> None:
    pool = pool_of(2)
    pool.free(named(pool, b"a", b"b"))
    claimed(pool, 1)
    assert pool.changes == [(b"a", True), (b"b", True), (b"b", False)]


def test_a_name_that_is_taken_already_is_no_news() -> None:
    pool = pool_of(2)
    named(pool, b"a", b"a")
    assert pool.changes == [(b"a", True)]


def test_a_block_freed_once_too_often_is_caught() -> None:
    pool = pool_of(1)
    [block] = claimed(pool, 1)
    pool.free([block])
    with pytest.raises(AssertionError, match="once too often"):
        pool.free([block])


def test_a_lost_reference_is_caught() -> None:
    pool = pool_of(2)
    claimed(pool, 1)
    with pytest.raises(AssertionError, match="references leak"):
        pool.check_invariants([])


class PoolMachine(RuleBasedStateMachine):
    """Sequences come, share what they know, name and go; a plain account of contents says what must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.generations = [0] * 5
        self.pool = BlockPool(5, self.generations)
        self.tables: list[list[BlockId]] = []
        self.contents: dict[BlockId, BlockHash] = {}  # what was named, until the block is handed out anew
        self.offered: set[BlockHash] = set()  # what one who only reads the pool's changes believes

    @rule(count=st.integers(0, 4), spare=st.integers(0, 2), wanted=st.sets(st.integers(0, 7)))
    def claim(self, count: int, spare: int, wanted: set[int]) -> None:
        contents = [BlockHash(bytes([content])) for content in sorted(wanted)]
        shared = [block for content in contents if (block := self.pool.lookup(content)) is not None]
        assert all(self.contents[block] in contents for block in shared)
        before, free = list(self.generations), self.pool.num_free
        idle = sum(self.pool.references(block) == 0 for block in shared)
        blocks = self.pool.claim(shared, count, spare=spare)
        assert (blocks is None) == (free - idle - count < spare)
        new = [] if blocks is None else blocks[len(shared) :]
        moved = [block for block in range(5) if self.generations[block] != before[block]]
        assert sorted(new) == moved, "generations move for new content and for nothing else"
        for block in new:
            assert not any(block in table for table in self.tables), "somebody still holds it"
            self.contents.pop(block, None)
        if blocks:
            self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(choice=st.data(), content=st.integers(0, 7))
    def name(self, choice: st.DataObject, content: int) -> None:
        block = choice.draw(st.sampled_from(choice.draw(st.sampled_from(self.tables))))
        name = BlockHash(bytes([content]))
        if block not in self.contents and name not in self.contents.values():
            self.contents[block] = name
        self.pool.name(block, name)

    @precondition(lambda self: self.tables)
    @rule(choice=st.data())
    def free(self, choice: st.DataObject) -> None:
        self.pool.free(self.tables.pop(choice.draw(st.integers(0, len(self.tables) - 1))))

    @invariant()
    def changes_tell_what_is_offered(self) -> None:
        for content, is_offered in self.pool.changes:
            assert (content in self.offered) != is_offered
            (self.offered.add if is_offered else self.offered.remove)(content)
        self.pool.changes = []
        assert self.offered == set(self.contents.values())

    @invariant()
    def accounts_agree(self) -> None:
        self.pool.check_invariants(self.tables)
        held = {block for table in self.tables for block in table}
        assert self.pool.num_free + len(held) == 5
        for content in range(8):
            block = self.pool.lookup(BlockHash(bytes([content])))
            assert block is None or self.contents[block] == bytes([content])

    def teardown(self) -> None:
        for table in self.tables:
            self.pool.free(table)
        self.pool.check_invariants([])
        assert self.pool.num_free == 5


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)

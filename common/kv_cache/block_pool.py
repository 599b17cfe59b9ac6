"""Who holds which block, in plain integers; the bytes lie elsewhere.

Every block is in exactly one of three places:

    free ──claim──> referenced ──free, last reference──> free      (it has no name)
                        ▲  └────────────────────────────> cached   (it is named by a content hash)
                        └──claim as shared──────────────────┘ │
    cached, least recently used first, is handed out when free is empty: its name is dropped

1. A block's generation moves when it is handed out for new content, before anybody can write to it. It
   does not move when a block is shared, freed or cached: a reader that still holds its reference reads
   the right bytes until then.
2. A name is given once the bytes are there (`name`), and lost only when the block is handed out anew.
3. A content hash names one block. The same content computed twice stays without a name the second time.
4. Every name given or lost is noted in `changes`, in order, for whoever owns the pool to take away.
5. With a host tier, a content that is handed out anew is copied there first, and found there by its name: then its
   name is not lost. Copies are noted in `copies`, in order, and must be made in that order before anybody else reads
   or writes the pool; whatever is decided here takes them as made.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

from common.kv_cache.host_tier import HostTier
from common.messages import BlockHash, BlockId, BlockRef, Generation


class Generations(Protocol):
    """One integer a block, index by block: a list, or a memoryview of the pool's shared int64 array."""

    def __len__(self) -> int: ...

    def __getitem__(self, block: int, /) -> int: ...

    def __setitem__(self, block: int, generation: int, /) -> None: ...


class BlockPool:
    """Counts references of `num_blocks` blocks and keeps unreferenced named ones as a cache."""

    def __init__(self, num_blocks: int, generations: Generations, num_host_blocks: int = 0) -> None:
        if num_blocks < 1 or len(generations) != num_blocks:
            raise ValueError(f"a pool of {num_blocks} blocks with {len(generations)} generations")
        self.num_blocks = num_blocks
        self._generations = generations
        self._references = [0] * num_blocks
        self._free = [BlockId(block) for block in reversed(range(num_blocks))]
        self._cached: OrderedDict[BlockId, None] = OrderedDict()
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        self._named: dict[BlockHash, BlockId] = {}
        self.host = HostTier(num_host_blocks, first_id=num_blocks)
        self.copies: list[tuple[BlockId, BlockId]] = []
        """From and to, ids of blocks and of the host tier's places; grows until it is taken away."""
        self.changes: list[tuple[BlockHash, bool]] = []
        """Names, and whether each was given (or else lost); grows until it is taken away."""

    @property
    def num_free(self) -> int:
        """Blocks that a claim can have: free ones and those that are only cached."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def references(self, block: BlockId) -> int:
        return self._references[block]

    def ref(self, block: BlockId) -> BlockRef:
        """The block as it is now, for the wire."""
        return BlockRef(block, Generation(self._generations[block]))

    def allocate(self, count: int) -> list[BlockId] | None:
        """`count` blocks for new content, or None if fewer can be had (then nothing changes)."""
        return self.claim((), count)

    def claim(self, shared: Sequence[BlockId], count: int, *, spare: int = 0) -> list[BlockId] | None:
        """A reference more on each of `shared`, then `count` blocks for new content: one block table.

        What of `shared` lies in the host tier gets a block of the pool, to be copied into.

        None, and nothing changes, if that would leave fewer than `spare` blocks to be had.
        """
        references, num_blocks = self._references, self.num_blocks
        idle, fetched = 0, list[BlockId]()
        for block in shared:
            if block >= num_blocks:
                fetched.append(block)
            elif references[block] == 0:
                idle += 1
        if self.num_free - idle - len(fetched) - count < spare:
            return None
        for block in shared:
            if block < num_blocks:
                self.share(block)
        with self.host.pinned(fetched):
            prefix = [block if block < num_blocks else self._fetch(block) for block in shared]
            return [*prefix, *(self._hand_out() for _ in range(count))]

    def share(self, block: BlockId) -> None:
        """One more reference on a block that is referenced or cached."""
        if self._references[block] == 0:
            del self._cached[block]
        self._references[block] += 1

    def free(self, blocks: Sequence[BlockId]) -> None:
        """Give one reference back for each; a sequence's last blocks become the first to be reused."""
        references = self._references
        for block in reversed(blocks):
            assert references[block] > 0, f"block {block} freed once too often"
            references[block] -= 1
            if references[block] == 0:
                if self._hashes[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def name(self, block: BlockId, content: BlockHash) -> None:
        """Offer a referenced full block, whose bytes have landed, to later prompts."""
        assert self._references[block] > 0, f"block {block} named while nobody holds it"
        if self._hashes[block] is None and content not in self._named:
            self._hashes[block] = content
            self._named[content] = block
            if content not in self.host:
                self.changes.append((content, True))

    def lookup(self, content: BlockHash) -> BlockId | None:
        """The block with this content, or its place in the host tier."""
        block = self._named.get(content)
        return self.host.lookup(content) if block is None else block

    def take_copies(self) -> list[tuple[BlockId, BlockId]]:
        """Those noted since the last time."""
        copies, self.copies = self.copies, []
        return copies

    def _hand_out(self) -> BlockId:
        block = self._free.pop() if self._free else self._evict()
        self._generations[block] += 1
        self._references[block] = 1
        return block

    def _evict(self) -> BlockId:
        block, _ = self._cached.popitem(last=False)
        content = self._hashes[block]
        assert content is not None
        del self._named[content]
        self._hashes[block] = None
        self._give_up(block, content)
        return block

    def _give_up(self, block: BlockId, content: BlockHash) -> None:
        """Rule 5: it is copied out, unless it is there already or nothing is to be kept."""
        host = self.host
        if content in host:
            host.touch(content)
            return
        place, dropped = host.keep(content) if host.num_blocks else (None, None)
        if place is None:
            self.changes.append((content, False))
            return
        self.copies.append((block, place))
        if dropped is not None and dropped not in self._named:
            self.changes.append((dropped, False))

    def _fetch(self, place: BlockId) -> BlockId:
        """A block into which a content of the host tier will have been copied before anybody looks."""
        content, block = self.host.content(place), self._hand_out()
        self.copies.append((place, block))
        self.host.num_in += 1
        self._hashes[block] = content
        self._named[content] = block
        return block

    def check_invariants(self, holders: Iterable[Sequence[BlockId]] | None = None) -> None:
        """Every block is in one place and, if the block tables of all `holders` are given, counted right."""
        referenced = [block for block in range(self.num_blocks) if self._references[block] > 0]
        places = Counter([*self._free, *self._cached, *referenced])
        assert places == Counter(range(self.num_blocks)), "a block is in no place or in two"
        assert all(count >= 0 for count in self._references)
        assert all(self._hashes[block] is None for block in self._free), "a named block lies among the free"
        assert all(self._hashes[block] is not None for block in self._cached), "a nameless block is cached"
        named = {content: block for block, content in enumerate(self._hashes) if content is not None}
        assert named == self._named, "the index and the blocks' names differ"
        self.host.check_invariants()
        if holders is not None:
            counted = Counter(block for table in holders for block in table)
            assert counted == Counter({block: self._references[block] for block in referenced}), "references leak"

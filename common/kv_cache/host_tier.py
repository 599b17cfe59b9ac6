"""Contents that left the pool and are kept in host memory, in plain integers; the bytes lie elsewhere. Pure.

    pool: cached, least recently used ──evicted──> copied out ──> here, least recently used ──> gone
                          ▲                                        │
                          └──────── copied in on a hit ────────────┘

1. Places here have ids of their own, behind the pool's blocks: a copy between any two is a pair of ids.
2. What is here was named by its content and never changes. It stays here when it is copied in, so that it need not
   be copied out again.
3. So a request that was pre-empted finds what was computed for it again, in the pool or here: what is cheaper than
   computing it anew. `is_worth_it` says whether copying out and in is; every now and then it is tried all the same,
   for what is never done is never measured.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from common.messages import BlockHash, BlockId

_TRY_EVERY = 64


class Rows(Protocol):
    """An array or tensor whose rows are blocks."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def copy_rows(pool: Rows, host: Rows, copies: Sequence[tuple[BlockId, BlockId]]) -> None:
    """Copy blocks, from and to, in this order: ids behind those of `pool` are rows of `host`."""
    num_blocks = len(pool)
    for source, target in copies:
        row = pool[source] if source < num_blocks else host[source - num_blocks]
        (pool[target] if target < num_blocks else host[target - num_blocks])[:] = row


class HostTier:
    """`num_blocks` places with the ids `first_id ...`."""

    def __init__(self, num_blocks: int, *, first_id: int) -> None:
        self.num_blocks = num_blocks
        self.is_worth_it = True
        self.num_out = 0
        """Blocks copied out so far."""
        self.num_in = 0
        """Blocks copied in so far: hits."""
        self._first_id = first_id
        self._free = [BlockId(first_id + place) for place in reversed(range(num_blocks))]
        self._places: OrderedDict[BlockHash, BlockId] = OrderedDict()  # least recently used first
        self._contents: dict[BlockId, BlockHash] = {}
        self._pinned: frozenset[BlockHash] = frozenset()
        self._num_refused = 0

    @property
    def num_used(self) -> int:
        return len(self._places)

    def __contains__(self, content: BlockHash) -> bool:
        return content in self._places

    def lookup(self, content: BlockHash) -> BlockId | None:
        return self._places.get(content)

    def content(self, place: BlockId) -> BlockHash:
        return self._contents[place]

    @contextmanager
    def pinned(self, places: Sequence[BlockId]) -> Iterator[None]:
        """These are about to be copied in: they stay, and are the last ones used."""
        contents = [self._contents[place] for place in places]
        for content in contents:
            self._places.move_to_end(content)
        self._pinned = frozenset(contents)
        try:
            yield
        finally:
            self._pinned = frozenset()

    def keep(self, content: BlockHash) -> tuple[BlockId | None, BlockHash | None]:
        """Where a content that leaves the pool is to be copied to, and which one is dropped for it.

        No place if it is not worth it, or if all that are here are about to be copied in.
        """
        assert content not in self._places
        if not self.is_worth_it:
            self._num_refused += 1
            if self._num_refused % _TRY_EVERY:
                return None, None
        dropped = None
        if self._free:
            place = self._free.pop()
        else:
            dropped = next(iter(self._places))
            if dropped in self._pinned:
                return None, None
            place = self._places.pop(dropped)
        self._places[content] = place
        self._contents[place] = content
        self.num_out += 1
        return place, dropped

    def touch(self, content: BlockHash) -> None:
        """It leaves the pool, and is here already."""
        self._places.move_to_end(content)

    def check_invariants(self) -> None:
        assert self._contents == {place: content for content, place in self._places.items()}
        assert sorted([*self._free, *self._contents]) == list(range(self._first_id, self._first_id + self.num_blocks))
        assert not self._pinned

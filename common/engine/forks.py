"""Requests that continue one prompt in several ways, and share its blocks. Pure.

    Admit(parent, forks) ──> attached ──parent's first token──> ready, with the parent's blocks ──> running

1. Forks have the first `num_shared` tokens of their parent. They start when the parent has drawn a token, for all
   of those tokens are computed then; before that they have nothing, and end with it.
2. A fork that has its own first token already computes what it has beyond the shared tokens; one that has none
   computes the last shared token once more, for its logits.
3. Blocks that are full of what is computed for a fork then get one more reference for it. The block in which that
   ends goes on in the parent's table, where the parent writes behind it; the fork holds a reference on it (`copy_of`)
   until it has a block of its own to copy it into. What else is in that copy is never read before it is written.
4. From then on a fork is a request like any other, of the latest turn: it grows, gives its blocks up and ends alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from common.engine.names import Names
from common.engine.request import EngineRequest
from common.kv_cache.block_pool import BlockPool
from common.messages import BlockId, RequestId


@dataclass(frozen=True, slots=True)
class Attached:
    """What waits for one parent."""

    forks: tuple[EngineRequest, ...]
    num_shared: int


class Forks:
    """Those that have not started yet, by their parent."""

    def __init__(self, pool: BlockPool, block_size: int, names: Names) -> None:
        self._pool = pool
        self._names = names
        self._block_size = block_size
        self.attached: dict[RequestId, Attached] = {}

    @property
    def ids(self) -> list[RequestId]:
        return [fork.id for attached in self.attached.values() for fork in attached.forks]

    def attach(self, parent: EngineRequest, forks: Sequence[EngineRequest], num_shared: int) -> None:
        assert num_shared <= len(parent.tokens)
        if forks:
            self.attached[parent.id] = Attached(tuple(forks), num_shared)

    def of(self, parent: RequestId) -> int:
        """How many wait for it."""
        attached = self.attached.get(parent)
        return 0 if attached is None else len(attached.forks)

    def drop(self, parent: RequestId) -> None:
        """The parent ends without a token. Idempotent."""
        self.attached.pop(parent, None)

    def start(self, parent: EngineRequest) -> tuple[EngineRequest, ...]:
        """Rules 2 and 3: what waits for it, each with its share. The parent still has its blocks."""
        attached = self.attached.pop(parent.id, None)
        if attached is None:
            return ()
        for fork in attached.forks:
            self._share(parent, fork, attached.num_shared)
        return attached.forks

    def held(self) -> Iterator[tuple[str, RequestId, list[BlockId]]]:
        """As `Scheduler.held`."""
        yield from (("fork", id, []) for id in self.ids)

    def copy(self, fork: EngineRequest, block: BlockId) -> None:
        """`block` becomes the fork's next one. The source may be free then: copies are made before anybody writes."""
        assert fork.copy_of is not None
        self._pool.copies.append((fork.copy_of, block))
        self._pool.free([fork.copy_of])
        fork.copy_of = None

    def give_up_copy(self, fork: EngineRequest) -> int:
        """Let go of what was to be copied; so many tokens more are to be computed."""
        assert fork.copy_of is not None
        self._pool.free([fork.copy_of])
        fork.copy_of, was_computed = None, fork.num_computed
        fork.num_computed = len(fork.blocks) * self._block_size
        return was_computed - fork.num_computed

    def _share(self, parent: EngineRequest, fork: EngineRequest, num_shared: int) -> None:
        fork.num_computed = min(num_shared, len(fork.tokens) - 1)
        num_full, rest = divmod(fork.num_computed, self._block_size)
        fork.blocks = parent.blocks[:num_full]
        fork.copy_of = parent.blocks[num_full] if rest else None
        for block in fork.held_blocks:
            self._pool.share(block)
        fork.hashes = parent.hashes[:num_full]
        self._names.extend(fork.hashes, fork.tokens, fork.origin)
        fork.num_cached = parent.num_cached

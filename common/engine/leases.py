"""Blocks that a call owns while the scheduler does not, and those that want some.

A decode node reserves before the prompt's bytes come; a prefill node holds what it computed until its
reader has it. Both are a lease: a block table under the request's id.

1. A reservation is granted when the scheduler says that it is next, all of a sequence's blocks at once, cached
   prefix shared.
2. A grant leaves `spare` blocks to be had (the scheduler asks for one per running request), so that memory
   lent to a prompt that is still on its way does not stop a running request at its next block. Beside running
   requests it leaves one for each fork too, which will want one at once.
3. A lease ends by being taken (it becomes a request's block table) or released.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from common.engine.request import EngineRequest
from common.kv_cache.block_pool import BlockPool
from common.kv_cache.prefix_cache import cached_prefix
from common.messages import BlockHash, BlockId, RequestId


@dataclass(frozen=True, slots=True)
class Lease:
    """`turn` orders it among everything that ever got blocks; `num_cached` tokens were shared."""

    turn: int
    blocks: list[BlockId]
    hashes: list[BlockHash]
    num_cached: int


@dataclass(frozen=True, slots=True)
class Reservation:
    num_tokens: int
    hashes: list[BlockHash]
    num_forks: int = 0


class Leases:
    """The leases on one pool."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._wanted: dict[RequestId, Reservation] = {}
        self._held: dict[RequestId, Lease] = {}
        self._granted: dict[RequestId, None] = {}
        self._num_blocks = 0

    @property
    def ids(self) -> list[RequestId]:
        return [*self._wanted, *self._held]

    @property
    def num_blocks(self) -> int:
        """Blocks in block tables of leases; one shared by two of them counts twice."""
        return self._num_blocks

    @property
    def has_wanted(self) -> bool:
        """Whether a reservation waits."""
        return bool(self._wanted)

    @property
    def has_granted(self) -> bool:
        """Whether blocks wait for their bytes: a request that brings them may come at any moment."""
        return bool(self._granted)

    def __contains__(self, request: RequestId) -> bool:
        return request in self._wanted or request in self._held

    def reserve(self, request: RequestId, num_tokens: int, hashes: list[BlockHash], num_forks: int = 0) -> None:
        """Wait for room for `num_tokens`; `hashes` name their full blocks, or none where no prefix is shared."""
        self._wanted[request] = Reservation(num_tokens, hashes, num_forks)

    def grant(self, request: RequestId, *, turn: int, spare: int) -> Lease | None:
        """Turn a reservation into a lease if `spare` blocks are left then."""
        wanted = self._wanted[request]
        shared = cached_prefix(self._pool, wanted.hashes, wanted.num_tokens, self._block_size)
        missing = -(-wanted.num_tokens // self._block_size) - len(shared)
        blocks = self._pool.claim(shared, missing, spare=spare + (wanted.num_forks if spare else 0))
        if blocks is None:
            return None
        del self._wanted[request]
        lease = Lease(turn, blocks, wanted.hashes, len(shared) * self._block_size)
        self.hold(request, lease)
        self._granted[request] = None
        return lease

    def hold(self, request: RequestId, lease: Lease) -> None:
        """Blocks that are already referenced, from now on under this id."""
        assert request not in self._held
        self._held[request] = lease
        self._num_blocks += len(lease.blocks)

    def keep(self, request: EngineRequest) -> None:
        """A request that has stopped: its blocks that hold something are a lease of its id from now on."""
        used = -(-request.num_computed // self._block_size)
        self._pool.free(request.blocks[used:])
        self.hold(request.id, Lease(request.turn, request.blocks[:used], request.hashes, request.num_cached))
        request.blocks = []

    def peek(self, request: RequestId) -> Lease | None:
        return self._held.get(request)

    def take(self, request: RequestId) -> Lease | None:
        """Hand the blocks over to the caller, references and all. A reservation that still waits is dropped."""
        self._wanted.pop(request, None)
        self._granted.pop(request, None)
        lease = self._held.pop(request, None)
        if lease is not None:
            self._num_blocks -= len(lease.blocks)
        return lease

    def release(self, request: RequestId) -> bool:
        """Free whatever this id has here; True if a lease ended."""
        lease = self.take(request)
        if lease is not None:
            self._pool.free(lease.blocks)
        return lease is not None

    def held(self) -> Iterator[tuple[str, RequestId, list[BlockId]]]:
        """As `Scheduler.held`."""
        yield from (("reservation", id, []) for id in self._wanted)
        yield from (("lease", id, lease.blocks) for id, lease in self._held.items())

    def tables(self) -> list[list[BlockId]]:
        return [lease.blocks for lease in self._held.values()]

    def check_invariants(self) -> None:
        assert self._num_blocks == sum(len(lease.blocks) for lease in self._held.values())
        assert not self._wanted.keys() & self._held.keys(), "an id waits and is held"
        assert self._granted.keys() <= self._held.keys()

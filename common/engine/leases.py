"""Blocks that a call owns while the scheduler does not, and the queue of those that want some.

A decode node reserves before the prompt's bytes come; a prefill node holds what it computed until its
reader has it. Both are a lease: a block table under the request's id.

1. Reservations are granted in order of arrival, all of a sequence's blocks at once, cached prefix shared.
2. A grant leaves `spare` blocks to be had (the scheduler asks for one per running request), so that memory
   lent to a prompt that is still on its way does not stop a running request at its next block.
3. A lease ends by being taken (it becomes a request's block table) or released.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from common.kv_cache.block_pool import BlockPool
from common.kv_cache.prefix_cache import cached_prefix, hash_blocks
from common.messages import BlockHash, BlockId, RequestId


@dataclass(frozen=True, slots=True)
class Lease:
    """`arrival` orders it among everything that ever asked for blocks; `num_cached` tokens were shared."""

    arrival: int
    blocks: list[BlockId]
    hashes: list[BlockHash]
    num_cached: int


@dataclass(frozen=True, slots=True)
class Reservation:
    arrival: int
    num_tokens: int
    hashes: list[BlockHash]


class Leases:
    """The leases on one pool. `root` None means that no prefix is shared."""

    def __init__(self, pool: BlockPool, block_size: int, root: BlockHash | None) -> None:
        self._pool = pool
        self._block_size = block_size
        self._root = root
        self._queue: dict[RequestId, Reservation] = {}
        self._held: dict[RequestId, Lease] = {}
        self._num_blocks = 0

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def ids(self) -> list[RequestId]:
        return [*self._queue, *self._held]

    @property
    def num_blocks(self) -> int:
        """Blocks in block tables of leases; one shared by two of them counts twice."""
        return self._num_blocks

    @property
    def first_arrival(self) -> int | None:
        """Of the reservation that is next to be granted."""
        return next(iter(self._queue.values())).arrival if self._queue else None

    def __contains__(self, request: RequestId) -> bool:
        return request in self._queue or request in self._held

    def reserve(self, request: RequestId, tokens: list[int], arrival: int) -> None:
        """Queue a reservation; `arrival` must be larger than any before it."""
        hashes = [] if self._root is None else hash_blocks(tokens, self._block_size, self._root)
        self._queue[request] = Reservation(arrival, len(tokens), hashes)

    def grant(self, spare: int) -> tuple[RequestId, Lease] | None:
        """Turn the oldest reservation into a lease if `spare` blocks are left then."""
        if not self._queue:
            return None
        request, wanted = next(iter(self._queue.items()))
        shared = cached_prefix(self._pool, wanted.hashes, wanted.num_tokens, self._block_size)
        missing = -(-wanted.num_tokens // self._block_size) - len(shared)
        blocks = self._pool.claim(shared, missing, spare=spare)
        if blocks is None:
            return None
        del self._queue[request]
        lease = Lease(wanted.arrival, blocks, wanted.hashes, len(shared) * self._block_size)
        self.hold(request, lease)
        return request, lease

    def hold(self, request: RequestId, lease: Lease) -> None:
        """Blocks that are already referenced, from now on under this id."""
        assert request not in self._held
        self._held[request] = lease
        self._num_blocks += len(lease.blocks)

    def peek(self, request: RequestId) -> Lease | None:
        return self._held.get(request)

    def take(self, request: RequestId) -> Lease | None:
        """Hand the blocks over to the caller, references and all. A reservation still queued is dropped."""
        self._queue.pop(request, None)
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
        yield from (("reservation", id, []) for id in self._queue)
        yield from (("lease", id, lease.blocks) for id, lease in self._held.items())

    def tables(self) -> list[list[BlockId]]:
        return [lease.blocks for lease in self._held.values()]

    def check_invariants(self) -> None:
        assert self._num_blocks == sum(len(lease.blocks) for lease in self._held.values())
        assert not self._queue.keys() & self._held.keys(), "an id is queued and held"
        arrivals = [wanted.arrival for wanted in self._queue.values()]
        assert arrivals == sorted(arrivals), "reservations out of order"

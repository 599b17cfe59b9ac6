"""Which contents the blocks of requests are offered to later prompts under. Pure."""

from collections.abc import Callable

from common.engine.request import EngineRequest
from common.kv_cache.block_pool import BlockPool
from common.kv_cache.prefix_cache import extend_hashes
from common.messages import BlockHash, Origin


class Names:
    """Of one pool's blocks. `root_of` starts a tenant's hash chains; None: nothing is ever named."""

    def __init__(self, pool: BlockPool, block_size: int, root_of: Callable[[bytes], BlockHash] | None) -> None:
        self._pool = pool
        self._block_size = block_size
        self._root_of = root_of

    def extend(self, hashes: list[BlockHash], tokens: list[int], origin: Origin) -> None:
        """`hashes` cover all full blocks of `tokens` then."""
        if self._root_of is not None:
            extend_hashes(hashes, tokens, self._block_size, self._root_of(origin.tenant))

    def offer(self, request: EngineRequest, first: int) -> None:
        """Name the request's full computed blocks, from index `first` on."""
        if self._root_of is None:
            return
        self.extend(request.hashes, request.tokens, request.origin)
        for index in range(first, request.num_computed // self._block_size):
            self._pool.name(request.blocks[index], request.hashes[index])

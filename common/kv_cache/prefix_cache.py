"""Names for content: a chained hash for each full block, and the longest prefix that a pool still has.

A block's hash covers everything its bytes depend on: the model, the adapter, the tenant's salt and every
token from the start of the sequence to the block's end. It depends on content alone, so that two
processes on two machines give the same block the same name.
"""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from struct import Struct
from struct import error as PackError

from common.errors import RequestError
from common.kv_cache.block_pool import BlockPool
from common.messages import BlockHash, BlockId

HASH_BYTES = 32


@lru_cache(maxsize=4096)  # one for each tenant
def root_hash(*, model_digest: str, adapter_digest: str = "", tenant_salt: bytes = b"") -> BlockHash:
    """Where a chain starts. Parts are length-prefixed, so that none can pass for its neighbour."""
    chain = blake2b(digest_size=HASH_BYTES)
    for part in (model_digest.encode(), adapter_digest.encode(), tenant_salt):
        chain.update(len(part).to_bytes(8, "little"))
        chain.update(part)
    return BlockHash(chain.digest())


def hash_blocks(tokens: Sequence[int], block_size: int, root: BlockHash) -> list[BlockHash]:
    """One hash for each full block of `tokens`. RequestError if a token id is no 32-bit number."""
    hashes: list[BlockHash] = []
    extend_hashes(hashes, tokens, block_size, root)
    return hashes


def extend_hashes(hashes: list[BlockHash], tokens: Sequence[int], block_size: int, root: BlockHash) -> None:
    """Append the hashes of the full blocks of `tokens` that `hashes` does not cover yet.

    RequestError if a token id is no 32-bit number.
    """
    pack = _packer(block_size).pack
    last = hashes[-1] if hashes else root
    for end in range((len(hashes) + 1) * block_size, len(tokens) + 1, block_size):
        try:
            packed = pack(*tokens[end - block_size : end])
        except PackError as error:
            raise RequestError(f"a token id before position {end} is no 32-bit number") from error
        last = BlockHash(blake2b(last + packed, digest_size=HASH_BYTES).digest())
        hashes.append(last)


@lru_cache
def _packer(block_size: int) -> Struct:
    return Struct(f"<{block_size}I")


def cached_prefix(pool: BlockPool, hashes: Sequence[BlockHash], num_tokens: int, block_size: int) -> list[BlockId]:
    """The blocks that hold the longest known prefix of a sequence of `num_tokens`; no reference is taken.

    Never all of the sequence: its last token must be computed, for its logits draw the next one.
    """
    blocks: list[BlockId] = []
    for content in hashes[: (num_tokens - 1) // block_size]:
        block = pool.lookup(content)
        if block is None:
            break
        blocks.append(block)
    return blocks

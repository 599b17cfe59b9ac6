"""The names of a prompt's blocks, as the nodes' caches give them: by them a coordinator finds out who has it warm."""

from collections.abc import Sequence

from common.kv_cache.prefix_cache import hash_blocks, root_hash
from common.messages import CACHE_NAME_BYTES, NodeState, View


def prefix_names(tokens: Sequence[int], view: View, model: str, *, tenant: bytes = b"") -> bytes:
    """Of every full block, in order, strung together as in `Route.prefix`.

    Nothing while no node of the model is in view: what it computes, and in blocks of what size, enters every name.
    """
    for node in view.nodes:
        card = node.card
        if card.model == model and node.state is not NodeState.INCOMPATIBLE:
            root = root_hash(model_digest=card.model_digest, tenant_salt=tenant)
            hashes = hash_blocks(tokens, card.layout.block_size, root)
            return b"".join(content[:CACHE_NAME_BYTES] for content in hashes)
    return b""

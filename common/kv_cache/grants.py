"""Who may read which blocks of one pool. Pure.

A call that promises blocks to a reader draws a secret and tells only its caller. The pool's servers hand a block
out under a secret that was granted for it, at this generation, and was not revoked since: so knowing where a
pool is served, and even which blocks it holds, opens nothing.
"""

import secrets
from collections.abc import Sequence

from common.messages import BlockId, BlockRef, Generation, RequestId

_SECRET_BYTES = 16


def new_secret() -> bytes:
    return secrets.token_bytes(_SECRET_BYTES)


class Grants:
    """Secrets are found by their hash, which is keyed afresh in every process: timing tells nothing about them."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, dict[BlockId, Generation]] = {}
        self._requests: dict[bytes, RequestId] = {}

    def grant(self, secret: bytes, refs: Sequence[BlockRef], *, request: RequestId) -> None:
        """Whoever knows `secret` may read `refs` too. Call it before anybody is told of them."""
        assert secret, "an empty secret is what a stranger has"
        self._requests[secret] = request
        blocks = self._blocks.setdefault(secret, {})
        for ref in refs:
            blocks[ref.block] = ref.generation

    def revoke(self, secret: bytes) -> None:
        """The call that drew it has ended. Idempotent, also for a secret that nothing was granted under."""
        self._blocks.pop(secret, None)
        self._requests.pop(secret, None)

    def knows(self, secret: bytes) -> bool:
        return secret in self._blocks

    def allows(self, secret: bytes, refs: Sequence[BlockRef]) -> bool:
        blocks = self._blocks.get(secret)
        return blocks is not None and all(blocks.get(ref.block) == ref.generation for ref in refs)

    @property
    def requests(self) -> tuple[RequestId, ...]:
        """Those whose blocks may be read now."""
        return tuple(self._requests.values())

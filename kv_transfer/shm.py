"""Blocks between processes of one host: the reader maps the owner's pool for reading and copies.

The owner hands its sealed memfd over an abstract unix socket; neither has a name in any file system, so a
kill -9 leaves nothing. The connection stays open for as long as the reader lives: its end is how the death of
the owner is seen. The mapping itself outlives the owner (the seals rule out SIGBUS), but what a dead owner
left in it is not trusted.

Who may read: a process of the same user (the kernel says who is at the other end of the socket) that shows the
secret of a call which is open at that moment. From then on it has the whole pool before its eyes, whatever
becomes of the call: secrets are checked once a mapping here, not at every read. Processes of one user on one
host could look into each other's memory anyway.
"""

from common.kv_cache.memory import PoolMemory
from common.messages import Incarnation, Offer
from kv_transfer.base import TransferSettings
from kv_transfer.shm_owner import ShmServer
from kv_transfer.shm_reader import ShmReader


class ShmTransport:
    name = "shm"

    def __init__(self, settings: TransferSettings | None = None) -> None:
        """Nothing can be set: no stranger reaches it, and a reader waits for nobody once it has mapped the pool."""

    def serve(self, pool: PoolMemory, *, listen_host: str = "127.0.0.1") -> "ShmServer":
        return ShmServer(pool)

    def reader(self, offer: Offer, *, owner: Incarnation, pool: PoolMemory) -> "ShmReader":
        return ShmReader(offer, owner=owner, pool=pool)

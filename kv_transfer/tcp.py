"""Blocks over TCP by way of ZeroMQ: needs no other library and no privileges.

How it works. One DEALER (reader) and one ROUTER (owner) per pair of processes; the words they exchange are in
`tcp_wire`.

1. The reader says Hello with the incarnation it means; the owner Welcomes it with its layout, or Refuses.
2. A Read names all its blocks at once. The owner streams them in order, as Chunks of about a MiB sent straight
   out of the pool (ZeroMQ's thread reads the pool's memory, nothing is copied here).
3. At most `WINDOW_BYTES` are on their way to one reader: it gives Credit for what has arrived and landed. That
   bounds what ZeroMQ may queue, for which its own high-water mark (which drops or blocks) is no use.
4. Generations are checked before a block is handed to ZeroMQ and again once the reader's credit shows that its
   bytes have arrived; only then can nothing read the block any more. The Verdict ends the read.
5. A reader that gives a read up says Cancel, and drops what still comes.
6. Death of either side is its TCP connection closing, which ZeroMQ reports through a monitor; nothing is
   reconnected. A reader whose reads make no progress for `stall_timeout_s` gives the owner up.

With keys (`common.keys`) connections are encrypted and both ends show that they are of one cluster. Without, the
secret of the call is all that keeps strangers out, and whoever sees the wire can read it: for the loopback, or a
network where everybody is trusted.
"""

from common.kv_cache.memory import PoolMemory
from common.messages import Incarnation, Offer
from kv_transfer.base import TransferSettings
from kv_transfer.tcp_owner import TcpServer
from kv_transfer.tcp_reader import TcpReader


class TcpTransport:
    name = "tcp"

    def __init__(self, settings: TransferSettings | None = None) -> None:
        self._settings = settings or TransferSettings()

    def serve(self, pool: PoolMemory, *, listen_host: str = "127.0.0.1") -> TcpServer:
        return TcpServer(pool, listen_host=listen_host, trust=self._settings.trust)

    def reader(self, offer: Offer, *, owner: Incarnation, pool: PoolMemory) -> TcpReader:
        return TcpReader(offer, owner=owner, pool=pool, settings=self._settings)

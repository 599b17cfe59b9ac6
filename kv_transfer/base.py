"""Block transfer: the reader pulls. Nobody ever writes into memory that somebody else owns.

The owner of a pool runs one `BlockServer` per transport and puts its `Offer` on the node's card. A
reader opens one `BlockReader` per owner incarnation and reads blocks into its own pool. A read names the
secret of the call that was promised the blocks, and the owner serves what was granted under it
(`PoolMemory.grants`). It is checked against the generations in the references; a block that was reused, or that
the call may not read (any more), fails the whole read (`StaleBlockError`) and its bytes are worthless.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from common.config import LinkConfig
from common.keys import Trust
from common.kv_cache.memory import PoolMemory
from common.messages import BlockId, BlockRef, HeldConnection, Incarnation, Offer


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSettings:
    """`trust` says whom a server may let in. A read that makes no progress for `stall_timeout_s` gives its owner up."""

    trust: Trust = Trust()  # noqa: RUF009 - frozen
    stall_timeout_s: float = 4.0

    @classmethod
    def of(cls, links: LinkConfig) -> "TransferSettings":
        """ConfigError if the keys that the settings name cannot be used."""
        return cls(trust=Trust.of(links), stall_timeout_s=links.lost_after_s)


class BlockServer(Protocol):
    """The owner's side. Runs on the event loop that started it; never blocks it for long."""

    async def start(self) -> Offer:
        """Bind and return where readers reach it. TransferError if this transport cannot run here.

        ConfigError if it would bind where strangers come by and nothing keeps them out (`Trust.check_bind`).
        """
        ...

    def connections(self) -> list[HeldConnection]:
        """Every reader that has said who it is and is still connected."""
        ...

    async def close(self) -> None:
        """Stop serving; leaves no socket, thread, mapping or file behind."""
        ...


class BlockReader(Protocol):
    """The reader's side of one (owner, reader) pair.

    Reads may overlap. When `read` returns or raises, its destination blocks are settled: nothing will
    write to them any more. So cancelling a read means: no new bytes are asked for, and the coroutine
    ends (CancelledError) only once those in flight have ended or the connection is closed.
    """

    async def open(self) -> None:
        """Connect and check incarnation and layout. TransferError if the owner cannot be reached so."""
        ...

    async def read(self, refs: Sequence[BlockRef], into: Sequence[BlockId], *, secret: bytes) -> None:
        """Copy `refs` of the owner's pool into blocks `into` of the local one, all in flight at once.

        `secret` came with the promise (`BlocksReady`). Raises StaleBlockError if any generation moved or the secret
        does not open the blocks (any more), PeerLostError if the owner died, TransferError else.
        """
        ...

    async def close(self) -> None:
        """End every read (they raise) and leave nothing behind."""
        ...


class Transport(Protocol):
    """A way to move blocks. Constructed from `TransferSettings`; holds nothing."""

    name: str

    def serve(self, pool: PoolMemory, *, listen_host: str = "127.0.0.1") -> BlockServer:
        """A server of `pool`, not yet started. `listen_host`: this machine's address (numeric) that readers reach."""
        ...

    def reader(self, offer: Offer, *, owner: Incarnation, pool: PoolMemory) -> BlockReader:
        """A reader of the pool of `owner` into the local `pool`; not yet open."""
        ...


TRANSPORTS = {
    "shm": "kv_transfer.shm:ShmTransport",
    "ucx": "kv_transfer.ucx:UcxTransport",
    "tcp": "kv_transfer.tcp:TcpTransport",
}
"""Name -> "module:Class", imported on use."""

"""Blocks over UCX by way of UCXX: RDMA and CUDA where a UCX built for them is installed, TCP otherwise.

How it works. The reader connects to the owner's listener and must say Hello, with a secret from the offer,
within a time limit; else the owner hangs up. To read, it posts a tagged receive into its own pool for every
block and then sends a Read; the owner checks generations, sends the blocks straight from its pool, checks
again and sends its Verdict. If it cannot send the blocks it sends a single byte in the place of each, so that
every receive always settles: UCX cannot take one back once bytes are on their way. For the same reason a
cancelled read waits for what is in flight; only a lost peer or `close` breaks the connection, and then waits
until UCX has let go of every buffer.

A frozen peer looks alive to UCX, so reads that make no progress for `stall_timeout_s` give it up.

The wheel `ucxx-cu12` brings a UCX without RDMA. `UCX_*` environment variables override the settings made here.
Traffic is not encrypted, keys or no keys, and UCX's own ports are open to everybody who can reach them: what keeps a
stranger from the blocks is the call's secret, and from that who sees no wire. For a network of its own.
"""

import functools
import importlib.util
import re
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from common.kv_cache.memory import PoolMemory
from common.messages import Incarnation, Offer
from kv_transfer.base import BlockReader, BlockServer, TransferSettings

_FAST = re.compile(r"^(rc|ud|dc)_|^cuda_|^gdr_copy")


def available() -> str | None:
    """None if UCX can be used here, else why not."""
    if importlib.util.find_spec("ucxx") is None:
        return "ucx: the library ucxx is not installed (python -m pip install -e '.[ucx]')"
    return None


@functools.cache
def has_rdma_or_cuda() -> bool:
    """Whether UCX has more to offer here than TCP. Asks UCX only if the kernel knows such a device at all."""
    devices = (*Path("/sys/class/infiniband").glob("*"), *Path("/dev").glob("nvidia[0-9]*"))
    if not devices or available() is not None:
        return False
    libucxx = importlib.import_module("ucxx._lib.libucxx")
    described: str = libucxx.UCXContext({}).info  # a context alone: no worker, no thread
    transports = re.findall(r"^#.*resource.*dev.*flags.*\s(\w+)/\S*$", described, re.MULTILINE)
    return any(_FAST.match(transport) for transport in transports)


def offers_rdma_or_cuda(offer: Offer) -> bool:
    return parse_qs(urlsplit(offer.address).query).get("fast") == ["1"]


class UcxTransport:
    name = "ucx"

    def __init__(self, settings: TransferSettings | None = None) -> None:
        self._settings = settings or TransferSettings()

    def serve(self, pool: PoolMemory, *, listen_host: str = "127.0.0.1") -> BlockServer:
        from kv_transfer.ucx_owner import UcxServer

        return UcxServer(
            pool,
            listen_host=listen_host,
            settings=self._settings,
            has_rdma_or_cuda=has_rdma_or_cuda(),
        )

    def reader(self, offer: Offer, *, owner: Incarnation, pool: PoolMemory) -> BlockReader:
        from kv_transfer.ucx_reader import UcxReader

        return UcxReader(offer, owner=owner, pool=pool, stall_timeout_s=self._settings.stall_timeout_s)

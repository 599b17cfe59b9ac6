"""Which transport a pair of nodes uses: found by trying, best first, when the pair first meets."""

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress

from common.errors import ConfigError, TransferError
from common.kv_cache.memory import PoolMemory
from common.messages import Incarnation, Offer
from common.registry import load
from kv_transfer.base import TRANSPORTS, BlockReader, BlockServer, TransferSettings, Transport
from kv_transfer.ucx import has_rdma_or_cuda, offers_rdma_or_cuda

AUTO = "auto"


async def serve_all(
    pool: PoolMemory, wanted: str, *, listen_host: str = "127.0.0.1", settings: TransferSettings | None = None
) -> list[tuple[Offer, BlockServer]]:
    """Start the servers that can run here and return them with their offers; the caller closes each.

    `wanted` is "auto" or the one transport to serve. Auto leaves ucx out where it would move bytes over plain
    TCP: it costs CPU even when idle, and `tcp` is as fast. `listen_host` is this machine's name or address as
    readers reach it. TransferError if nothing could be started, ConfigError if a setting is wrong.
    """
    address = await _address(listen_host)
    names = [wanted] if wanted != AUTO else ["shm", "tcp", *(["ucx"] if has_rdma_or_cuda() else [])]
    started: list[tuple[Offer, BlockServer]] = []
    failures: list[str] = []
    try:
        for name in names:
            transport: Transport = load(TRANSPORTS, name, kind="transport")(settings)
            server = transport.serve(pool, listen_host=address)
            try:
                started.append((await server.start(), server))
            except TransferError as error:
                failures.append(str(error))
    except BaseException:
        for _, server in started:
            await server.close()
        raise
    if not started:
        raise TransferError(f"no transport can serve here: {'; '.join(failures)}")
    return started


async def _address(listen_host: str) -> str:
    with suppress(ValueError):
        numeric = str(ipaddress.ip_address(listen_host))
        if not ipaddress.ip_address(numeric).is_unspecified:
            return numeric
        raise ConfigError(f"listen: readers on other hosts cannot reach {listen_host}; name this machine's own address")
    try:
        found = await asyncio.get_running_loop().getaddrinfo(listen_host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"listen: {listen_host!r} cannot be resolved ({error}); give an address") from error
    return str(found[0][4][0])


async def connect(
    offers: Sequence[Offer],
    *,
    owner: Incarnation,
    pool: PoolMemory,
    wanted: str,
    settings: TransferSettings | None = None,
) -> tuple[str, BlockReader]:
    """The name of the transport and an open reader over it; the caller closes it.

    `wanted` is "auto" or a transport's name. TransferError lists what was tried and why each failed.
    """
    tried: list[str] = []
    for offer in in_order(offers, wanted):
        transport: Transport = load(TRANSPORTS, offer.transport, kind="transport")(settings)
        reader = transport.reader(offer, owner=owner, pool=pool)
        try:
            await reader.open()
        except TransferError as error:
            tried.append(str(error))
            continue
        return offer.transport, reader
    if tried:
        raise TransferError(f"no way to the blocks of {owner}: {'; '.join(tried)}")
    offered = ", ".join(offer.transport for offer in offers) or "nothing"
    raise TransferError(f"no way to the blocks of {owner}: it offers {offered}, transport is set to {wanted} here")


def in_order(
    offers: Sequence[Offer], wanted: str, *, rdma_or_cuda_here: Callable[[], bool] = has_rdma_or_cuda
) -> list[Offer]:
    """shm; ucx if both sides have RDMA or CUDA; tcp; and ucx without either only where it is all there is."""
    if wanted != AUTO:
        return [offer for offer in offers if offer.transport == wanted]
    ranked: list[tuple[int, Offer]] = []
    for offer in offers:
        match offer.transport:
            case "shm":
                ranked.append((0, offer))
            case "ucx":
                ranked.append((1 if offers_rdma_or_cuda(offer) and rdma_or_cuda_here() else 3, offer))
            case "tcp":
                ranked.append((2, offer))
            case _:
                pass  # a newer owner may offer what is not known here
    return [offer for _, offer in sorted(ranked, key=lambda pair: pair[0])]

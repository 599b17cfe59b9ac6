from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from urllib.parse import urlsplit

import numpy as np
import pytest

from common.clock import new_id
from common.errors import ConfigError, TransferError
from common.kv_cache.memory import PoolMemory, allocate
from common.messages import BlockId, BlockRef, Generation, Incarnation, KVLayout, LayerKV, Offer, RequestId
from kv_transfer import choose
from kv_transfer.shm_wire import this_host

LAYOUT = KVLayout(block_size=4, dtype="float32", itemsize=4, layers=(LayerKV(1, 8, 8),))
SLOW_UCX = Offer("ucx", "ucx://127.0.0.1:1?secret=0&fast=0")
FAST_UCX = Offer("ucx", "ucx://127.0.0.1:1?secret=0&fast=1")
SHM, TCP = Offer("shm", "nobody", this_host()), Offer("tcp", "tcp://127.0.0.1:1")


def pool() -> PoolMemory:
    made = allocate(LAYOUT, 4, Incarnation(new_id()))
    made.blocks[:] = 5
    made.grants.grant(b"secret", [BlockRef(BlockId(1), Generation(0))], request=RequestId("r"))
    return made


@pytest.fixture
async def closing() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def served(source: PoolMemory, wanted: str, closing: AsyncExitStack) -> list[Offer]:
    started = await choose.serve_all(source, wanted)
    for _, server in started:
        closing.push_async_callback(server.close)
    return [offer for offer, _ in started]


async def test_auto_serves_and_takes_shared_memory_on_one_host(closing: AsyncExitStack) -> None:
    source, destination = pool(), pool()
    offers = await served(source, "auto", closing)
    assert {"shm", "tcp"} <= {offer.transport for offer in offers}
    name, reader = await choose.connect(offers, owner=source.incarnation, pool=destination, wanted="auto")
    await reader.read([BlockRef(BlockId(1), Generation(0))], [BlockId(2)], secret=b"secret")
    await reader.close()
    assert name == "shm"
    np.testing.assert_array_equal(destination.blocks[2], source.blocks[1])


async def test_auto_falls_back_to_tcp_where_shared_memory_does_not_reach(closing: AsyncExitStack) -> None:
    source = pool()
    offers = [SHM, *[offer for offer in await served(source, "auto", closing) if offer.transport == "tcp"]]
    name, reader = await choose.connect(offers, owner=source.incarnation, pool=pool(), wanted="auto")
    await reader.close()
    assert name == "tcp"


async def test_a_named_transport_is_served_and_taken_alone(closing: AsyncExitStack) -> None:
    source = pool()
    offers = await served(source, "tcp", closing)
    assert [offer.transport for offer in offers] == ["tcp"]
    with pytest.raises(TransferError, match="it offers tcp, transport is set to shm here"):
        await choose.connect(offers, owner=source.incarnation, pool=pool(), wanted="shm")


async def test_a_failure_says_what_was_tried_and_why_it_failed() -> None:
    with pytest.raises(TransferError, match=r"shm: the owner cannot be reached.*; tcp: the owner at .* is gone"):
        await choose.connect([TCP, SHM], owner=Incarnation("0" * 32), pool=pool(), wanted="auto")


async def test_shared_memory_of_another_host_is_not_tried() -> None:
    offers = [Offer("shm", "nobody", "another/net:[1]")]
    with pytest.raises(TransferError, match="shm: the owner is on another host"):
        await choose.connect(offers, owner=Incarnation("0" * 32), pool=pool(), wanted="auto")


@pytest.mark.parametrize(
    ("listen_host", "reason"), [("0.0.0.0", "readers on other hosts"), ("::", "readers"), ("no such", "resolved")]
)
async def test_an_address_that_readers_cannot_reach_is_a_config_error(listen_host: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"listen: .*{reason}"):
        await choose.serve_all(pool(), "tcp", listen_host=listen_host)


async def test_a_name_is_resolved_before_it_is_offered(closing: AsyncExitStack) -> None:
    for offer, server in await choose.serve_all(pool(), "tcp", listen_host="localhost"):
        closing.push_async_callback(server.close)
        assert urlsplit(offer.address).hostname in ("127.0.0.1", "::1")


async def test_an_owner_without_offers_is_said_to_offer_nothing() -> None:
    with pytest.raises(TransferError, match="it offers nothing"):
        await choose.connect([], owner=Incarnation("0" * 32), pool=pool(), wanted="auto")


async def test_an_unknown_transport_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="unknown transport 'pigeon'; known: shm, tcp, ucx"):
        await choose.serve_all(pool(), "pigeon")


@pytest.mark.parametrize(
    ("offers", "fast_here", "order"),
    [
        ([TCP, FAST_UCX, SHM], True, ["shm", "ucx", "tcp"]),
        ([TCP, FAST_UCX, SHM], False, ["shm", "tcp", "ucx"]),
        ([TCP, SLOW_UCX, SHM], True, ["shm", "tcp", "ucx"]),
        ([Offer("pigeon", "loft"), SLOW_UCX], False, ["ucx"]),
    ],
)
def test_ucx_comes_before_tcp_only_where_both_have_rdma_or_cuda(
    offers: list[Offer], fast_here: bool, order: list[str]
) -> None:
    ranked = choose.in_order(offers, choose.AUTO, rdma_or_cuda_here=lambda: fast_here)
    assert [offer.transport for offer in ranked] == order

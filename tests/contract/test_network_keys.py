"""Who is let in over ZeroMQ when a cluster has keys, and what the others are told."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from common.clock import new_id
from common.errors import ConfigError, PeerLostError
from common.keys import Keys, Trust
from common.messages import Incarnation, NodeId, Route, View, Watch
from common.rpc import curve
from common.rpc.base import IncomingCall
from common.rpc.link import ZmqNetwork
from tests.contract.network_bench import QUICK, Bench, ask, count_to_five, drain, leave, new_trust

ONE_HAS_NONE = "one of us has keys and the other has none"
OTHER_CLUSTER = "it took us for another cluster: its keys are not ours"


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench("tcp and keys", tmp_path)
    yield bench
    await bench.network.close()


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Why strangers were refused, one for each."""
    reasons: list[str] = []
    monkeypatch.setattr(curve._sparing, "warning", lambda event, *, why, **_: reasons.append(why))
    return reasons


@asynccontextmanager
async def stranger(trust: Trust) -> AsyncIterator[ZmqNetwork]:
    network = ZmqNetwork(times=QUICK, trust=trust)
    yield network
    await network.close()


async def is_refused(trust: Trust, address: str) -> None:
    """A process that trusts so cannot open a call, and is told why in time."""
    async with stranger(trust) as network:
        client = network.client(node=NodeId("stranger"), incarnation=Incarnation(new_id()))
        began_s = time.monotonic()
        with pytest.raises(PeerLostError, match=r"refused: .*keys"):
            await ask(client, address)
        assert time.monotonic() - began_s < QUICK.connect_timeout_s


async def is_refused_and_logged(bench: Bench, trust: Trust, address: str, logged: list[str], why: str) -> None:
    """So is the listener, unless its connection broke before it came to look."""
    await is_refused(trust, address)
    await bench.until(lambda: bool(logged))
    assert set(logged) <= {why, "it hung up in the handshake"}


async def test_without_keys_nobody_is_let_in(bench: Bench, logged: list[str]) -> None:
    server = await bench.serve(count_to_five)
    await is_refused_and_logged(bench, Trust(), server.address, logged, ONE_HAS_NONE)
    assert server.num_links == 0
    assert await ask(bench.client, server.address) == [0, 1, 2, 3, 4]


async def test_keys_of_another_cluster_let_nobody_in(bench: Bench, logged: list[str], tmp_path: Path) -> None:
    server = await bench.serve(count_to_five)
    others = new_trust(tmp_path / "others")
    await is_refused_and_logged(
        bench, others, server.address, logged, "it took us for another cluster: its keys are not ours"
    )
    assert server.num_links == 0


async def test_knowing_the_servers_key_is_not_enough(bench: Bench, logged: list[str], tmp_path: Path) -> None:
    """What the allowlist is for: ZeroMQ by itself would let any client's key in."""
    server = await bench.serve(count_to_five)
    ours, others = bench.trust.keys, new_trust(tmp_path / "others").keys
    assert ours is not None and others is not None
    forged = Trust(keys=Keys(server=replace(ours.server, secret=others.server.secret), client=others.client))
    await is_refused_and_logged(bench, forged, server.address, logged, "its key is not the cluster's")
    assert server.num_links == 0


async def test_without_a_doorkeeper_nobody_is_let_in(bench: Bench) -> None:
    """ZeroMQ's own default is the opposite."""
    assert bench.trust.keys is not None
    with zmq.Context() as context, context.socket(zmq.ROUTER) as listener:
        curve.as_listener(listener, bench.trust.keys)
        port = listener.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(PeerLostError):
            await bench.enter(f"tcp://127.0.0.1:{port}")
        assert not listener.poll(0), "a word was let through"


async def test_a_listener_without_keys_gets_no_word_from_a_process_that_has_some(
    bench: Bench, logged: list[str]
) -> None:
    async with stranger(Trust()) as network:
        server = await network.serve(
            "tcp://127.0.0.1:0", {Watch: count_to_five}, node=NodeId("x"), incarnation=Incarnation("x")
        )
        await is_refused_and_logged(
            bench, bench.trust, server.address, logged, "one of us has keys and the other has none"
        )
        assert server.num_links == 0


async def test_many_strangers_harm_no_call_and_leave_nothing(bench: Bench, logged: list[str]) -> None:
    async def hold(call: IncomingCall) -> None:
        call.send(View())
        await asyncio.Event().wait()

    server = await bench.serve(count_to_five, hold)
    call = await bench.enter(server.address, Route("m", 1))
    for _ in range(10):
        await asyncio.gather(*(is_refused(Trust(), server.address) for _ in range(20)))
    assert await ask(bench.client, server.address) == [0, 1, 2, 3, 4]
    assert (server.num_links, server.num_calls) == (1, 1)
    await leave(call)


async def test_nothing_of_a_call_can_be_read_on_the_wire(bench: Bench) -> None:
    server = await bench.serve(count_to_five, count_to_five)
    host, port = server.address.removeprefix("tcp://").split(":")
    seen = bytearray()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while block := await reader.read(1 << 16):
            seen.extend(block)
            writer.write(block)
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection(host, int(port))
        await asyncio.gather(copy(reader, there[1]), copy(there[0], writer))

    eavesdropper = await asyncio.start_server(relay, "127.0.0.1", 0)
    address = f"tcp://127.0.0.1:{eavesdropper.sockets[0].getsockname()[1]}"
    async with bench.client.open(address, Route("a very secret model", 1)) as call:
        assert await drain(call) == [0, 1, 2, 3, 4]
    await bench.client.close()
    await bench.until(lambda: server.num_links == 0)
    eavesdropper.close()
    await eavesdropper.wait_closed()
    assert len(seen) > 500
    for word in (b"a very secret model", b"caller", b"Route", b"Tokens"):
        assert word not in seen


async def test_beyond_this_host_a_server_needs_keys(bench: Bench) -> None:
    async with stranger(Trust()) as network:
        with pytest.raises(ConfigError, match="--keys"):
            await network.serve("tcp://0.0.0.0:0", {}, node=NodeId("x"), incarnation=Incarnation("x"))
    server = await bench.serve(count_to_five, address="tcp://0.0.0.0:0")
    assert await ask(bench.client, server.address.replace("0.0.0.0", "127.0.0.1")) == [0, 1, 2, 3, 4]

"""The in-process network: its clock, its faults, and what endpoints make of them."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from common.clock import ManualClock, SystemClock
from common.errors import BatonError, DeadlineError, PeerLostError
from common.messages import Incarnation, NodeId, Tokens, Watch
from common.rpc.base import IncomingCall, OutgoingCall
from common.rpc.call import LinkTimes
from common.rpc.carrier import Envelope
from common.rpc.client import ClientEndpoint
from common.rpc.memory import Faults, MemoryNetwork
from common.rpc.server import ServerEndpoint

A, B = Incarnation("a"), Incarnation("b")
LOST_S = LinkTimes().lost_after_s


@pytest.fixture
async def network() -> AsyncIterator[MemoryNetwork]:
    network = MemoryNetwork()
    yield network
    await network.close()
    await network.settle()
    assert asyncio.all_tasks() == {asyncio.current_task()}


class Feed:
    """A server whose test yields the items, and a client with one call open to it."""

    def __init__(self, network: MemoryNetwork) -> None:
        self.network = network
        self.client = network.client(node=NodeId("a"), incarnation=A)
        self.calls: list[IncomingCall] = []
        self.num_ended = 0
        self.got: list[int] = []
        self.end: BaseException | None = None
        self.server: ServerEndpoint
        self.task: asyncio.Task[None]

    async def _serve(self, call: IncomingCall) -> None:
        self.calls.append(call)
        try:
            await asyncio.Event().wait()
        finally:
            self.num_ended += 1

    async def _read(self, timeout_s: float | None) -> None:
        try:
            async with self.client.open(self.server.address, Watch(), timeout_s=timeout_s) as call:
                async for item in call:
                    assert isinstance(item, Tokens)
                    self.got += item.tokens
        except BatonError as error:
            self.end = error

    async def open(self, *, timeout_s: float | None = None) -> "Feed":
        self.server = await self.network.serve(
            "tcp://127.0.0.1:0", {Watch: self._serve}, node=NodeId("b"), incarnation=B
        )
        self.task = asyncio.create_task(self._read(timeout_s))
        await self.network.settle()
        return self

    def send(self, *numbers: int) -> None:
        for number in numbers:
            self.calls[0].send(Tokens([number]))

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])


async def test_messages_without_delay_arrive_while_the_clock_stands(network: MemoryNetwork) -> None:
    feed = await Feed(network).open()
    feed.send(1, 2, 3)
    await network.settle()
    assert feed.got == [1, 2, 3]
    assert network.clock.now_s() == 0.0
    await feed.stop()


async def test_a_delay_passes_only_with_the_clock(network: MemoryNetwork) -> None:
    feed = await Feed(network).open()
    network.set_faults(Faults(delay_s=0.2))
    feed.send(1)
    await network.advance(0.19)
    assert feed.got == []
    await network.advance(0.01)
    assert feed.got == [1]
    await feed.stop()


async def test_an_idle_link_lives_on_beats_alone(network: MemoryNetwork) -> None:
    feed = await Feed(network).open()
    await network.advance(120.0)
    feed.send(1)
    await network.settle()
    assert feed.got == [1]
    await feed.stop()


async def test_all_frames_of_one_turn_travel_in_one_message(
    network: MemoryNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = await Feed(network).open()
    carried: list[Envelope] = []
    carry = network.carrier.carry
    monkeypatch.setattr(network.carrier, "carry", lambda envelope: (carried.append(envelope), carry(envelope)))
    feed.send(*range(50))
    await network.settle()
    assert feed.got == list(range(50))
    assert len(carried) == 1
    await feed.stop()


async def test_a_silent_partition_ends_both_sides_after_the_lost_interval(network: MemoryNetwork) -> None:
    feed = await Feed(network).open()
    network.partition(A, B)
    await network.advance(LOST_S - 0.5)
    assert feed.end is None
    assert feed.num_ended == 0
    await network.advance(1.0)
    assert isinstance(feed.end, PeerLostError)
    assert feed.num_ended == 1
    assert feed.server.num_calls == feed.client.num_links == 0


async def test_a_short_partition_costs_nothing(network: MemoryNetwork) -> None:
    feed = await Feed(network).open()
    network.partition(A, B)
    feed.send(1)
    await network.advance(LOST_S / 2)
    network.heal(A, B)
    await network.advance(LOST_S * 2)
    assert feed.got == [1]
    assert feed.end is None
    await feed.stop()


async def test_a_frozen_caller_is_lost_and_learns_it_when_it_wakes(network: MemoryNetwork) -> None:
    feed = await Feed(network).open()
    network.freeze(A)
    await network.advance(LOST_S + 1.0)
    assert feed.num_ended == 1
    assert feed.end is None
    network.unfreeze(A)
    await network.advance(1.0)
    assert isinstance(feed.end, PeerLostError)


async def test_a_process_that_slept_itself_declares_nobody_dead(network: MemoryNetwork) -> None:
    """Its peer's beats wait in the socket: after a sleep shorter than the peer's patience all goes on."""
    feed = await Feed(network).open()
    network.freeze(A)
    await network.advance(LOST_S - 0.6)
    feed.send(1)
    network.unfreeze(A)
    await network.advance(LOST_S * 2)
    assert feed.got == [1]
    assert feed.end is None
    await feed.stop()


@pytest.mark.parametrize("silently", [False, True])
async def test_a_killed_server_is_lost_at_once_or_after_the_interval(network: MemoryNetwork, silently: bool) -> None:
    feed = await Feed(network).open()
    network.kill(feed.server.address, silently=silently)
    await network.settle()
    assert (feed.end is None) == silently
    await network.advance(LOST_S + 0.5)
    assert isinstance(feed.end, PeerLostError)
    assert feed.num_ended == 1
    again = await network.serve(feed.server.address, {}, node=NodeId("b"), incarnation=Incarnation("b2"))
    assert again.address == feed.server.address


async def test_a_killed_client_takes_its_calls_along(network: MemoryNetwork) -> None:
    feed = await Feed(network).open()
    network.kill(A)
    await network.settle()
    assert feed.num_ended == 1
    assert isinstance(feed.end, PeerLostError)


async def test_a_cut_link_ends_both_sides_and_the_next_call_makes_a_new_one(network: MemoryNetwork) -> None:
    feed = await Feed(network).open()
    feed.send(1)
    network.cut(A, B)
    await network.settle()
    assert feed.got == []
    assert isinstance(feed.end, PeerLostError)
    assert feed.num_ended == 1
    call = feed.client.open(feed.server.address, Watch())
    await call.__aenter__()
    assert feed.server.num_calls == 1
    await call.__aexit__(None, None, None)
    await network.settle()
    assert feed.server.num_calls == 0


async def test_a_lost_item_is_noticed_by_the_next_item_or_the_next_beat(network: MemoryNetwork) -> None:
    feed = await Feed(network).open()
    feed.send(1)
    await network.settle()
    network.set_faults(Faults(drop=1.0), A, B)
    feed.send(2)
    await network.settle()
    network.set_faults(Faults(), A, B)
    await network.advance(1.0)
    assert feed.got == [1]
    assert isinstance(feed.end, PeerLostError)
    assert feed.num_ended == 1


async def test_an_item_too_large_to_send_ends_its_call_and_no_other(
    network: MemoryNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = await Feed(network).open()
    second = asyncio.create_task(feed._read(None))
    await network.settle()
    monkeypatch.setattr("common.rpc.endpoint.MAX_MESSAGE_BYTES", 1_000)
    feed.calls[0].send(Tokens(list(range(1_000))))
    feed.calls[1].send(Tokens([7]))
    await network.advance(1.0)
    assert isinstance(feed.end, PeerLostError)
    assert feed.got == [7]
    assert feed.server.num_calls == 1
    second.cancel()
    await asyncio.wait([second])


async def test_a_deadline_is_met_to_the_instant(network: MemoryNetwork) -> None:
    feed = await Feed(network).open(timeout_s=0.3)
    await network.advance(0.29)
    assert feed.end is None
    await network.advance(0.01)
    assert isinstance(feed.end, DeadlineError)
    assert feed.num_ended == 1


async def history(seed: int) -> tuple[list[list[int]], list[str]]:
    """40 calls of 20 items each over a bad wire: what came, and how each call ended."""
    network = MemoryNetwork(seed=seed)
    network.set_faults(Faults(delay_s=0.01, jitter_s=0.05, drop=0.003, duplicate=0.05, reorder=0.01))

    async def count(call: IncomingCall) -> None:
        for number in range(20):
            call.send(Tokens([number]))
            await asyncio.sleep(0)

    server = await network.serve("tcp://127.0.0.1:0", {Watch: count}, node=NodeId("b"), incarnation=B)
    client = network.client(node=NodeId("a"), incarnation=A)
    got: list[list[int]] = [[] for _ in range(40)]
    ends = [""] * 40

    async def read(index: int) -> None:
        try:
            async with client.open(server.address, Watch()) as call:
                await collect(call, got[index])
            ends[index] = "finished"
        except BatonError as error:
            ends[index] = error.code

    tasks = []
    for index in range(40):
        tasks.append(asyncio.create_task(read(index)))
        await network.advance(0.1)
    await network.advance(30.0)
    assert all(task.done() for task in tasks)
    assert server.num_calls == client.num_calls == 0
    await network.close()
    return got, ends


async def collect(call: OutgoingCall, into: list[int]) -> None:
    async for item in call:
        assert isinstance(item, Tokens)
        into += item.tokens


async def test_over_a_bad_wire_every_call_is_whole_or_fails_and_a_seed_is_a_history() -> None:
    seen = set()
    for seed in range(3):
        got, ends = await history(seed)
        for items, end in zip(got, ends, strict=True):
            assert items == list(range(len(items)))
            assert len(items) == 20 if end == "finished" else end == "peer_lost"
            seen.add(end)
    assert seen == {"finished", "peer_lost"}
    assert await history(1) == await history(1)


async def test_with_a_clock_that_runs_by_itself_timers_fire_by_themselves() -> None:
    network = MemoryNetwork(clock=SystemClock())
    client: ClientEndpoint = network.client(node=NodeId("a"), incarnation=A)

    async def hold(call: IncomingCall) -> None:
        await asyncio.Event().wait()

    server = await network.serve("ipc://x", {Watch: hold}, node=NodeId("b"), incarnation=B)
    with pytest.raises(DeadlineError):
        async with client.open(server.address, Watch(), timeout_s=0.02) as call:
            await collect(call, [])
    await network.close()


async def test_a_loop_that_never_rests_is_reported_instead_of_waited_for(
    network: MemoryNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.rpc.memory._MOST_TURNS", 100)

    async def spin() -> None:
        while True:  # noqa: ASYNC110 - spinning is the point
            await asyncio.sleep(0)

    task = asyncio.create_task(spin())
    with pytest.raises(RuntimeError, match="never settles"):
        await network.settle()
    task.cancel()
    await asyncio.wait([task])
    assert isinstance(network.clock, ManualClock)

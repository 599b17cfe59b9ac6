"""One contract for every network: ZeroMQ over tcp and ipc, and memory with a clock that the test moves."""

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import pytest
import uvloop
import zmq

from common.clock import new_id
from common.errors import (
    BatonError,
    CallCancelledError,
    ConfigError,
    DeadlineError,
    IncompatibleError,
    InternalError,
    NodeError,
    OverloadedError,
    PeerLostError,
)
from common.messages import (
    WIRE_VERSION,
    CallId,
    End,
    Hello,
    Incarnation,
    NodeId,
    NodeLoad,
    Open,
    Refuse,
    Report,
    RequestBody,
    Route,
    Tokens,
    Watch,
    decode_from_callee,
    encode,
)
from common.rpc.base import Handler, IncomingCall, OutgoingCall
from common.rpc.call import LinkTimes
from common.rpc.client import ClientEndpoint
from common.rpc.endpoint import MAX_MESSAGE_BYTES
from common.rpc.link import ZmqNetwork
from common.rpc.memory import MemoryNetwork
from common.rpc.server import ServerEndpoint

QUICK = LinkTimes(beat_s=0.1, lost_after_s=2.0, connect_timeout_s=1.0, accept_timeout_s=2.0)
ROUTE = Route("model", 1)
T = TypeVar("T")


class Bench:
    """A network under test, and what a test needs to drive it."""

    def __init__(self, kind: str, folder: Path) -> None:
        in_memory = kind == "memory"
        self.network: ZmqNetwork | MemoryNetwork = MemoryNetwork(times=QUICK) if in_memory else ZmqNetwork(times=QUICK)
        self.address = f"ipc://{folder}/calls" if kind == "ipc" else "tcp://127.0.0.1:0"
        self.client = self.new_client()

    def new_client(self) -> ClientEndpoint:
        return self.network.client(node=NodeId("caller"), incarnation=Incarnation(new_id()))

    async def serve(self, watch: Handler, route: Handler | None = None, *, address: str = "") -> ServerEndpoint:
        handlers: dict[type, Handler] = {Watch: watch} if route is None else {Watch: watch, Route: route}
        return await self.network.serve(
            address or self.address, handlers, node=NodeId("callee"), incarnation=Incarnation(new_id())
        )

    async def until(self, condition: Callable[[], bool], within_s: float = 5.0) -> None:
        """Wait for what no event tells: the other side's books. In memory this is what moves the clock."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + within_s
        while not condition():
            if isinstance(self.network, MemoryNetwork):
                await self.network.advance(0.05)
            else:
                turn = loop.create_future()
                loop.call_later(0.002, turn.set_result, None)
                await turn
            assert loop.time() < end_s, "it never came true"

    async def result(self, work: Awaitable[T]) -> T:
        task = asyncio.ensure_future(work)
        await self.until(task.done)
        return task.result()

    async def enter(
        self, address: str, body: RequestBody | None = None, *, incarnation: Incarnation | None = None
    ) -> OutgoingCall:
        """A call that the test holds open until it `leave`s it."""
        return await self.result(self.client.open(address, body or Watch(), incarnation=incarnation).__aenter__())

    def kill(self, server: ServerEndpoint) -> None:
        """Its connections break without a word, as when its process is killed."""
        if isinstance(self.network, MemoryNetwork):
            self.network.kill(server.address)
        else:
            server.listener.close()
            server.abort("killed")


@pytest.fixture(params=["tcp", "ipc", "memory"])
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    """Checks that nothing of the network is left: no call, task, descriptor or thread."""
    before = descriptors_and_threads()
    bench = Bench(request.param, tmp_path)
    yield bench
    await bench.network.close()
    await bench.until(lambda: asyncio.all_tasks() == {asyncio.current_task()})
    assert bench.client.num_calls == bench.client.num_links == 0
    assert descriptors_and_threads() == before


def descriptors_and_threads() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


class Held:
    """A handler that waits until it is cancelled, and tells when it has cleaned up."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.ended = asyncio.Event()

    async def __call__(self, call: IncomingCall) -> None:
        self.started.set()
        call.send(Tokens([0]))
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.set()


async def count_to_five(call: IncomingCall) -> None:
    for number in range(5):
        call.send(Tokens([number]))
        if number % 2:
            await asyncio.sleep(0)


async def leave(call: OutgoingCall) -> None:
    await call.__aexit__(None, None, None)


async def drain(call: OutgoingCall) -> list[int]:
    return [token async for item in call if isinstance(item, Tokens) for token in item.tokens]


async def ask(client: ClientEndpoint, address: str) -> list[int]:
    async with client.open(address, Watch()) as call:
        return await drain(call)


async def test_items_stream_in_order_and_a_good_end_ends_the_iteration(bench: Bench) -> None:
    server = await bench.serve(count_to_five)
    assert await bench.result(ask(bench.client, server.address)) == [0, 1, 2, 3, 4]
    await bench.until(lambda: server.num_calls == 0)


async def test_bodies_sent_in_reach_the_handler_in_order(bench: Bench) -> None:
    async def echo(call: IncomingCall) -> None:
        async for body in call:
            assert isinstance(body, Report)
            call.send(Tokens([body.load.num_calls]))
            if body.load.num_calls == 3:
                return

    server = await bench.serve(echo)

    async def talk() -> list[int]:
        async with bench.client.open(server.address, Watch()) as call:
            for number in range(4):
                call.send(Report(NodeLoad(num_calls=number)))
            return await drain(call)

    assert await bench.result(talk()) == [0, 1, 2, 3]


async def test_the_handler_sees_who_calls_with_what_and_how_long_is_left(bench: Bench) -> None:
    seen: list[tuple[object, NodeId, bool]] = []

    async def look(call: IncomingCall) -> None:
        seen.append((call.body, call.caller, call.remaining_s is not None and 0 < call.remaining_s <= 9.0))

    server = await bench.serve(look)

    async def talk() -> None:
        async with bench.client.open(server.address, Watch(), timeout_s=9.0) as call:
            assert call.peer == server.incarnation
            await drain(call)

    await bench.result(talk())
    assert seen == [(Watch(), "caller", True)]


async def test_leaving_a_call_cancels_its_handler(bench: Bench) -> None:
    held = Held()
    server = await bench.serve(held)
    call = await bench.enter(server.address)
    await bench.result(anext(aiter(call)))
    assert server.num_calls == 1
    await leave(call)
    await bench.until(held.ended.is_set)
    await bench.until(lambda: server.num_calls == 0)


async def test_cancelling_the_task_that_waits_for_an_item_cancels_the_handler(bench: Bench) -> None:
    held = Held()
    server = await bench.serve(held)
    task = asyncio.create_task(ask(bench.client, server.address))
    await bench.until(held.started.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await bench.until(lambda: held.ended.is_set() and server.num_calls == 0)


async def test_cancelling_while_entering_starts_nothing_that_stays(bench: Bench) -> None:
    held = Held()
    server = await bench.serve(held)
    task = asyncio.create_task(ask(bench.client, server.address))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await bench.until(lambda: server.num_calls == 0 and bench.client.num_calls == 0)


async def test_the_far_sides_error_arrives_as_its_own_class(bench: Bench) -> None:
    async def full(call: IncomingCall) -> None:
        call.send(Tokens([1]))
        raise OverloadedError("full", retry_after_s=2.5)

    server = await bench.serve(full)
    with pytest.raises(OverloadedError, match="full") as caught:
        await bench.result(ask(bench.client, server.address))
    assert caught.value.retry_after_s == 2.5


async def test_a_bug_in_one_handler_is_logged_and_harms_no_other_call(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(call: IncomingCall) -> None:
        raise ValueError("secret detail")

    held = Held()
    server = await bench.serve(held, broken)
    other = await bench.enter(server.address)

    async def talk() -> None:
        async with bench.client.open(server.address, ROUTE) as call:
            await drain(call)

    with pytest.raises(InternalError, match="ValueError in the Route handler") as caught:
        await bench.result(talk())
    assert "secret detail" not in caught.value.message
    assert any(record.exc_info and "secret detail" in str(record.exc_info[1]) for record in caplog.records)
    assert server.num_calls == 1
    await leave(other)
    await bench.until(held.ended.is_set)


async def test_a_request_that_nobody_handles_is_refused(bench: Bench) -> None:
    server = await bench.serve(count_to_five)
    with pytest.raises(IncompatibleError, match="callee serves no Route"):
        await bench.enter(server.address, ROUTE)


async def test_a_deadline_ends_the_call_on_both_sides(bench: Bench) -> None:
    held = Held()
    server = await bench.serve(held)

    async def talk() -> None:
        async with bench.client.open(server.address, Watch(), timeout_s=0.15) as call:
            await drain(call)

    with pytest.raises(DeadlineError):
        await bench.result(talk())
    await bench.until(lambda: held.ended.is_set() and server.num_calls == 0)


async def test_closing_the_server_ends_every_call_after_its_handler(bench: Bench) -> None:
    held = Held()
    server = await bench.serve(held)
    call = await bench.enter(server.address)
    await bench.result(server.close())
    assert held.ended.is_set()
    assert server.num_calls == 0
    with pytest.raises(NodeError):
        await bench.result(drain(call))


async def test_closing_the_client_ends_every_call(bench: Bench) -> None:
    held = Held()
    server = await bench.serve(held)
    call = await bench.enter(server.address)
    await bench.client.close()
    with pytest.raises(CallCancelledError):
        await drain(call)
    await bench.until(lambda: held.ended.is_set() and server.num_calls == 0, within_s=1.0)


async def test_a_killed_server_is_noticed_within_a_second(bench: Bench) -> None:
    held = Held()
    server = await bench.serve(held)
    call = await bench.enter(server.address)
    began_s = time.monotonic()
    bench.kill(server)
    with pytest.raises(PeerLostError):
        await bench.result(drain(call))
    assert time.monotonic() - began_s < 1.0
    await bench.until(lambda: server.num_calls == 0)


async def test_a_new_incarnation_at_the_same_address_is_reached_and_the_old_one_is_refused(bench: Bench) -> None:
    first = await bench.serve(count_to_five)
    address, old = first.address, first.incarnation
    assert await bench.result(ask(bench.client, address)) == [0, 1, 2, 3, 4]
    bench.kill(first)
    await bench.until(lambda: bench.client.num_links == 0)
    second = await bench.serve(count_to_five, address=address)
    assert second.address == address
    assert await bench.result(ask(bench.client, address)) == [0, 1, 2, 3, 4]
    with pytest.raises(PeerLostError, match="another incarnation"):
        await bench.enter(address, incarnation=old)

    async def pinned() -> Incarnation:
        async with bench.client.open(address, Watch(), incarnation=second.incarnation) as call:
            return call.peer

    assert await bench.result(pinned()) == second.incarnation


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "ipc:///nowhere/at/all", "no address"])
async def test_an_address_where_nobody_listens_is_a_lost_peer(bench: Bench, address: str) -> None:
    with pytest.raises(PeerLostError):
        await bench.enter(address)
    assert bench.client.num_calls == bench.client.num_links == 0


async def test_an_address_in_use_or_malformed_is_a_config_error_that_names_it(bench: Bench) -> None:
    server = await bench.serve(count_to_five)
    for address in (server.address, "nonsense"):
        with pytest.raises(ConfigError, match=f"{address}.*(choose another|expected)"):
            await bench.serve(count_to_five, address=address)
    assert await bench.result(ask(bench.client, server.address)) == [0, 1, 2, 3, 4]


async def test_a_thousand_calls_at_once_leave_nothing(bench: Bench) -> None:
    server = await bench.serve(count_to_five)
    answers = await bench.result(asyncio.gather(*(ask(bench.client, server.address) for _ in range(1000))))
    assert answers == [[0, 1, 2, 3, 4]] * 1000
    await bench.until(lambda: server.num_calls == 0)
    assert (bench.client.num_calls, bench.client.num_links, server.num_links) == (0, 1, 1)


async def test_an_unsendable_item_ends_its_call_and_no_other(bench: Bench) -> None:
    async def wrong(call: IncomingCall) -> None:
        call.send(object())  # type: ignore[arg-type]
        call.send(Tokens([1]))

    server = await bench.serve(count_to_five, wrong)

    async def ask_wrong() -> None:
        async with bench.client.open(server.address, ROUTE) as call:
            await drain(call)

    wrong_call = asyncio.ensure_future(ask_wrong())
    assert await bench.result(ask(bench.client, server.address)) == [0, 1, 2, 3, 4]
    with pytest.raises(PeerLostError):
        await bench.result(wrong_call)


# --- ZeroMQ alone ---------------------------------------------------------------------------------------------


@pytest.fixture
def kind() -> str:
    return "tcp"


@pytest.fixture
async def wild(kind: str, tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(kind, tmp_path)
    yield bench
    await bench.network.close()


HELLO = encode([Hello(WIRE_VERSION, NodeId("stranger"), Incarnation("0"))])
BAD_MESSAGES = {
    "no MessagePack": [b"\xc1\xff garbage"],
    "nothing": [b""],
    "no list": [b"\x01"],
    "an unknown frame": [b"\x91\x81\xa4type\xa5Dance"],
    "the other direction": [encode([End(CallId(1), 0)])],
    "too large": [b"\x00" * (MAX_MESSAGE_BYTES + 1)],
    "several parts": [b"one", b"two"],
}


@pytest.mark.parametrize("after_hello", [True, False], ids=["on a link", "as the first message"])
@pytest.mark.parametrize("message", BAD_MESSAGES.values(), ids=BAD_MESSAGES.keys())
async def test_a_malformed_message_costs_its_sender_the_link_and_nobody_else_anything(
    wild: Bench, message: list[bytes], after_hello: bool
) -> None:
    held = Held()
    server = await wild.serve(count_to_five, held)
    other = await wild.enter(server.address, ROUTE)
    context = zmq.Context()
    raw = context.socket(zmq.DEALER)
    raw.connect(server.address)
    if after_hello:
        raw.send(HELLO)
        await wild.until(lambda: server.num_links == 2)
    raw.send_multipart(message)
    await wild.until(lambda: server.num_links == 1, within_s=1.0)
    assert await wild.result(ask(wild.client, server.address)) == [0, 1, 2, 3, 4]
    assert (server.num_links, server.num_calls) == (1, 1)
    assert not held.ended.is_set()
    raw.close(linger=0)
    context.term()
    await leave(other)


async def test_a_peer_whose_link_was_given_up_is_told_so(wild: Bench) -> None:
    server = await wild.serve(count_to_five)
    context = zmq.Context()
    raw = context.socket(zmq.DEALER)
    raw.connect(server.address)
    raw.send(encode([Open(CallId(1), Watch())]))
    await wild.until(lambda: bool(raw.getsockopt(zmq.EVENTS) & zmq.POLLIN))
    [refuse] = decode_from_callee(raw.recv())
    assert isinstance(refuse, Refuse)
    assert server.num_calls == 0
    raw.close(linger=0)
    context.term()


@pytest.mark.parametrize("garbage", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 5000], ids=["silence", "HTTP", "noise"])
async def test_a_raw_tcp_connection_harms_nobody(wild: Bench, garbage: bytes) -> None:
    server = await wild.serve(count_to_five)
    host, port = server.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(garbage)
        assert await wild.result(ask(wild.client, server.address)) == [0, 1, 2, 3, 4]


async def test_a_port_that_accepts_and_says_nothing_fails_after_the_connect_timeout(wild: Bench) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        began_s = time.monotonic()
        with pytest.raises(PeerLostError):
            async with wild.client.open(f"tcp://127.0.0.1:{mute.getsockname()[1]}", Watch()):
                pass
        assert 0.5 < time.monotonic() - began_s < 2.5


async def test_malformed_bytes_from_a_server_cost_the_client_that_link_only(wild: Bench) -> None:
    server = await wild.serve(count_to_five)
    context = zmq.Context()
    raw = context.socket(zmq.ROUTER)
    raw.bind("tcp://127.0.0.1:0")
    address = raw.getsockopt_string(zmq.LAST_ENDPOINT)
    bad = asyncio.ensure_future(ask(wild.client, address))
    await wild.until(lambda: bool(raw.getsockopt(zmq.EVENTS) & zmq.POLLIN))
    peer, _ = raw.recv_multipart()
    raw.send_multipart([peer, b"garbage"])
    with pytest.raises(PeerLostError, match="malformed"):
        await wild.result(bad)
    assert await wild.result(ask(wild.client, server.address)) == [0, 1, 2, 3, 4]
    raw.close(linger=0)
    context.term()


CHILD = """
import asyncio
from common.messages import Incarnation, NodeId, Tokens, Watch
from common.rpc.link import ZmqNetwork

async def main():
    async def hold(call):
        call.send(Tokens([1]))
        await asyncio.Event().wait()
    server = await ZmqNetwork().serve("tcp://127.0.0.1:0", {Watch: hold}, node=NodeId("child"),
                                      incarnation=Incarnation("child"))
    print(server.address, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_a_process_killed_with_sigkill_is_noticed_within_a_second(wild: Bench) -> None:
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", CHILD, stdout=asyncio.subprocess.PIPE)
    try:
        assert child.stdout is not None
        address = (await child.stdout.readline()).decode().strip()
        async with wild.client.open(address, Watch()) as call:
            assert isinstance(await anext(aiter(call)), Tokens)
            began_s = time.monotonic()
            child.send_signal(signal.SIGKILL)
            with pytest.raises(PeerLostError):
                await drain(call)
            assert time.monotonic() - began_s < 1.0
    finally:
        with suppress(ProcessLookupError):
            child.kill()
        await child.wait()


def test_it_runs_under_uvloop_and_leaves_no_descriptor(tmp_path: Path) -> None:
    async def main() -> None:
        before = descriptors_and_threads()
        bench = Bench("ipc", tmp_path)
        held = Held()
        server = await bench.serve(count_to_five, held)
        assert await ask(bench.client, server.address) == [0, 1, 2, 3, 4]
        async with bench.client.open(server.address, ROUTE) as call:
            await anext(aiter(call))
            with pytest.raises(DeadlineError):
                async with bench.client.open(server.address, ROUTE, timeout_s=0.05) as short:
                    await drain(short)
            bench.kill(server)
            with pytest.raises(BatonError):
                await drain(call)
        await bench.network.close()
        assert descriptors_and_threads() == before

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(main(), 20))

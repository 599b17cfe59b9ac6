"""One contract for every network: ZeroMQ over tcp and ipc, with keys and without, and memory with a clock that the
test moves."""

import asyncio
import gc
import time
import weakref
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from common.errors import (
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
    Incarnation,
    NodeId,
    NodeLoad,
    Report,
    Tokens,
    Watch,
)
from common.rpc.base import IncomingCall
from tests.contract.network_bench import (
    ROUTE,
    Bench,
    Held,
    ask,
    count_to_five,
    descriptors_and_threads,
    drain,
    leave,
)


@pytest.fixture(params=["tcp", "ipc", "tcp and keys", "ipc and keys", "memory"])
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    """Checks that nothing of the network is left: no call, task, descriptor or thread."""
    before = descriptors_and_threads()
    bench = Bench(request.param, tmp_path)
    yield bench
    await bench.network.close()
    await bench.until(lambda: asyncio.all_tasks() == {asyncio.current_task()})
    assert bench.client.num_calls == bench.client.num_links == 0
    # Fewer are no leak: what an earlier test of this process left to the collector may go meanwhile. A thread that
    # was joined is in /proc for a moment longer.
    await bench.until(lambda: all(now <= then for now, then in zip(descriptors_and_threads(), before, strict=True)))


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


async def test_both_ends_list_an_open_call_with_its_other_end(bench: Bench) -> None:
    server = await bench.serve(Held())
    call = await bench.enter(server.address)
    await bench.result(anext(aiter(call)))
    [ours], [theirs] = bench.client.held_calls(), server.held_calls()
    assert (ours.method, ours.peer) == ("Watch", server.incarnation)
    assert (theirs.method, theirs.peer) == ("Watch", bench.client.incarnation)
    assert theirs.age_s <= ours.age_s < 30
    await leave(call)
    assert bench.client.held_calls() == []
    await bench.until(lambda: server.held_calls() == [])


async def test_a_lost_link_is_told_with_the_process_at_its_other_end(bench: Bench) -> None:
    lost: list[Incarnation] = []
    bench.client.on_lost = lost.append
    server = await bench.serve(Held())
    await leave(await bench.enter(server.address))
    await bench.until(lambda: server.num_calls == 0)
    assert lost == []
    incarnation = server.incarnation
    await server.close()
    await bench.until(lambda: lost == [incarnation])


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


async def test_a_refused_request_is_forgotten_at_once(bench: Bench) -> None:
    """It may be of any size, and the next collection far away."""
    refusals: list[weakref.ref[OverloadedError]] = []

    async def full(call: IncomingCall) -> None:
        error = OverloadedError("full")
        refusals.append(weakref.ref(error))
        try:
            raise error
        finally:
            del error

    server = await bench.serve(full)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(OverloadedError):
            await bench.result(ask(bench.client, server.address))
        await bench.until(lambda: refusals[0]() is None)
    finally:
        gc.enable()


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
    server = await bench.serve(held, count_to_five)
    await leave(await bench.enter(server.address, ROUTE))  # connected, so that the deadline is the handler's

    async def talk() -> None:
        async with bench.client.open(server.address, Watch(), timeout_s=0.4) as call:
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
    await bench.until(
        lambda: held.ended.is_set() and server.num_calls == 0,
    )


async def test_a_killed_server_is_noticed_within_a_second(bench: Bench) -> None:
    """At best of three: the machine may do something else at that moment."""
    took_s = []
    for _ in range(3):
        server = await bench.serve(Held())
        call = await bench.enter(server.address)
        began_s = time.monotonic()
        bench.kill(server)
        with pytest.raises(PeerLostError):
            await bench.result(drain(call))
        took_s.append(time.monotonic() - began_s)
        await bench.until(lambda server=server: server.num_calls == 0)  # type: ignore[misc]
    assert min(took_s) < 1.0


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

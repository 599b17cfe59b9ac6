"""Draining: nothing new, what runs leaves, and whoever gives up gets the node back."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack

import pytest

from common.clock import SystemClock
from common.draining import Draining
from common.errors import MovedError, UnavailableError
from common.messages import Drain, DrainProgress, ItemBody, NodeId, SentBody


class DrainCall:
    """The callee's side of a Drain call, with nobody at the other end."""

    caller = NodeId("operator")
    remaining_s = None

    def __init__(self, timeout_s: float) -> None:
        self.body = Drain(timeout_s)
        self.items: list[ItemBody] = []

    def send(self, item: ItemBody) -> None:
        self.items.append(item)

    async def __aiter__(self) -> AsyncIterator[SentBody]:
        return
        yield


class Errand:
    """Work that remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.done = ExitStack()

    def leave(self) -> None:
        self.told.append("leave")

    def evict(self) -> None:
        self.told.append("evict")
        self.done.close()


def draining() -> Draining:
    return Draining(NodeId("decode-0"), SystemClock())


async def turns(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_an_idle_node_is_drained_at_once() -> None:
    node, call = draining(), DrainCall(10.0)
    await node.drain(call)
    assert node.drained.is_set()
    assert call.items == [DrainProgress(num_calls=0)]
    with pytest.raises(MovedError), node.admitted(Errand()):
        raise AssertionError


async def test_what_runs_is_told_to_leave_and_waited_for() -> None:
    node, call, errand = draining(), DrainCall(10.0), Errand()
    errand.done.enter_context(node.admitted(errand))
    task = asyncio.create_task(node.drain(call))
    await turns()
    assert (errand.told, task.done()) == (["leave"], False)
    with pytest.raises(MovedError), node.admitted(Errand()):
        raise AssertionError
    errand.done.close()
    await task
    assert call.items == [DrainProgress(num_calls=1), DrainProgress(num_calls=0)]


async def test_what_stays_beyond_the_timeout_is_evicted() -> None:
    node, call, errand = draining(), DrainCall(0.01), Errand()
    errand.done.enter_context(node.admitted(errand))
    await node.drain(call)
    assert errand.told == ["leave", "evict"]
    assert call.items[-1] == DrainProgress(num_calls=0, num_evicted=1)


async def test_a_drain_that_is_given_up_puts_the_node_back_into_service() -> None:
    node, errand = draining(), Errand()
    errand.done.enter_context(node.admitted(errand))
    task = asyncio.create_task(node.drain(DrainCall(10.0)))
    await turns()
    task.cancel()
    await asyncio.wait([task])
    assert not node.is_draining
    assert not node.drained.is_set()
    with node.admitted(Errand()):
        errand.done.close()


async def test_only_one_drains_at_a_time() -> None:
    node, errand = draining(), Errand()
    errand.done.enter_context(node.admitted(errand))
    task = asyncio.create_task(node.drain(DrainCall(10.0)))
    await turns()
    with pytest.raises(UnavailableError, match="already"):
        await node.drain(DrainCall(10.0))
    assert node.is_draining
    errand.done.close()
    await task

"""The loop that the simulation stands on: time jumps, a frozen process stands still, a dead one does nothing more."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from common.messages import Incarnation
from common.rpc.carrier import Process
from tests.simulation.virtual_time import DeadlockError, VirtualLoop, pause


def run(loop: VirtualLoop, work: Coroutine[Any, Any, None]) -> None:
    try:
        loop.run_until_complete(work)
    finally:
        loop.bury()


async def count(ticks: list[float], every_s: float) -> None:
    try:
        while True:
            ticks.append(asyncio.get_running_loop().time())
            await pause(every_s)
    finally:
        ticks.append(-1.0)


def test_an_hour_passes_at_once() -> None:
    loop = VirtualLoop()

    async def story() -> None:
        await pause(3600.0)
        assert loop.time() == 3600.0
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.0):
                await asyncio.Event().wait()
        assert loop.time() == 3605.0

    run(loop, story())


def test_timers_of_equal_times_fire_in_order() -> None:
    loop = VirtualLoop()
    fired: list[int] = []

    async def story() -> None:
        for number in range(100):
            loop.call_later(1.0, fired.append, number)
        await pause(1.0)

    run(loop, story())
    assert fired == list(range(100))


def test_a_frozen_process_stands_still_and_goes_on() -> None:
    loop, process, ticks = VirtualLoop(), Process(Incarnation("a")), list[float]()

    async def story() -> None:
        task = loop.start(process, count(ticks, 1.0))
        await pause(2.5)
        process.is_frozen = True
        await pause(10.0)
        assert ticks == [0.0, 1.0, 2.0]
        process.is_frozen = False
        loop.resume(process)
        await pause(1.1)
        assert ticks == [0.0, 1.0, 2.0, 12.5, 13.5]
        task.cancel()
        await asyncio.wait([task])
        assert ticks[-1] == -1.0

    run(loop, story())


def test_a_dead_process_does_not_even_tidy_up() -> None:
    loop, process, ticks = VirtualLoop(), Process(Incarnation("a")), list[float]()

    async def story() -> None:
        task = loop.start(process, count(ticks, 1.0))
        await pause(1.5)
        process.is_dead = True
        task.cancel()
        await pause(5.0)
        assert ticks == [0.0, 1.0]

    run(loop, story())


def test_a_wait_that_nobody_ends_is_a_deadlock() -> None:
    async def story() -> None:
        await asyncio.Event().wait()

    with pytest.raises(DeadlockError, match=r"Event\.wait"):
        run(VirtualLoop(), story())

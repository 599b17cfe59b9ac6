"""What an engine says that it holds."""

import asyncio
import logging
from collections.abc import Sequence

import pytest

from common.engine.events import Count, Counted, Event
from common.engine.port import EnginePort
from common.engine.request import StepPlan
from common.messages import HeldSequence, RequestId
from tests.unit.common.engine.rig import Rig


def prompt(num_tokens: int, salt: int = 0) -> list[int]:
    return [salt * 1000 + position for position in range(num_tokens)]


def count(rig: Rig) -> Counted:
    rig.engine.post(Count())
    rig.engine.step()
    return [event for event in rig.events if isinstance(event, Counted)][-1]


def test_whatever_has_blocks_or_waits_for_some_is_counted_with_them() -> None:
    rig = Rig(num_blocks=12, max_running=1)
    rig.reserve("leased", prompt(40))
    rig.step()
    rig.admit("running", prompt(20, 1), max_tokens=20)
    rig.step()
    rig.reserve("queued", prompt(150, 2))
    rig.admit("waiting", prompt(20, 3), max_tokens=20)
    rig.reserve("next", prompt(1, 4))
    counted = count(rig)
    kinds = {one.id: (one.kind, one.num_blocks) for one in counted.sequences}
    assert kinds == {
        "running": ("running", 2),
        "waiting": ("waiting", 0),
        "leased": ("lease", 3),
        "queued": ("reservation", 0),
        "next": ("reservation", 0),
    }
    assert (counted.num_blocks, counted.used_blocks, counted.owned_blocks) == (12, 5, 5)
    for id in kinds:
        rig.release(id)
    assert count(rig) == Counted((), 12, 0, 0)


def test_a_shared_block_is_owned_once_and_a_cached_one_by_nobody() -> None:
    rig = Rig(num_blocks=12)
    rig.admit("first", prompt(40), max_tokens=2)
    rig.run()
    assert count(rig) == Counted((), 12, 0, 0)
    rig.reserve("second", prompt(40))
    rig.reserve("third", prompt(40))
    rig.step()
    counted = count(rig)
    assert [one.num_blocks for one in counted.sequences] == [3, 3]
    assert counted.used_blocks == counted.owned_blocks == 4, "two of the three blocks are shared"
    rig.release("second")
    rig.release("third")
    rig.assert_empty()


def test_a_reference_that_no_sequence_has_shows_as_a_block_that_nobody_owns() -> None:
    rig = Rig(num_blocks=12)
    rig.reserve("a", prompt(16))
    rig.step()
    [block] = rig.reserved[RequestId("a")].blocks
    rig.engine._pool.share(block)
    rig.release("a")
    counted = count(rig)
    assert (counted.used_blocks, counted.owned_blocks) == (1, 0)


def test_a_broken_engine_still_says_what_it_holds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    rig = Rig()
    rig.admit("a", prompt(20))
    rig.step()

    def broken() -> StepPlan:
        raise AssertionError("accounts differ")

    rig.engine._scheduler.schedule = broken  # type: ignore[method-assign]
    rig.run()
    assert [(one.id, one.num_blocks) for one in count(rig).sequences] == [("a", 2)]


async def test_each_count_is_answered_in_order_also_when_nobody_waits_any_more() -> None:
    port = EnginePort()
    given_up, wanted = port.next_count(), port.next_count()
    given_up.cancel()
    answers: Sequence[Event] = [Counted((), 1, 0, 0), Counted((HeldSequence("a", "lease", None),), 1, 0, 0)]
    port.deliver(answers)
    assert await asyncio.wait_for(wanted, 60) is answers[1]

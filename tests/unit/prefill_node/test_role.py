"""The rules of prefill_node.role."""

import pytest

from common.engine.events import Admit, Failed, PullTook, Release
from common.engine.request import NOBODY, Progress
from common.messages import (
    BlockId,
    BlockRef,
    BlocksReady,
    Generation,
    Incarnation,
    KVLayout,
    LayerKV,
    Origin,
    Prefill,
    PrefillDone,
    Priority,
    Pulled,
    RequestId,
    Sampling,
)
from prefill_node.role import Cancelled, Emit, EndCall, Event, PrefillCall, State

ID = RequestId("engine-1")
SECRET = b"the call's own"
REFS = (BlockRef(BlockId(3), Generation(1)), BlockRef(BlockId(4), Generation(1)))


def a_call(origin: Origin = NOBODY) -> PrefillCall:
    layout = KVLayout(16, "float32", 4, (LayerKV(1, 2, 2),))
    sampling = Sampling(max_tokens=50, seed=1)
    body = Prefill(RequestId("r"), 0, "digest", [1, 2, 3], 3, sampling, layout, origin)
    return PrefillCall(body, id=ID, incarnation=Incarnation("me"), secret=SECRET, now_s=0.0)


def test_prefill_computes_one_token_and_keeps_the_blocks() -> None:
    [admit] = a_call().begin()
    assert isinstance(admit, Admit)
    assert admit.request.stop_after_first
    assert admit.request.keep_blocks


def test_the_engine_learns_when_the_calls_time_is_over() -> None:
    call = PrefillCall(a_call()._body, id=ID, incarnation=Incarnation("me"), secret=SECRET, now_s=0.0, deadline_s=9.0)
    [admit] = call.begin()
    assert isinstance(admit, Admit)
    assert admit.request.deadline_s == 9.0


def test_the_prompt_is_computed_in_the_name_of_whoever_asked() -> None:
    origin = Origin(b"tenant", Priority.HIGH)
    [admit] = a_call(origin).begin()
    assert isinstance(admit, Admit)
    assert admit.request.origin == origin


def test_finished_blocks_are_announced_before_the_token() -> None:
    call = a_call()
    commands = call.handle(Progress(ID, 3, token=9, stopped=True, first_ready=1, ready=REFS), now_s=2.0)
    assert commands == [
        Emit(BlocksReady(Incarnation("me"), 1, REFS, SECRET)),
        Emit(PrefillDone(token=9, phases={"compute": 2.0})),
    ]
    assert call.state is State.HOLDING


def test_the_engine_is_told_how_long_the_last_pull_took() -> None:
    call = a_call()
    call.handle(Progress(ID, 32, first_ready=0, ready=REFS), now_s=1.0)
    call.handle(Progress(ID, 40, token=9, stopped=True, first_ready=2, ready=REFS[:1]), now_s=2.0)
    assert call.handle(Pulled(), now_s=2.5) == [PullTook(8, 0.5), Release(ID), EndCall()]


def test_a_reader_that_goes_without_the_blocks_tells_nothing_about_pulls() -> None:
    call = a_call()
    call.handle(Progress(ID, 40, token=9, stopped=True, first_ready=0, ready=REFS), now_s=2.0)
    assert call.handle(Cancelled(), now_s=2.5) == [Release(ID), EndCall()]


def test_blocks_are_free_as_soon_as_they_are_pulled() -> None:
    call = a_call()
    call.handle(Progress(ID, 3, token=9, stopped=True), now_s=0.0)
    assert call.handle(Pulled(), now_s=0.0) == [Release(ID), EndCall()]


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("event", [Cancelled(), Pulled(), Failed(ID, "boom")])
def test_whatever_ends_the_call_releases_once_and_ends_once(held: bool, event: Event) -> None:
    call = a_call()
    if held:
        call.handle(Progress(ID, 3, token=9, stopped=True), now_s=0.0)
    release, end = call.handle(event, now_s=0.0)
    assert release == Release(ID)
    assert isinstance(end, EndCall)
    assert (end.error is not None) == isinstance(event, Failed)
    for late in (Cancelled(), Pulled(), Failed(ID, "late"), Progress(ID, 3, token=9, stopped=True)):
        assert call.handle(late, now_s=0.0) == []

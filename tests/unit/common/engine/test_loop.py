"""The engine as a thread, and what it makes of failures."""

import logging
import threading
from collections.abc import Sequence

import numpy as np
import pytest

from common.clock import ManualClock
from common.config import EngineConfig
from common.engine.events import Admit, Event, Failed, Probe, Release, Stepped
from common.engine.loop import Engine
from common.engine.request import EngineRequest, StepPlan
from common.messages import RequestId, Sampling
from common.model.fake import FakeRunner, fake_oracle
from tests.unit.common.engine.rig import Rig, plain_memory

WAIT_S = 20.0


def prompt(num_tokens: int, salt: int = 0) -> list[int]:
    return [salt * 1000 + position for position in range(num_tokens)]


class Listener:
    """What a thread delivered, with a way to wait for it."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self.tokens: dict[RequestId, list[int]] = {}
        self.stopped: set[RequestId] = set()

    def __call__(self, events: Sequence[Event]) -> None:
        with self._news:
            for event in events:
                for progress in event.progress if isinstance(event, Stepped) else ():
                    if progress.token is not None:
                        self.tokens.setdefault(progress.request, []).append(progress.token)
                    if progress.stopped:
                        self.stopped.add(progress.request)
            self._news.notify_all()

    def wait_for(self, *ids: str) -> None:
        with self._news:
            assert self._news.wait_for(lambda: self.stopped.issuperset(ids), WAIT_S)


def request_of(id: str, num_tokens: int, max_tokens: int, salt: int = 0) -> EngineRequest:
    tokens = prompt(num_tokens, salt)
    return EngineRequest(RequestId(id), tokens, num_tokens, Sampling(max_tokens=max_tokens, seed=0))


def test_the_thread_serves_what_many_threads_post_and_leaves_nothing() -> None:
    memory, listener = plain_memory(24), Listener()
    engine = Engine(runner=FakeRunner(memory), generations=memory.generations, config=EngineConfig(), deliver=listener)
    engine.start()
    posters = [
        threading.Thread(target=lambda salt=salt: engine.post(Admit(request_of(str(salt), 20 + salt, 15, salt))))
        for salt in range(8)
    ]
    for poster in posters:
        poster.start()
    for poster in posters:
        poster.join()
    listener.wait_for(*(str(salt) for salt in range(8)))
    engine.stop()
    for salt in range(8):
        expected = fake_oracle(prompt(20 + salt, salt), 15, Sampling(max_tokens=15, seed=0))
        assert listener.tokens[RequestId(str(salt))] == expected
    engine.check_invariants()
    assert engine.stats().free_blocks == 24
    assert not any(thread.name == "engine" for thread in threading.enumerate())


def test_an_idle_engine_waits_and_a_probe_proves_that_it_lives() -> None:
    asked, clock = threading.Semaphore(0), ManualClock()

    class Clock:
        def now_s(self) -> float:
            asked.release()
            return clock.now_s()

    memory = plain_memory(1)
    engine = Engine(
        runner=FakeRunner(memory),
        generations=memory.generations,
        config=EngineConfig(),
        deliver=lambda events: None,
        clock=Clock(),
    )
    assert asked.acquire(timeout=WAIT_S)
    engine.start()
    assert asked.acquire(timeout=WAIT_S), "the first idle moment"
    assert not asked.acquire(timeout=0.05), "then it blocks and looks at nothing"
    clock.advance(5)
    engine.post(Probe())
    assert asked.acquire(timeout=WAIT_S)
    engine.stop()
    assert engine.stats().last_progress_s == 5


def test_the_runner_rests_when_there_is_nothing_left_to_run_and_not_between_steps() -> None:
    memory, listener, told, rests = plain_memory(24), Listener(), list[str](), threading.Semaphore(0)

    class Resting(FakeRunner):
        def rest(self) -> None:
            told.append("rest")
            rests.release()

    runner = Resting(memory, before_step=lambda plan: told.append("step"))
    engine = Engine(runner=runner, generations=memory.generations, config=EngineConfig(), deliver=listener)
    engine.post(Admit(request_of("one", 3, 4)))
    engine.start()
    assert rests.acquire(timeout=WAIT_S)
    engine.stop()
    assert told[:5] == ["step"] * 4 + ["rest"]


def test_an_engine_that_never_started_can_be_stopped_and_one_stopped_twice() -> None:
    memory = plain_memory(1)
    for start in (False, True):
        engine = Engine(
            runner=FakeRunner(memory),
            generations=memory.generations,
            config=EngineConfig(),
            deliver=lambda events: None,
        )
        if start:
            engine.start()
        engine.stop()
        engine.stop()


def test_a_stop_ends_the_thread_with_work_left_over() -> None:
    memory, listener = plain_memory(64), Listener()
    engine = Engine(runner=FakeRunner(memory), generations=memory.generations, config=EngineConfig(), deliver=listener)
    engine.post(Admit(request_of("short", 3, 1)))
    engine.post(Admit(request_of("endless", 3, 1000, 1)))
    engine.start()
    listener.wait_for("short")
    engine.stop()
    assert engine.stats().num_running == 1


class Poison:
    """A model that cannot stand one request, or two of them together."""

    def __init__(self, *ids: str, together: bool = False) -> None:
        self.ids = set(ids)
        self.together = together

    def __call__(self, plan: StepPlan) -> None:
        there = self.ids & {chunk.request.id for chunk in plan.chunks}
        if there and (not self.together or there == self.ids):
            raise ValueError(f"poisoned by {sorted(there)}")


def test_one_bad_request_fails_alone_and_the_others_tokens_stay_right(caplog: pytest.LogCaptureFixture) -> None:
    poison = Poison()
    rig = Rig(before_step=poison, max_step_tokens=16)
    for index, id in enumerate("abc"):
        rig.admit(id, prompt(20, index), 10, seed=index)
    for _ in range(6):
        rig.step()
    poison.ids = {"b"}
    rig.run()
    assert rig.failed == {"b": "ValueError: poisoned by ['b']"}
    rig.assert_right("a", "c")
    assert rig.engine.stats().num_failed == 1
    rig.assert_empty()
    assert "request failed" in caplog.text


def test_a_batch_that_fails_only_together_goes_on_one_by_one() -> None:
    rig = Rig(before_step=Poison("a", "b", together=True))
    for id in "ab":
        rig.admit(id, prompt(20), 10)
    rig.run()
    assert not rig.failed
    rig.assert_right("a", "b")
    rig.assert_empty()


def test_a_runner_that_draws_too_few_tokens_is_not_believed() -> None:
    rig = Rig()
    rig.runner.execute = lambda plan: []  # type: ignore[method-assign]
    rig.admit("a", prompt(5), 10)
    rig.run()
    assert list(rig.failed) == ["a"]
    rig.assert_empty()


def test_failed_steps_are_no_progress() -> None:
    rig = Rig(before_step=Poison("a"))
    rig.admit("a", prompt(5), 10)
    rig.clock.advance(3)
    assert rig.step()
    assert rig.engine.stats().last_progress_s == 0
    rig.run()
    assert rig.engine.stats().last_progress_s == 3


def test_after_an_error_of_our_own_everybody_fails_at_once_and_progress_stands_still(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig()
    rig.admit("a", prompt(20), 10)
    rig.reserve("b", prompt(20))
    rig.step()

    def broken() -> StepPlan:
        raise AssertionError("accounts differ")

    rig.engine._scheduler.schedule = broken  # type: ignore[method-assign]
    rig.clock.advance(7)
    rig.run()
    assert set(rig.failed) == {"a", "b"}
    assert "accounts differ" in rig.failed[RequestId("a")]
    rig.admit("late", prompt(20), 10)
    rig.release("a")
    rig.engine.post(Probe())
    rig.run()
    assert "late" in rig.failed
    assert rig.engine.stats().last_progress_s == 0
    assert "engine broken" in caplog.text


def test_a_shell_that_cannot_take_events_does_not_end_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    memory = plain_memory(4)
    seen: list[Event] = []

    def deliver(events: Sequence[Event]) -> None:
        seen.extend(events)
        raise RuntimeError("closed")

    engine = Engine(runner=FakeRunner(memory), generations=memory.generations, config=EngineConfig(), deliver=deliver)
    engine.post(Admit(request_of("a", 3, 2)))
    while engine.step():
        pass
    assert len(seen) == 2
    assert "not delivered" in caplog.text


def test_grants_are_delivered_before_the_step_that_follows_them() -> None:
    heard: list[str] = []
    rig = Rig(before_step=lambda plan: heard.append(f"step after {len(rig.reserved)} grants"))
    rig.admit("a", prompt(20), 1)
    rig.reserve("b", prompt(20, 1))
    rig.step()
    assert heard == ["step after 1 grants"]


def test_the_snapshot_counts_what_is_there_and_what_was_done() -> None:
    rig = Rig(16, max_step_tokens=20, max_running=1, before_step=lambda plan: rig.clock.advance(0.1))
    rig.admit("a", prompt(40), 3)
    rig.admit("b", prompt(40), 3)
    rig.reserve("c", prompt(40, 2))
    rig.step()
    stats = rig.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_waiting_tokens) == (1, 2, 24 + 40)
    assert (stats.free_blocks, stats.leased_blocks, stats.num_steps) == (16 - 3, 0, 1)
    assert stats.tokens_per_s == pytest.approx(160)
    rig.run()
    stats = rig.engine.stats()
    assert stats.num_generated_tokens == 6
    assert stats.num_computed_prompt_tokens == 40 + 8
    assert stats.num_cached_tokens == 32
    assert stats.leased_blocks == 3
    assert stats.last_progress_s == pytest.approx(0.1 * stats.num_steps)
    rig.release("c")
    rig.assert_empty()


def test_generations_may_be_the_pools_array_or_any_list() -> None:
    for generations in ([0] * 4, np.zeros(4, np.int64)):
        engine = Engine(
            runner=FakeRunner(plain_memory(4)),
            generations=generations,
            config=EngineConfig(),
            deliver=lambda events: None,
        )
        engine.post(Admit(request_of("a", 20, 2)))
        engine.post(Release(RequestId("unknown")))
        while engine.step():
            pass
        assert sum(map(int, generations)) == 2


def test_a_refused_request_is_answered_even_if_nothing_else_happens() -> None:
    rig = Rig()
    rig.admit("a", [], 1)
    assert not rig.step()
    assert isinstance(rig.events[0], Failed)


def test_what_was_posted_waits_from_that_moment_on_and_until_it_has_a_place() -> None:
    seen: list[tuple[int, int]] = []
    rig = Rig(max_running=1, before_step=lambda plan: seen.append(rig.engine.num_waiting()))
    for index in range(3):
        rig.admit(str(index), prompt(20, index), 1)
    rig.reserve("lease", prompt(20, 3))
    assert rig.engine.num_waiting() == (4, 60)
    rig.step()
    assert seen == [(3, 60)], "one has its place, in a step that is not over yet"
    assert rig.engine.num_waiting() == (3, 40)
    rig.run()
    assert rig.engine.num_waiting() == (0, 0)
    rig.admit("wrong", prompt(20, 4), 0, num_computed=20)
    rig.run()
    assert rig.engine.num_waiting() == (0, 0)
    rig.release("lease")
    rig.assert_empty()

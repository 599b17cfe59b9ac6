"""What leaves the pool is found again in host memory, right to the last token, where that beats computing it anew."""

import pytest

from common.config import EngineConfig
from common.engine.events import CacheChanged, Count, Counted
from common.engine.request import StepPlan
from common.errors import ConfigError
from common.messages import BlockHash, RequestId
from common.model.fake import FakeRunner
from tests.unit.common.engine.rig import Rig


def prompt(num_tokens: int, salt: int = 0) -> list[int]:
    return [salt * 1000 + position for position in range(num_tokens)]


def offered(rig: Rig) -> set[BlockHash]:
    """What the engine's news add up to; each of them must be news."""
    names: set[BlockHash] = set()
    for event in rig.events:
        for content, is_offered in event.changes if isinstance(event, CacheChanged) else ():
            assert (content in names) != is_offered, "told twice"
            (names.add if is_offered else names.discard)(content)
    return names


def num_computed(rig: Rig, id: str) -> int:
    return sum(chunk.num_tokens for plan in rig.plans for chunk in plan.chunks if chunk.request.id == id)


def test_an_evicted_prefix_is_copied_back_and_counts_as_cached() -> None:
    rig = Rig(5, num_host_blocks=10)
    rig.admit("first", prompt(64), 1)
    rig.run()
    rig.admit("other", prompt(80, 1), 1)
    rig.run()
    assert rig.engine.stats().num_blocks_out == 4
    rig.admit("again", prompt(65), 1)
    rig.run()
    assert rig.progress[RequestId("again")][0].num_cached == 64
    assert rig.engine.stats().num_blocks_in == 4
    assert num_computed(rig, "again") == 1
    rig.assert_right("first", "other", "again")
    assert len(offered(rig)) == 4 + 5
    rig.assert_empty()


def test_a_block_that_was_not_copied_gives_wrong_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: the same history without the copies."""
    monkeypatch.setattr(FakeRunner, "copy_blocks", lambda self, copies: None)
    rig = Rig(5, num_host_blocks=10)
    for id, salt in (("first", 0), ("other", 1), ("again", 0)):
        rig.admit(id, prompt(65, salt), 1)
        rig.run()
    assert rig.tokens[RequestId("again")] != rig.expected("again")


def test_a_preempted_request_computes_no_more_than_a_block_again() -> None:
    computed = {}
    for num_host_blocks in (0, 16):
        rig = Rig(9, num_host_blocks=num_host_blocks, max_model_len=256)
        rig.admit("old", prompt(60), 60)
        rig.admit("new", prompt(60, 1), 60)
        rig.run()
        assert rig.engine.stats().num_preemptions == 1
        rig.assert_right("old", "new")
        computed[num_host_blocks] = num_computed(rig, "new")
        rig.assert_empty()
    assert computed[16] <= 60 + 60 + 16
    assert computed[16] < computed[0]


def test_a_reservation_finds_what_lies_in_host_memory() -> None:
    rig = Rig(5, num_host_blocks=10)
    for id, salt in (("first", 0), ("other", 1)):
        rig.admit(id, prompt(64, salt), 1)
        rig.run()
    rig.reserve("again", prompt(64))
    rig.run()
    assert rig.reserved[RequestId("again")].num_cached == 48
    rig.pull("again", prompt(64))
    rig.admit("again", [*prompt(64), 7], 3, num_prompt_tokens=64, num_computed=64)
    rig.run()
    assert rig.tokens[RequestId("again")] == rig.expected("again", 2)
    rig.assert_empty()


@pytest.mark.parametrize("num_host_blocks", [1, 2, 3, 5])
def test_a_tier_of_any_size_keeps_what_was_used_last_and_gives_no_wrong_token(num_host_blocks: int) -> None:
    rig = Rig(5, num_host_blocks=num_host_blocks)
    for turn in range(24):
        rig.admit(str(turn), prompt(40 + turn % 3 * 16, turn * turn % 5), 3, seed=turn)
        rig.run()
        offered(rig)
    rig.assert_right(*map(str, range(24)))
    rig.assert_empty()


def counted(rig: Rig) -> Counted:
    rig.engine.post(Count())
    rig.step()
    return next(event for event in reversed(rig.events) if isinstance(event, Counted))


def test_the_audit_counts_what_lies_in_host_memory() -> None:
    rig = Rig(5, num_host_blocks=3)
    for id, salt in (("first", 0), ("other", 1)):
        rig.admit(id, prompt(64, salt), 1)
        rig.run()
    assert (counted(rig).used_blocks, counted(rig).host_blocks) == (0, 3)


@pytest.mark.parametrize(("copy_s", "pays"), [(0.001, True), (0.5, False)])
def test_what_is_dearer_to_copy_than_to_compute_is_computed(
    monkeypatch: pytest.MonkeyPatch, copy_s: float, pays: bool
) -> None:
    """A block's tokens take 16 ms to compute."""
    copy = FakeRunner.copy_blocks

    def slow_copy(runner: FakeRunner, copies: list[tuple[int, int]]) -> None:
        rig.clock.advance(copy_s * len(copies))
        copy(runner, copies)  # type: ignore[arg-type]

    def slow_step(plan: StepPlan) -> None:
        rig.clock.advance(0.001 * plan.num_tokens)

    monkeypatch.setattr(FakeRunner, "copy_blocks", slow_copy)
    rig = Rig(5, num_host_blocks=40, before_step=slow_step)
    for turn in range(12):
        rig.admit(str(turn), prompt(64, turn), 1)
        rig.run()
    out = rig.engine.stats().num_blocks_out
    assert out == 3 + 10 * 4 if pays else out <= 8
    rig.admit("again", prompt(65, 10), 1)
    rig.run()
    rig.assert_right("again")


def test_the_tier_needs_the_names_that_the_prefix_cache_gives() -> None:
    with pytest.raises(ConfigError, match="needs prefix_cache"):
        EngineConfig(kv_host_memory=1 << 20, prefix_cache=False)

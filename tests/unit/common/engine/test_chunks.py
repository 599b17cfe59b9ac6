"""Steps that hold a target while streams decode, and prompts cut for their readers: seen from the plans."""

from common.engine.events import PullTook
from common.engine.request import StepPlan
from common.messages import RequestId
from tests.unit.common.engine.rig import Rig

START_S, DECODE_S, TOKEN_S = 0.02, 0.002, 0.001


def prompt(num_tokens: int, salt: int = 0) -> list[int]:
    return [salt * 1000 + position for position in range(num_tokens)]


def step_s(plan: StepPlan) -> float:
    decodes = sum(1 for chunk in plan.chunks if chunk.num_tokens == 1)
    return START_S + DECODE_S * decodes + TOKEN_S * (plan.num_tokens - decodes)


def a_rig(**settings: object) -> Rig:
    """Its clock moves as on a machine with these costs."""
    rig = Rig(400, max_model_len=2048, before_step=lambda plan: rig.clock.advance(step_s(plan)), **settings)  # type: ignore[arg-type]
    return rig


def test_streams_are_slowed_to_the_target_and_no_further_while_a_prompt_is_computed() -> None:
    rig = a_rig(itl_target_s=0.1)
    for index in range(4):
        rig.admit(f"stream {index}", prompt(20, index), 200)
    for _ in range(10):
        rig.step()
    before = len(rig.plans)
    rig.admit("long", prompt(1500, 9), 1)
    while RequestId("long") not in rig.finished:
        rig.step()
    spans = [step_s(plan) for plan in rig.plans[before:]]
    assert max(spans[2:]) <= 0.11, "after two steps of learning"
    assert sum(spans) <= 1.5 * (START_S + 4 * DECODE_S + 0.072) * 1500 / 72, "and no slower than that"
    rig.run()
    rig.assert_right("long", *(f"stream {index}" for index in range(4)))
    rig.assert_empty()


def test_without_a_target_the_same_steps_are_as_long_as_prompts_make_them() -> None:
    rig = a_rig(itl_target_s=0.0)
    rig.admit("stream", prompt(20), 100)
    for _ in range(10):
        rig.step()
    rig.admit("long", prompt(1500, 9), 1)
    rig.run()
    assert max(map(step_s, rig.plans)) > 0.45


def test_a_prompt_is_cut_smaller_towards_its_end_where_its_reader_is_slow() -> None:
    sizes = {}
    for pull_s in (0.00001, 0.0008):
        rig = a_rig(admit_whole=True, max_step_s=2.0)
        for turn in range(6):
            rig.admit(f"known {turn}", prompt(200 + 100 * turn, turn), prefill=True)
            rig.run()
            rig.release(f"known {turn}")
            rig.engine.post(PullTook(100 * turn + 16, 0.002 + pull_s * (100 * turn + 16)))
        before = len(rig.plans)
        rig.admit("it", prompt(1500, 9), prefill=True)
        rig.run()
        sizes[pull_s] = [plan.num_tokens for plan in rig.plans[before:]]
        assert rig.tokens[RequestId("it")] == rig.expected("it", 1)
        assert len(rig.ready[RequestId("it")]) == 94
        rig.release("it")
        rig.assert_empty()
    assert sizes[0.00001] == [512, 512, 476]
    assert sum(sizes[0.0008]) == 1500
    assert sizes[0.0008][-1] <= 64 and sizes[0.0008] == sorted(sizes[0.0008], reverse=True)


def test_what_one_readers_pace_leaves_of_a_step_another_prompt_has() -> None:
    rig = a_rig(admit_whole=True, max_step_s=2.0)
    for turn in range(6):
        rig.admit(f"known {turn}", prompt(200 + 100 * turn, turn), prefill=True)
        rig.run()
        rig.release(f"known {turn}")
        rig.engine.post(PullTook(100 * turn + 16, 0.002 + 0.0008 * (100 * turn + 16)))
    for index in range(2):
        rig.admit(f"it {index}", prompt(600, 8 + index), prefill=True)
    rig.step()
    first, second = rig.plans[-1].chunks
    assert first.num_tokens + second.num_tokens <= 512
    assert not first.samples and not second.samples

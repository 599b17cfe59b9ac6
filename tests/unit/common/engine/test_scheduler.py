"""What the scheduler decides, seen from the plans it makes and the tokens that come of them."""

import pytest

from common.engine.request import StepPlan
from common.messages import FinishReason, RequestId
from tests.unit.common.engine.rig import Rig

LENGTHS = (1, 15, 16, 17, 31, 32, 33, 48, 64)


def prompt(num_tokens: int, salt: int = 0) -> list[int]:
    return [salt * 1000 + position for position in range(num_tokens)]


def shape(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(chunk.request.id, chunk.start, chunk.num_tokens) for chunk in plan.chunks]


# --- tokens ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_step_tokens", [1, 5, 16, 512])
@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_a_prompt_of_any_length_gives_the_oracles_tokens_in_any_chunks(num_tokens: int, max_step_tokens: int) -> None:
    rig = Rig(max_step_tokens=max_step_tokens)
    rig.admit("a", prompt(num_tokens), 20)
    rig.run()
    rig.assert_right("a")
    assert all(plan.num_tokens <= max_step_tokens for plan in rig.plans)
    rig.assert_empty()


def test_all_lengths_at_once_give_what_each_gives_alone() -> None:
    rig = Rig(max_step_tokens=48)
    ids = [str(num_tokens) for num_tokens in LENGTHS]
    for seed, num_tokens in enumerate(LENGTHS):
        rig.admit(str(num_tokens), prompt(num_tokens, num_tokens), 20, seed=seed)
    rig.run()
    rig.assert_right(*ids)
    rig.assert_empty()


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_a_cached_prompt_is_computed_from_its_last_block_on_and_answers_the_same(num_tokens: int) -> None:
    rig = Rig()
    rig.admit("a", prompt(num_tokens), 3)
    rig.run()
    rig.admit("b", prompt(num_tokens), 3)
    rig.run()
    cached = (num_tokens - 1) // 16 * 16
    assert [progress.num_cached for progress in rig.progress[RequestId("b")]] == [cached] * 3
    assert shape(rig.plans[3])[0] == ("b", cached, num_tokens - cached)
    rig.assert_right("a", "b")
    rig.assert_empty()


def test_an_answer_is_a_prefix_for_the_next_turn() -> None:
    rig = Rig()
    rig.admit("a", prompt(10), 30)
    rig.run()
    rig.admit("b", [*prompt(10), *rig.tokens[RequestId("a")], 7], 3)
    rig.run()
    assert rig.progress[RequestId("b")][0].num_cached == 32
    rig.assert_right("b")


def test_every_finish_rule_applies_to_every_token() -> None:
    rig = Rig(max_model_len=64)
    rig.admit("probe", prompt(10), 3)
    rig.run()
    first, second, _ = rig.tokens[RequestId("probe")]
    rig.admit("one", prompt(10), 1)
    rig.admit("stop first", prompt(10), 3, stop=(first,))
    rig.admit("stop second", prompt(10), 3, stop=(second,))
    rig.admit("context", prompt(62, 2), 30)
    rig.run()
    assert rig.finished == {
        RequestId("probe"): FinishReason.LENGTH,
        RequestId("one"): FinishReason.LENGTH,
        RequestId("stop first"): FinishReason.STOP,
        RequestId("stop second"): FinishReason.STOP,
        RequestId("context"): FinishReason.LENGTH,
    }
    rig.assert_right("probe", "one", "stop first", "stop second", "context")
    assert len(rig.tokens[RequestId("context")]) == 2
    rig.assert_empty()


def test_tokens_already_delivered_are_continued_not_drawn_again() -> None:
    rig = Rig()
    rig.admit("a", prompt(20), 10, seed=5)
    rig.run()
    answer = rig.tokens[RequestId("a")]
    rig.admit("again", [*prompt(20), *answer[:4]], 10, num_prompt_tokens=20, seed=5)
    rig.run()
    assert rig.tokens[RequestId("again")] == answer[4:]


# --- the step's share --------------------------------------------------------------------------------------


def test_every_decode_has_its_token_in_each_step_and_prompts_share_what_is_left() -> None:
    rig = Rig(max_step_tokens=34)
    rig.admit("a", prompt(5), 30)
    rig.admit("b", prompt(5, 1), 30)
    rig.step()
    rig.admit("long", prompt(100, 2), 2)
    rig.admit("next", prompt(20, 3), 2)
    for start in (0, 32, 64):
        rig.step()
        assert shape(rig.plans[-1]) == [("a", rig_at(rig, "a"), 1), ("b", rig_at(rig, "b"), 1), ("long", start, 32)]
    rig.step()
    assert shape(rig.plans[-1])[2:] == [("long", 96, 4), ("next", 0, 20)]
    rig.run()
    rig.assert_right("a", "b", "long", "next")
    rig.assert_empty()


def rig_at(rig: Rig, id: str) -> int:
    """Where the newest step computed: prompt and tokens, less the newest."""
    return len(rig.requests[RequestId(id)][0]) + len(rig.tokens[RequestId(id)]) - 2


def test_chunks_end_at_block_boundaries_where_they_can() -> None:
    rig = Rig(max_step_tokens=40)
    rig.admit("a", prompt(100), 1)
    rig.run()
    assert [shape(plan)[0][1:] for plan in rig.plans] == [(0, 32), (32, 32), (64, 36)]


def test_prompt_steps_are_sized_to_end_in_time_and_never_below_a_block() -> None:
    second_per_token = 0.01
    rig = Rig(max_step_s=0.5, before_step=lambda plan: rig.clock.advance(plan.num_tokens * second_per_token))
    rig.admit("a", prompt(400), 1)
    rig.run()
    assert [shape(plan)[0][2] for plan in rig.plans] == [128, 48, 48, 48, 48, 48, 32]
    second_per_token = 1.0
    rig.admit("b", prompt(100, 1), 1)
    rig.run()
    assert [shape(plan)[0][2] for plan in rig.plans[-3:]] == [16, 16, 4]


def test_slow_decode_steps_do_not_shrink_the_chunks_of_the_next_prompt() -> None:
    rig = Rig(before_step=lambda plan: rig.clock.advance(0.1 + plan.num_tokens * 0.001))
    rig.admit("a", prompt(256), 200)
    rig.run()
    rig.admit("b", prompt(256, 1), 1)
    rig.run()
    assert shape(rig.plans[-1])[0][2] == 256
    rig.assert_right("a", "b")


def test_no_more_run_at_once_than_allowed_and_the_rest_wait_in_order() -> None:
    rig = Rig(max_running=2)
    for index in range(5):
        rig.admit(str(index), prompt(5, index), 3)
    rig.step()
    assert rig.engine.stats().num_running == 2
    assert rig.engine.stats().num_waiting == 3
    rig.run()
    assert max(len(plan.chunks) for plan in rig.plans) == 2
    assert list(rig.finished) == [RequestId(str(index)) for index in range(5)]
    rig.assert_right(*"01234")
    rig.assert_empty()


# --- blocks ------------------------------------------------------------------------------------------------


def test_the_latest_gives_its_blocks_up_and_comes_back_when_its_context_and_a_block_fit() -> None:
    rig = Rig(5, prefix_cache=False)
    rig.admit("old", prompt(30), 40)
    rig.admit("new", prompt(30, 1), 20)
    steps = 0
    while not rig.engine.stats().num_preemptions:
        rig.step()
        steps += 1
    assert [chunk.request.id for chunk in rig.plans[-1].chunks] == ["old"]
    assert rig.engine.stats().num_waiting == 1
    rig.run()
    rig.assert_right("old", "new")
    assert rig.engine.stats().num_preemptions == 1, "no thrashing"
    assert list(rig.finished) == ["old", "new"]
    rig.assert_empty()


def test_a_preempted_request_goes_before_those_that_came_later() -> None:
    rig = Rig(6, prefix_cache=False)
    rig.admit("old", prompt(30), 30)
    rig.admit("new", prompt(30, 1), 30)
    while not rig.engine.stats().num_preemptions:
        rig.step()
    rig.admit("later", prompt(1, 2), 2)
    assert rig.engine.stats().free_blocks == 2, "room for `later` and a block, not for `new`"
    rig.run()
    order = [chunk.request.id for plan in rig.plans for chunk in plan.chunks if chunk.start == 0]
    assert order == ["old", "new", "new", "later"]
    rig.assert_right("old", "new", "later")


def test_the_newest_pauses_rather_than_lose_its_own_work() -> None:
    rig = Rig(4, prefix_cache=False)
    rig.admit("old", prompt(17), 13)  # never needs a third block
    rig.admit("new", prompt(31, 1), 20)
    rig.run()
    assert rig.engine.stats().num_preemptions == 0
    rig.assert_right("old", "new")
    rig.assert_empty()


def test_everybody_finishes_in_a_pool_that_holds_only_one_of_them() -> None:
    rig = Rig(3)
    for index in range(6):
        rig.admit(str(index), prompt(8, index), 41, seed=index)
    rig.run()
    rig.assert_right(*"012345")
    rig.assert_empty()


def test_a_request_that_fills_the_pool_to_the_last_token_runs_and_a_longer_one_fails_at_once() -> None:
    rig = Rig(3)
    assert rig.engine.fits_alone(49)
    assert not rig.engine.fits_alone(50)
    rig.admit("fits", prompt(40), 9)
    rig.admit("too long", prompt(40, 1), 10)
    rig.run()
    rig.assert_right("fits")
    assert list(rig.failed) == ["too long"]
    rig.assert_empty()


def test_prefill_takes_a_prompt_only_whole_and_never_preempts() -> None:
    rig = Rig(4, admit_whole=True, max_step_tokens=16)
    rig.admit("a", prompt(40), prefill=True)
    rig.admit("b", prompt(40, 1), prefill=True)
    rig.run()
    assert list(rig.finished) == ["a"]
    assert rig.engine.stats().leased_blocks == 3
    assert rig.engine.stats().num_waiting == 1
    rig.release("a")
    rig.run()
    assert list(rig.finished) == ["a", "b"]
    assert rig.engine.stats().num_preemptions == 0
    rig.release("b")
    rig.assert_empty()


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_prefill_announces_each_block_once_in_order_and_holds_exactly_those(num_tokens: int) -> None:
    rig = Rig(admit_whole=True, max_step_tokens=24)
    tokens = prompt(num_tokens)
    rig.admit("a", tokens, 5, prefill=True)
    rig.run()
    refs = rig.ready[RequestId("a")]
    assert len(refs) == -(-num_tokens // 16) == rig.engine.stats().leased_blocks
    assert [ref.generation for ref in refs] == [rig.memory.generations[ref.block] for ref in refs]
    for progress in rig.progress[RequestId("a")]:
        assert progress.first_ready + len(progress.ready) == (
            len(refs) if progress.stopped else progress.num_computed // 16
        )
    assert rig.tokens[RequestId("a")] == rig.expected("a", 1)
    # What was announced is what a decode node needs.
    decode = Rig()
    decode.reserve("a", tokens)
    decode.run()
    for ref, block in zip(refs, decode.reserved[RequestId("a")].blocks, strict=True):
        decode.memory.blocks[block] = rig.memory.blocks[ref.block]
    first = rig.tokens[RequestId("a")]
    decode.admit("a", tokens + first, 5, num_prompt_tokens=num_tokens, num_computed=num_tokens)
    decode.run()
    assert first + decode.tokens[RequestId("a")] == rig.expected("a")
    rig.release("a")
    rig.assert_empty()
    decode.assert_empty()


def test_prefill_announces_cached_blocks_with_its_first_step() -> None:
    rig = Rig(admit_whole=True)
    for id in "ab":
        rig.admit(id, prompt(40), prefill=True)
        rig.run()
    assert [ref.block for ref in rig.ready[RequestId("a")][:2]] == [ref.block for ref in rig.ready[RequestId("b")][:2]]
    assert len(rig.ready[RequestId("b")]) == 3
    assert rig.progress[RequestId("b")][0].num_cached == 32
    for id in "ab":
        rig.release(id)
    rig.assert_empty()


def test_released_prefill_blocks_stay_valid_for_a_late_reader_until_they_are_reused() -> None:
    rig = Rig(3, admit_whole=True)
    rig.admit("a", prompt(40), prefill=True)
    rig.run()
    refs = rig.ready[RequestId("a")]
    rig.release("a")
    rig.step()
    assert [rig.memory.generations[ref.block] for ref in refs] == [ref.generation for ref in refs]
    rig.admit("b", prompt(40, 1), prefill=True)
    rig.run()
    assert all(rig.memory.generations[ref.block] != ref.generation for ref in refs)
    rig.release("b")
    rig.assert_empty()


def test_a_whole_request_that_decodes_has_all_its_blocks_from_the_start_and_keeps_what_it_used() -> None:
    rig = Rig(8, admit_whole=True)
    rig.admit("a", prompt(20), 60)
    rig.step()
    assert rig.engine.stats().free_blocks == 8 - 5
    rig.run()
    rig.assert_right("a")
    rig.assert_empty()


# --- departures --------------------------------------------------------------------------------------------


def test_a_release_at_any_moment_frees_everything_and_harms_nobody() -> None:
    for steps in range(14):
        rig = Rig(6, max_step_tokens=16, max_running=2, prefix_cache=steps % 2 == 0)
        for index, id in enumerate("abc"):
            rig.admit(id, prompt(20, index % 2), 12, seed=index)
        for _ in range(steps):
            rig.step()
        rig.release("b")
        rig.release("b")
        rig.run()
        rig.assert_right("a", "c")
        rig.assert_empty()


def test_what_is_malformed_fails_alone() -> None:
    rig = Rig(max_model_len=64)
    rig.admit("good", prompt(20), 6)
    rig.admit("empty", [], 6)
    rig.admit("nothing left", prompt(20), 6, num_computed=20)
    rig.admit("context", prompt(64), 6)
    rig.admit("no number", [1, -5] * 10, 6)
    rig.reserve("lease", prompt(16))
    rig.step()
    rig.admit("lease", prompt(32), 6, num_computed=20)
    rig.admit("good", prompt(20), 6)  # an id that is here already
    rig.run()
    assert set(rig.failed) == {"empty", "nothing left", "context", "no number", "lease", "good"}
    rig.assert_empty()


def test_progress_that_a_lease_should_have_brought_counts_for_nothing_without_it() -> None:
    rig = Rig()
    rig.admit("a", prompt(40), 6, num_computed=32)
    rig.run()
    rig.assert_right("a")

"""Several answers to one prompt, from blocks that they share: right, whatever becomes of each of them."""

import pytest

from common.engine.request import choice_seed, sampling_of
from common.messages import RequestId, Sampling
from tests.unit.common.engine.rig import Rig

LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 50]


def prompt(num_tokens: int, family: int = 0) -> list[int]:
    return [family * 1000 + position for position in range(num_tokens)]


def ask(rig: Rig, id: str, num_tokens: int, max_tokens: int = 20, *, seed: int = 0) -> list[str]:
    """A prompt that is computed here, for three answers; their ids."""
    tokens = prompt(num_tokens)
    rig.admit(id, tokens, max_tokens, seed=seed, forks=[tokens, tokens], num_shared=num_tokens)
    return [id, f"{id}/1", f"{id}/2"]


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_every_choice_is_what_it_would_be_alone_and_the_prompt_is_computed_once(
    num_tokens: int, prefix_cache: bool
) -> None:
    rig = Rig(prefix_cache=prefix_cache)
    ids = ask(rig, "a", num_tokens)
    rig.run()
    rig.assert_right(*ids)
    assert len({tuple(rig.tokens[RequestId(id)]) for id in ids}) == 3, "each draws for itself"
    computed = sum(plan.num_tokens for plan in rig.plans)
    assert computed == num_tokens + 2 + 3 * 19, "the prompt once, its last token again for two more first draws"
    rig.assert_empty()


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_choices_whose_first_token_is_drawn_share_a_prompt_that_was_pulled(num_tokens: int) -> None:
    rig = Rig()
    tokens = prompt(num_tokens)
    rig.reserve("a", tokens, num_forks=2)
    rig.step()
    rig.pull("a", tokens)
    firsts = [[*tokens, 7], [*tokens, 8], [*tokens, 9]]
    rig.admit(
        "a",
        firsts[0],
        20,
        num_prompt_tokens=num_tokens,
        num_computed=num_tokens,
        forks=firsts[1:],
        num_shared=num_tokens,
    )
    rig.run()
    for id in ("a", "a/1", "a/2"):
        assert rig.tokens[RequestId(id)] == rig.expected(id, 19)
    assert sum(plan.num_tokens for plan in rig.plans) == 3 * 19, "nothing of the prompt is computed here"
    rig.assert_empty()


def test_full_blocks_are_shared_and_the_partial_one_is_copied_once_for_each_fork() -> None:
    rig = Rig()
    ask(rig, "a", 40)
    while not rig.tokens.get(RequestId("a/2")):
        rig.step()
    assert rig.memory.num_blocks - rig.engine.stats().free_blocks == 2 + 3
    assert len(rig.copies) == 2
    assert len({source for source, _ in rig.copies}) == 1
    assert len({target for _, target in rig.copies}) == 2
    rig.run()
    rig.assert_empty()


def test_a_prompt_of_whole_blocks_is_shared_but_for_the_block_of_the_token_that_is_computed_again() -> None:
    rig = Rig()
    ids = ask(rig, "a", 32)
    rig.run()
    rig.assert_right(*ids)
    assert len(rig.copies) == 2, "a full block is never written to"


def test_a_fork_that_already_has_tokens_computes_only_those() -> None:
    rig = Rig()
    tokens = prompt(40)
    tails = [rig_tail(tokens, choice, 5 + choice) for choice in range(3)]
    rig.admit(
        "a",
        [*tokens, *tails[0]],
        20,
        num_prompt_tokens=40,
        forks=[[*tokens, *tail] for tail in tails[1:]],
        num_shared=40,
    )
    rig.run()
    for choice, id in enumerate(("a", "a/1", "a/2")):
        whole = [*tails[choice], *rig.tokens[RequestId(id)]]
        assert whole == rig_tail(tokens, choice, 20)
    assert sum(plan.num_tokens for plan in rig.plans) == 40 + 3 * 19
    rig.assert_empty()


def rig_tail(tokens: list[int], choice: int, num_tokens: int) -> list[int]:
    """The first tokens of that choice's answer."""
    rig = Rig()
    rig.requests[RequestId("x")] = (tokens, sampling_of(Sampling(max_tokens=20, seed=0), choice))
    return rig.expected("x", num_tokens)


def test_a_first_token_that_ends_the_parent_does_not_end_its_forks() -> None:
    alone = Rig()
    ids = ask(alone, "a", 40)
    alone.run()
    stop = alone.tokens[RequestId("a")][0]
    rig = Rig()
    tokens = prompt(40)
    rig.admit("a", tokens, 20, stop=(stop,), forks=[tokens, tokens], num_shared=40)
    rig.run()
    assert rig.tokens[RequestId("a")] == [stop]
    rig.assert_right(*ids)
    rig.assert_empty()


def test_each_choice_can_be_released_alone_at_any_step() -> None:
    for steps in range(1, 12):
        for released in range(3):
            rig = Rig()
            ids = ask(rig, "a", 40)
            for _ in range(steps):
                rig.step()
            if rig.tokens.get(RequestId("a")):  # before that the parent takes them all with it
                rig.release(ids[released])
                rig.run()
                rig.assert_right(*(id for id in ids if id != ids[released]))
            else:
                rig.release("a")
                rig.run()
                assert not rig.tokens
            rig.assert_empty()


def test_a_parent_that_fails_takes_its_forks_with_it() -> None:
    rig = Rig()
    rig.admit("a", prompt(40), 600, forks=[prompt(40)], num_shared=40)
    rig.run()
    assert RequestId("a") not in rig.failed
    rig.assert_empty()
    small = Rig(4)
    ask(small, "a", 40, 100)
    small.run()
    assert list(small.failed) == [RequestId("a")]
    small.assert_empty()


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("num_blocks", [4, 5, 6, 8])
def test_in_a_pool_for_one_choice_all_of_them_finish_one_after_the_other(num_blocks: int, prefix_cache: bool) -> None:
    rig = Rig(num_blocks, prefix_cache=prefix_cache)
    ids = ask(rig, "a", 40, 25)
    other = ask(rig, "b", 17, 40, seed=5)
    rig.run()
    rig.assert_right(*ids, *other)
    assert rig.engine.stats().num_preemptions
    rig.assert_empty()


def test_what_a_prefill_request_draws_for_others_are_their_first_tokens() -> None:
    for num_tokens in LENGTHS:
        rig = Rig(admit_whole=True)
        request = rig.admit("a", prompt(num_tokens), 20, prefill=True)
        request.also = tuple(sampling_of(request.sampling, choice) for choice in (1, 2))
        for _ in range(2):  # the second one finds most of it computed
            rig.run()
            last = rig.progress[RequestId("a")][-1]
            drawn = [last.token, *(one.token for one in last.others)]
            assert drawn == [rig_tail(prompt(num_tokens), choice, 1)[0] for choice in range(3)]
            assert [one.finish for one in last.others] == [None, None]
            rig.release("a")
            rig.progress.clear()
            rig.finished.clear()
            rig.ready.clear()
            again = rig.admit("a", prompt(num_tokens), 20, prefill=True)
            again.also = request.also
        rig.release("a")
        rig.run()
        rig.assert_empty()


def test_each_choice_has_a_seed_of_its_own_and_the_first_keeps_the_one_it_was_given() -> None:
    assert choice_seed(77, 0) == 77
    assert len({choice_seed(seed, choice) for seed in range(50) for choice in range(16)}) == 50 * 16
    assert choice_seed(77, 1) == 7086638178683056257, "fixed for good: a failover may cross versions"

"""How large a step is, from what steps took; and where a prompt is cut, from what pulls took."""

import pytest

from common.engine.pace import Pace


def a_pace(*, max_step_s: float = 0.5, itl_target_s: float = 0.1) -> Pace:
    return Pace(first_tokens=128, max_step_s=max_step_s, itl_target_s=itl_target_s, block_size=16)


def taught(*, start_s: float, decode_s: float, token_s: float, itl_target_s: float = 0.1) -> Pace:
    """One that has seen steps of a machine with these costs."""
    pace = a_pace(itl_target_s=itl_target_s)
    for decodes, tokens in ((0, 128), (1, 0), (4, 64), (8, 32), (8, 0), (2, 200), (0, 300), (6, 16)):
        pace.observe_step(decodes, tokens, start_s + decode_s * decodes + token_s * tokens)
    return pace


# --- steps ---------------------------------------------------------------------------------------------------


def test_the_first_step_is_modest_and_never_above_the_limit() -> None:
    assert a_pace().prompt_tokens(0, most=512) == 128
    assert a_pace().prompt_tokens(0, most=64) == 64


def test_a_step_gets_the_tokens_that_its_seconds_are_good_for() -> None:
    pace = a_pace()
    pace.observe_step(0, 100, 0.2)
    assert pace.prompt_tokens(0, most=1000) == 250
    assert pace.prompt_tokens(0, most=200) == 200


def test_a_model_that_slows_down_is_followed() -> None:
    pace = a_pace()
    pace.observe_step(0, 100, 0.1)
    for _ in range(20):
        pace.observe_step(0, 100, 1.0)
    assert 49 <= pace.prompt_tokens(0, most=1000) <= 51


def test_one_stall_costs_less_than_half_of_the_next_step() -> None:
    pace = a_pace()
    pace.observe_step(0, 100, 0.1)
    pace.observe_step(0, 100, 60.0)
    assert pace.prompt_tokens(0, most=1000) > 250


def test_steps_that_take_no_time_at_all_are_unlimited() -> None:
    pace = a_pace()
    pace.observe_step(0, 100, 0.0)
    assert pace.prompt_tokens(0, most=1000) == 1000


@pytest.mark.parametrize("num_decodes", [1, 4, 8, 12])
def test_a_step_with_decodes_ends_at_the_target(num_decodes: int) -> None:
    pace = taught(start_s=0.02, decode_s=0.003, token_s=0.0005)
    tokens = pace.prompt_tokens(num_decodes, most=512)
    assert 0.095 < 0.02 + 0.003 * num_decodes + 0.0005 * tokens < 0.105


def test_without_decodes_or_without_a_target_a_step_is_as_long_as_it_may_be() -> None:
    assert 950 < taught(start_s=0.02, decode_s=0.003, token_s=0.0005).prompt_tokens(0, most=2000) < 970
    free = taught(start_s=0.02, decode_s=0.003, token_s=0.0005, itl_target_s=0.0)
    assert 900 < free.prompt_tokens(8, most=2000) < 920


def test_where_a_sequence_may_join_any_moment_a_step_ends_at_the_target() -> None:
    tokens = taught(start_s=0.02, decode_s=0.003, token_s=0.0005).prompt_tokens(0, most=512, joining=True)
    assert 0.095 < 0.02 + 0.0005 * tokens < 0.105


def test_where_decodes_alone_take_the_target_prompts_get_half_as_much_again() -> None:
    pace = taught(start_s=0.06, decode_s=0.01, token_s=0.001)
    assert 65 < pace.prompt_tokens(8, most=512) < 75  # decodes take 140 ms


def test_a_block_goes_in_however_slow_the_machine() -> None:
    assert taught(start_s=1.0, decode_s=0.1, token_s=1.0).prompt_tokens(8, most=512) == 16
    assert taught(start_s=1.0, decode_s=0.1, token_s=1.0).prompt_tokens(8, most=5) == 5


# --- the speed at prompts ------------------------------------------------------------------------------------


def test_nothing_is_said_of_the_speed_at_prompts_before_one_was_computed() -> None:
    pace = a_pace()
    assert pace.prompt_tokens_per_s == 0.0
    pace.observe_step(8, 0, 0.05)
    pace.prompt_tokens(8, most=512)
    assert pace.prompt_tokens_per_s == 0.0


@pytest.mark.parametrize("num_decodes", [0, 4, 12])
def test_the_speed_at_prompts_is_what_a_step_beside_the_decodes_makes_of_them(num_decodes: int) -> None:
    pace = taught(start_s=0.02, decode_s=0.003, token_s=0.0005)
    num_tokens = pace.prompt_tokens(num_decodes, most=512)
    expected = num_tokens / (0.02 + 0.003 * num_decodes + 0.0005 * num_tokens)
    assert pace.prompt_tokens_per_s == pytest.approx(expected, rel=0.03)


def test_streams_take_from_the_speed_at_prompts() -> None:
    pace = taught(start_s=0.02, decode_s=0.003, token_s=0.0005)
    speeds = []
    for num_decodes in (0, 1, 8, 20):
        pace.prompt_tokens(num_decodes, most=512)
        speeds.append(pace.prompt_tokens_per_s)
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[0] > 2 * speeds[-1] > 0


# --- chunks for a reader -------------------------------------------------------------------------------------


def makespan(sizes: list[int], *, start_s: float, token_s: float, pull_s: float) -> float:
    """When the last of these chunks is pulled, each pull beginning when its chunk is computed and the wire is free."""
    computed_s = pulled_s = 0.0
    for size in sizes:
        computed_s += start_s + token_s * size
        pulled_s = max(pulled_s, computed_s) + pull_s * size
    return pulled_s


def cuts(pace: Pace, num_tokens: int, *, most: int = 512) -> list[int]:
    """As the scheduler does it, chunks ending with a block."""
    sizes: list[int] = []
    pull_left_s = 0.0
    while left := num_tokens - sum(sizes):
        size = min(pace.chunk_tokens(left, pull_left_s, most=most), left)
        sizes.append(size if size == left else max(size - size % 16, 16))
        pull_left_s = pace.pull_left_s(pull_left_s, sizes[-1])
    return sizes


def with_pulls(start_s: float, token_s: float, pull_s: float) -> Pace:
    pace = taught(start_s=start_s, decode_s=0.0, token_s=token_s)
    for num_tokens in (64, 512, 16, 200):
        pace.observe_pull(num_tokens, 0.002 + pull_s * num_tokens)
    return pace


def test_as_long_as_no_pull_was_seen_chunks_are_as_large_as_the_step() -> None:
    assert cuts(taught(start_s=0.02, decode_s=0.0, token_s=0.001), 1200) == [512, 512, 176]


def test_a_wire_much_faster_than_the_model_changes_nothing() -> None:
    """As shared memory beside a CPU: the last pull takes less than one more step would."""
    assert cuts(with_pulls(0.04, 0.002, 0.00001), 1200) == [512, 512, 176]


@pytest.mark.parametrize("num_tokens", [300, 1024, 1500, 4000])
@pytest.mark.parametrize("pull_s", [0.0002, 0.0005, 0.0009, 0.0011, 0.002, 0.005])
def test_on_a_slow_wire_the_reader_has_all_sooner_than_with_any_even_chunks(num_tokens: int, pull_s: float) -> None:
    start_s, token_s = 0.01, 0.001
    costs = {"start_s": start_s, "token_s": token_s, "pull_s": pull_s}
    adapted = makespan(cuts(with_pulls(start_s, token_s, pull_s), num_tokens), **costs)
    even = {}
    for size in range(16, 513, 16):
        sizes = [size] * (num_tokens // size) + ([num_tokens % size] if num_tokens % size else [])
        even[size] = makespan(sizes, **costs)
    assert adapted <= even[512], "never worse than as large as the step allows"
    assert adapted <= 1.03 * min(even.values()) + start_s

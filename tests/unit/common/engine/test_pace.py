from common.engine.pace import Pace


def test_the_first_step_is_modest_and_never_above_the_limit() -> None:
    assert Pace(128).tokens_within(0.5, most=512) == 128
    assert Pace(128).tokens_within(0.5, most=64) == 64


def test_a_step_gets_the_tokens_that_its_seconds_are_good_for() -> None:
    pace = Pace(128)
    pace.observe(100, 0.2)
    assert pace.tokens_within(0.5, most=1000) == 250
    assert pace.tokens_within(0.5, most=200) == 200


def test_a_model_that_slows_down_is_followed() -> None:
    pace = Pace(128)
    pace.observe(100, 0.1)
    for _ in range(20):
        pace.observe(100, 1.0)
    assert 49 <= pace.tokens_within(0.5, most=1000) <= 51


def test_one_stall_costs_less_than_half_of_the_next_step() -> None:
    pace = Pace(128)
    pace.observe(100, 0.1)
    pace.observe(100, 60.0)
    assert pace.tokens_within(0.5, most=1000) > 250


def test_steps_that_take_no_time_at_all_are_unlimited() -> None:
    pace = Pace(128)
    pace.observe(100, 0.0)
    assert pace.tokens_within(0.5, most=1000) == 1000

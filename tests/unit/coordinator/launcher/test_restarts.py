from coordinator.launcher.restarts import RestartHistory, RestartPolicy


def test_delays_double_up_to_the_limit() -> None:
    history = RestartHistory(RestartPolicy())
    delays = [history.died(now_s=100.0 * n, lived_s=1.0, status=1, starting_up=True) for n in range(7)]
    assert delays == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


def test_a_child_that_lived_long_is_restarted_at_once_again() -> None:
    history = RestartHistory(RestartPolicy())
    for n in range(4):
        history.died(now_s=float(n), lived_s=1.0, status=1, starting_up=False)
    assert history.died(now_s=100.0, lived_s=90.0, status=-9, starting_up=False) == 0.2


def test_the_fifth_death_within_thirty_seconds_of_start_up_is_the_last() -> None:
    history = RestartHistory(RestartPolicy())
    delays = [history.died(now_s=7.0 * n, lived_s=1.0, status=1, starting_up=True) for n in range(5)]
    assert delays[-1] is None
    assert None not in delays[:-1]


def test_five_deaths_over_a_longer_time_are_not_the_last() -> None:
    history = RestartHistory(RestartPolicy())
    delays = [history.died(now_s=8.0 * n, lived_s=1.0, status=1, starting_up=True) for n in range(20)]
    assert None not in delays


def test_after_start_up_a_child_is_restarted_for_ever() -> None:
    history = RestartHistory(RestartPolicy())
    delays = [history.died(now_s=0.1 * n, lived_s=0.0, status=2, starting_up=False) for n in range(50)]
    assert delays[-1] == 5.0
    assert None not in delays


def test_a_child_whose_settings_are_wrong_is_not_started_again_during_start_up() -> None:
    history = RestartHistory(RestartPolicy())
    assert history.died(now_s=0.0, lived_s=0.1, status=2, starting_up=True) is None

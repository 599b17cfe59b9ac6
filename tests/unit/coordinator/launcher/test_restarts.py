from coordinator.launcher.restarts import RestartHistory, RestartPolicy


def test_delays_double_up_to_the_limit() -> None:
    history = RestartHistory(RestartPolicy())
    delays = [history.died(lived_s=1.0, status=1, starting_up=False) for _ in range(7)]
    assert delays == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


def test_a_child_that_lived_long_is_restarted_at_once_again() -> None:
    history = RestartHistory(RestartPolicy())
    for _ in range(4):
        history.died(lived_s=1.0, status=1, starting_up=False)
    assert history.died(lived_s=90.0, status=-9, starting_up=False) == 0.2


def test_the_fifth_death_of_start_up_is_the_last_however_long_each_took() -> None:
    for lived_s in (1.0, 20.0, 200.0):
        history = RestartHistory(RestartPolicy())
        delays = [history.died(lived_s=lived_s, status=1, starting_up=True) for _ in range(5)]
        assert delays[-1] is None
        assert None not in delays[:-1]


def test_after_start_up_a_child_is_restarted_for_ever() -> None:
    history = RestartHistory(RestartPolicy())
    delays = [history.died(lived_s=0.0, status=2, starting_up=False) for _ in range(50)]
    assert delays[-1] == 5.0
    assert None not in delays


def test_a_child_whose_settings_are_wrong_is_not_started_again_during_start_up() -> None:
    history = RestartHistory(RestartPolicy())
    assert history.died(lived_s=0.1, status=2, starting_up=True) is None

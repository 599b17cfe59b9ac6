"""How long to wait before a dead child is started again, and when to give up. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """Delays double from `first_delay_s` to `max_delay_s`; a child that lived for `window_s` starts afresh.

    During start-up the `max_deaths`-th death is the last, however long each took (a node that is killed while it
    loads a big model lives for minutes), and so is any death with `hopeless_status`: the child itself says that
    starting it again cannot help.
    """

    first_delay_s: float = 0.2
    max_delay_s: float = 5.0
    max_deaths: int = 5
    window_s: float = 30.0
    hopeless_status: int = 2


class RestartHistory:
    """The deaths of one child."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._num_deaths = 0
        self._delay_s = policy.first_delay_s

    def died(self, *, lived_s: float, status: int, starting_up: bool) -> float | None:
        """Seconds until it is to be started again, None to give up."""
        policy = self._policy
        if lived_s >= policy.window_s:
            self._delay_s = policy.first_delay_s
        self._num_deaths += 1
        if starting_up and (status == policy.hopeless_status or self._num_deaths >= policy.max_deaths):
            return None
        delay_s = self._delay_s
        self._delay_s = min(2 * delay_s, policy.max_delay_s)
        return delay_s

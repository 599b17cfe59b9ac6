"""How many tokens fit into a step that must end in time. Pure: seconds are handed in."""

_WEIGHT = 0.25
"""Of the newest observation: a change of speed is followed in about eight steps."""
_MOST_GROWTH = 4.0
"""One observation counts at most this much above the estimate: a single stall (page faults, a paused
process) must not shrink the steps that follow to crumbs."""


class Pace:
    """A moving average of seconds per computed token, over the steps that computed prompts.

    Steps that only decode are left out: they are bound by reading the weights, and their seconds per
    token say nothing about a longer chunk.
    """

    def __init__(self, first_tokens: int) -> None:
        """`first_tokens`: a modest step to learn from, while nothing has been observed."""
        self._first_tokens = first_tokens
        self._token_s: float | None = None

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step that computed prompts took `seconds` for `num_tokens`, its decode tokens included."""
        sample_s = seconds / num_tokens
        if self._token_s is None:
            self._token_s = sample_s
        else:
            self._token_s += _WEIGHT * (min(sample_s, _MOST_GROWTH * self._token_s) - self._token_s)

    def tokens_within(self, seconds: float, *, most: int) -> int:
        """Tokens that a step of `seconds` can compute, at most `most`; may be 0."""
        if self._token_s is None:
            return min(self._first_tokens, most)
        return most if self._token_s * most <= seconds else int(seconds / self._token_s)

"""What an engine has done: totals, and its speed of late. Pure: seconds are handed in."""

from common.engine.request import StepPlan

_HALF_LIFE_S = 2.0
"""Of a step's weight in the speed, in seconds of step time."""


class Meter:
    def __init__(self) -> None:
        self.num_steps = 0
        self.num_generated_tokens = 0
        self.num_computed_prompt_tokens = 0
        self.num_failed = 0
        self._recent_tokens = 0.0
        self._recent_s = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens computed, prompt and output alike, per second of recent step time; 0 before the first step."""
        return self._recent_tokens / self._recent_s if self._recent_s > 0 else 0.0

    def count_step(self, plan: StepPlan, *, num_drawn: int, seconds: float) -> None:
        self.num_steps += 1
        self.num_generated_tokens += num_drawn
        num_tokens = 0
        for chunk in plan.chunks:
            num_tokens += chunk.num_tokens
            of_prompt = chunk.request.num_prompt_tokens - chunk.start
            if of_prompt > 0:
                self.num_computed_prompt_tokens += min(of_prompt, chunk.num_tokens)
        kept: float = 0.5 ** (seconds / _HALF_LIFE_S)
        self._recent_tokens = self._recent_tokens * kept + num_tokens
        self._recent_s = self._recent_s * kept + seconds

"""A request's answers, as far as the gateway has them: one mostly, or several to the same prompt. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from common.messages import Branch, FinishReason, Sampling


@dataclass(slots=True)
class AnswerChoice:
    """`index` is its place among the request's."""

    index: int
    sampling: Sampling
    delivered: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    logprob: float = 0.0
    """Sum over what was delivered, if it is scored."""

    @property
    def mean_logprob(self) -> float:
        return self.logprob / max(1, len(self.delivered))

    def take(self, tokens: list[int], logprob: float | None) -> list[int]:
        """Those that were promised and not delivered yet; they are now."""
        self.logprob += logprob or 0.0
        room = self.sampling.max_tokens - len(self.delivered)
        taken = tokens if len(tokens) <= room else tokens[:room]
        self.delivered += taken
        return taken

    def complete(self) -> FinishReason | None:
        """How it ends if all there was to deliver is."""
        if len(self.delivered) >= self.sampling.max_tokens:
            return FinishReason.LENGTH
        if self.delivered and self.delivered[-1] in self.sampling.stop_token_ids:
            return FinishReason.STOP
        return None


class AnswerChoices:
    """All of a request, by index."""

    def __init__(self, prompt: Sequence[int], sampling: Sampling, number: int) -> None:
        self._prompt = prompt
        self._all = [AnswerChoice(index, sampling) for index in range(number)]

    def __getitem__(self, index: int) -> AnswerChoice:
        return self._all[index]

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[AnswerChoice]:
        return iter(self._all)

    @property
    def unfinished(self) -> list[AnswerChoice]:
        return [choice for choice in self._all if choice.finish is None]

    @property
    def have_begun(self) -> bool:
        """A token was delivered."""
        return any(choice.delivered for choice in self._all)

    def num_tokens(self, index: int) -> int:
        """Prompt and delivered tokens of one of them: where its next one belongs."""
        return len(self._prompt) + len(self._all[index].delivered)

    @property
    def longest(self) -> int:
        """Prompt and delivered tokens of the longest that is not finished."""
        return len(self._prompt) + max((len(choice.delivered) for choice in self.unfinished), default=0)

    def remaining(self, *, is_takeover: bool) -> tuple[list[int], tuple[Branch, ...]]:
        """What those that are not finished share, and what each has beyond: `Generate.tokens` and `branches`.

        A single one that is left shares all it has with itself; at a takeover the source may share less.
        """
        left = self.unfinished
        if len(self._all) == 1:
            return [*self._prompt, *left[0].delivered], ()
        if len(left) == 1 and not is_takeover:
            return [*self._prompt, *left[0].delivered], (Branch(left[0].index),)
        return list(self._prompt), tuple(Branch(choice.index, list(choice.delivered)) for choice in left)

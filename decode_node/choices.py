"""The answers that one Generate call writes: one mostly, or several to the same prompt. Pure."""

from collections.abc import Iterator, Sequence

from common.engine.events import Reserve
from common.engine.request import EngineRequest, sampling_of
from common.messages import Branch, Generate, HandedOver, RequestId


class Choice:
    """One of them. `tokens` is all of it: the prompt, what was delivered before, what this call passed on."""

    __slots__ = ("has_emitted", "id", "index", "is_open", "is_running", "is_unwanted", "tokens")

    def __init__(self, index: int, tokens: list[int]) -> None:
        self.index = index
        self.tokens = tokens
        self.id: RequestId | None = None
        """In the engine, once it is there."""
        self.is_open = True
        self.has_emitted = False
        self.is_running = False
        """The engine has drawn a token for it: by then it is a request of its own there."""
        self.is_unwanted = False
        """To be let go of once it runs."""


class Choices:
    """All of a call. `shared` is what each of them begins with."""

    def __init__(self, body: Generate, id: RequestId, deadline_s: float) -> None:
        """`deadline_s` on the engine's clock."""
        self._body = body
        self._deadline_s = deadline_s
        self._is_one = not body.branches
        self.by_id: dict[RequestId, Choice] = {}
        """Those that are in the engine, or were."""
        self.ids = [id, *(RequestId(f"{id}/{place}") for place in range(1, len(body.branches)))]
        """Names in the engine, for those that are open when it gets them; the call's own id comes first."""
        self._set(body.tokens, body.branches or (Branch(0),))

    def _set(self, shared: Sequence[int], branches: Sequence[Branch]) -> None:
        self.shared = list(shared)
        self._all = [Choice(one.choice, [*shared, *one.tokens]) for one in branches]

    def __iter__(self) -> Iterator[Choice]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    @property
    def open(self) -> list[Choice]:
        return [choice for choice in self._all if choice.is_open]

    @property
    def indexes(self) -> tuple[int, ...]:
        return tuple(choice.index for choice in self._all)

    @property
    def are_bare(self) -> bool:
        """Whether none has more than what all share."""
        return all(len(choice.tokens) == len(self.shared) for choice in self._all)

    def at(self, index: int) -> Choice | None:
        """An open one."""
        return next((choice for choice in self._all if choice.index == index and choice.is_open), None)

    @property
    def first_running(self) -> RequestId:
        """In the engine: one of those that are there, which all have the shared blocks."""
        return next((choice.id for choice in self._all if choice.is_open and choice.id), self.ids[0])

    def narrow(self) -> None:
        """What a single open one had since it began is computed with the rest from now on."""
        if len(self.open) == 1:
            self._all = self.open
            self.shared = list(self._all[0].tokens)

    # --- from node to node ---------------------------------------------------------------------------------

    def handed_over(self) -> HandedOver:
        """What another node needs to go on."""
        if self._is_one:
            return HandedOver(list(self._all[0].tokens))
        start = len(self.shared)
        return HandedOver(self.shared, tuple(Branch(choice.index, choice.tokens[start:]) for choice in self.open))

    def take_over(self, event: HandedOver) -> bool:
        """Go on from there, with those that are still wanted here. False if it is another request's."""
        if event.tokens[: len(self.shared)] != self.shared or self._is_one != (not event.branches):
            return False
        self._set(event.tokens, [one for one in event.branches if self.at(one.choice)] or [Branch(0)][: self._is_one])
        return True

    # --- to the engine -------------------------------------------------------------------------------------

    def reservation(self) -> Reserve:
        """Room for what they share."""
        return Reserve(self.ids[0], list(self.shared), self._body.origin, self._deadline_s, len(self._all) - 1)

    def requests(self) -> list[EngineRequest]:
        """The open ones; the first bears the call's own id, and the others fork from it."""
        body = self._body
        self.by_id = dict(zip(self.ids, self.open, strict=False))
        for id, choice in self.by_id.items():
            choice.id = id
        return [
            EngineRequest(
                id=id,
                tokens=list(choice.tokens),
                num_prompt_tokens=body.num_prompt_tokens,
                sampling=sampling_of(body.sampling, choice.index),
                origin=body.origin,
                deadline_s=self._deadline_s,
            )
            for id, choice in self.by_id.items()
        ]

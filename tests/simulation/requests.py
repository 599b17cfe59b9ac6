"""What clients ask, what they get, and whether that was right."""

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from common.clock import new_id
from common.engine.request import sampling_of
from common.errors import BatonError, DeadlineError, ErrorCode
from common.messages import FinishReason, RequestId, Sampling
from common.model.fake import fake_oracle
from coordinator.gateway.session import Session
from tests.simulation.processes import MAX_MODEL_LEN, MODEL, GatewayProcess

LONG_S = 100.0
"""A deadline that no request should ever see: whoever does has hung."""
MAX_ATTEMPTS = 5
_DISHONEST = frozenset(
    {ErrorCode.INTERNAL, ErrorCode.INVALID_REQUEST, ErrorCode.CONTEXT_LENGTH, ErrorCode.INCOMPATIBLE}
)


@dataclass(slots=True, kw_only=True)
class Request:
    """One client's request; it is its relay's `Answer` too. Times are the simulation's."""

    number: int
    prompt: list[int]
    sampling: Sampling
    deadline_s: float
    hangs_up_after: int | None
    """Tokens after which the client leaves; 0 leaves a moment after asking."""
    stops_after: int | None
    """Tokens after which a stop string is found."""
    now_s: Callable[[], float]
    tell: Callable[[str], None]
    gateway: GatewayProcess | None = None
    session: Session | None = None
    task: "asyncio.Task[None] | None" = None
    num_choices: int = 1
    tokens: list[list[int]] = field(init=False)
    """By choice, as the next."""
    finishes: list[FinishReason | None] = field(init=False)
    ends: list[BatonError | None] = field(default_factory=list)
    ended_s: float = 0.0
    excused_s: float = 0.0
    """How long its gateway was frozen."""
    has_hung_up: bool = False
    strange: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = [[] for _ in range(self.num_choices)]
        self.finishes = [None] * self.num_choices

    # --- coordinator.gateway.relay.Answer -----------------------------------------------------------------

    def stopped(self, choice: int) -> bool:
        """Each choice finds its stop string one token later than the one before."""
        return self.stops_after is not None and len(self.tokens[choice]) >= self.stops_after + choice

    async def deliver(self, tokens: list[int], choice: int) -> None:
        if self.ends or self.finishes[choice]:
            self.strange.append(f"{len(tokens)} tokens of choice {choice} came after its end")
        if self.has_hung_up:
            raise ConnectionResetError
        self.tokens[choice] += tokens
        self.tell(f"request {self.number} got {tokens} of choice {choice}")
        if self.hangs_up_after is not None and len(self.tokens[choice]) >= self.hangs_up_after:
            self.hang_up()

    async def finish(self, reason: FinishReason, choice: int) -> None:
        if self.finishes[choice]:
            self.strange.append(f"choice {choice} finished again: {reason}")
        self.finishes[choice] = reason
        self.tell(f"request {self.number} finished choice {choice} after {len(self.tokens[choice])} tokens: {reason}")
        if all(self.finishes):
            self._end(None)

    async def fail(self, error: BatonError) -> None:
        self._end(error)

    def _end(self, error: BatonError | None) -> None:
        self.ends.append(error)
        self.ended_s = self.now_s()
        words = "well" if error is None else f"failed: {error.code}: {error.message}"
        self.tell(f"request {self.number} ended after {sum(map(len, self.tokens))} tokens: {words}")

    def hang_up(self) -> None:
        if not self.has_hung_up and not self.ends and self.task is not None:
            self.has_hung_up = True
            self.tell(f"request {self.number} hangs up")
            self.task.cancel()

    # --- what became of it --------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        return bool(self.ends) and self.ends[0] is None

    @property
    def failed(self) -> bool:
        return bool(self.ends) and self.ends[0] is not None

    @property
    def is_broken(self) -> bool:
        """Its gateway was killed."""
        return self.gateway is not None and self.gateway.process.is_dead

    def expected(self, choice: int) -> list[int]:
        return oracle(tuple(self.prompt), sampling_of(self.sampling, choice))

    def wrong(self, *, calm: bool) -> Iterator[str]:
        """What is not as it must be; `calm`: nothing was done to the cluster."""
        yield from self.strange
        for choice, tokens in enumerate(self.tokens):
            expected = self.expected(choice)
            if tokens != expected[: len(tokens)]:
                yield f"got {tokens} of choice {choice} where the oracle says {expected}"
        if self.is_broken:
            return
        if self.has_hung_up:
            if len(self.ends) > 1:
                yield f"ended {len(self.ends)} times: {self.ends}"
            return
        if len(self.ends) != 1:
            yield f"ended {len(self.ends)} times: {self.ends}"
            return
        if self.ended_s > self.deadline_s + self.excused_s + 1e-6:
            yield f"ended {self.ended_s - self.deadline_s:.3f} s after its deadline"
        if (error := self.ends[0]) is not None:
            yield from self._wrong_error(error, calm=calm)
            return
        for choice, tokens in enumerate(self.tokens):
            expected = self.expected(choice)
            if not self.stopped(choice) and len(tokens) != len(expected):
                yield f"finished choice {choice} with {len(tokens)} of {len(expected)} tokens"
            elif not self.stopped(choice) and self.finishes[choice] is not self._expected_reason(expected):
                yield f"finished choice {choice} with {self.finishes[choice]}"

    def _wrong_error(self, error: BatonError, *, calm: bool) -> Iterator[str]:
        hung = isinstance(error, DeadlineError) and self.now_s() > 0 and self.ended_s >= self.deadline_s - 1e-6
        if error.code in _DISHONEST:
            yield f"failed dishonestly: {error.code}: {error.message}"
        elif hung and self.has_long_deadline:
            yield "hung until its deadline"
        elif calm and not hung:
            yield f"failed though nothing happened to the cluster: {error.code}: {error.message}"

    @property
    def has_long_deadline(self) -> bool:
        assert self.session is not None
        return self.session.deadline_s - self.session.created_s >= LONG_S

    def _expected_reason(self, expected: list[int]) -> FinishReason:
        return FinishReason.STOP if expected[-1] in self.sampling.stop_token_ids else FinishReason.LENGTH


@lru_cache(maxsize=4096)
def _oracle(prompt: tuple[int, ...], sampling: Sampling) -> tuple[int, ...]:
    return tuple(fake_oracle(prompt, sampling.max_tokens, sampling, max_model_len=MAX_MODEL_LEN))


def oracle(prompt: tuple[int, ...], sampling: Sampling) -> list[int]:
    """What one engine without faults answers."""
    return list(_oracle(prompt, sampling))


def draw_prompt(rng: random.Random, length: int) -> list[int]:
    """Few beginnings, so that prefixes are shared."""
    base, tail = rng.randrange(3), rng.randrange(3)
    shared = rng.randint(0, length)
    return [(17 * at + 1000 * base) % 30_000 for at in range(shared)] + [
        (31 * at + 5000 * tail + 7) % 30_000 for at in range(length - shared)
    ]


def draw_sampling(rng: random.Random, prompt: list[int], max_tokens: int) -> Sampling:
    temperature = rng.choice((0.0, 0.7, 1.0))
    plain = Sampling(max_tokens=max_tokens, seed=rng.getrandbits(40), temperature=temperature)
    if rng.random() < 0.8:
        return plain
    stop = rng.choice(oracle(tuple(prompt), plain))
    return Sampling(max_tokens=max_tokens, seed=plain.seed, temperature=temperature, stop_token_ids=(stop,))


def draw_request(
    rng: random.Random, number: int, now_s: Callable[[], float], tell: Callable[[str], None], *, grows: bool = False
) -> Request:
    """Lengths around whole blocks; or one that `grows`, from a short prompt to a long answer."""
    if grows:
        length, max_tokens = rng.randint(5, 12), rng.randint(20, 40)
    else:
        length = rng.choice((1, 3, 4, 5, 8, 9, rng.randint(2, 40), rng.randint(20, 40), rng.randint(20, 40)))
        max_tokens = rng.choice((1, 2, 4, rng.randint(1, 8), rng.randint(8, 24)))
    prompt = draw_prompt(rng, length)
    return Request(
        number=number,
        prompt=prompt,
        sampling=draw_sampling(rng, prompt, max_tokens),
        deadline_s=now_s() + (rng.uniform(0.02, 2.0) if rng.random() < 0.1 else LONG_S),
        hangs_up_after=rng.choice((0, 1, 1, rng.randint(2, 6))) if rng.random() < 0.15 else None,
        stops_after=rng.randint(1, 6) if rng.random() < 0.1 else None,
        num_choices=rng.choice((2, 3)) if rng.random() < 0.3 else 1,
        now_s=now_s,
        tell=tell,
    )


def session_of(request: Request) -> Session:
    return Session(
        id=RequestId(new_id()),
        model=MODEL,
        prompt=request.prompt,
        sampling=request.sampling,
        created_s=request.now_s(),
        deadline_s=request.deadline_s,
        max_attempts=MAX_ATTEMPTS,
        num_choices=request.num_choices,
    )

"""One HTTP request's life: routed, attempted, perhaps attempted again, ended exactly once.

    PREPARING ─> ROUTING ──> WAITING ──> STREAMING ──> ENDED (finished | failed | cancelled)
                 ▲  │          │            │           ▲
                 │  └──────────┼────────────┼───────────┘
                 └─────────────┴────────────┘  the attempt failed, another node may do better

Rules, referred to by the tests:

R1. Delivered tokens are facts. A new attempt carries prompt + delivered tokens and the same seed; its
    tokens follow them, none is lost, repeated or changed.
R2. Events name their attempt. News of any but the current attempt, and any news after the end, is
    dropped at the top of `handle`, nowhere else.
R3. An attempt that failed at a node (NodeError, TransferError) is made again while the budget of attempts and
    the deadline allow; any other error ends the request. A failed transfer condemns the prefill node,
    everything else the decode node: that incarnation is excluded from the next route.
R4. A refused route ends the request. If an attempt failed before, its error is the one to show: the
    refusal only follows from it.
R5. An attempt that delivered all there was to deliver, but died before saying so, has finished.
R6. Exactly one Finish or Fail is ever returned, or none if the client left; whatever is open is cancelled with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, assert_never

from common.errors import (
    BatonError,
    DeadlineError,
    InvalidTransition,
    NodeError,
    PeerLostError,
    TransferError,
)
from common.messages import FinishReason, Generate, Incarnation, NodeAddress, RequestId, Route, Routed, Sampling, Tokens


class SessionStatus(StrEnum):
    PREPARING = "preparing"
    ROUTING = "routing"
    WAITING = "waiting"
    STREAMING = "streaming"
    ENDED = "ended"


_MOVES: dict[SessionStatus, tuple[SessionStatus, ...]] = {
    SessionStatus.PREPARING: (SessionStatus.ROUTING, SessionStatus.ENDED),
    SessionStatus.ROUTING: (SessionStatus.WAITING, SessionStatus.ROUTING, SessionStatus.ENDED),
    SessionStatus.WAITING: (SessionStatus.STREAMING, SessionStatus.ROUTING, SessionStatus.ENDED),
    SessionStatus.STREAMING: (SessionStatus.ROUTING, SessionStatus.ENDED),
    SessionStatus.ENDED: (),
}


class Outcome(StrEnum):
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Transition(NamedTuple):
    at_s: float
    status: SessionStatus
    why: str


# --- events -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prepared:
    """The prompt is tokenised and within limits."""

    at_s: float


@dataclass(frozen=True, slots=True)
class RouteArrived:
    """`model_digest` is that of the routed decode node."""

    at_s: float
    attempt: int
    routed: Routed
    model_digest: str


@dataclass(frozen=True, slots=True)
class RouteRefused:
    at_s: float
    attempt: int
    error: BatonError


@dataclass(frozen=True, slots=True)
class TokensArrived:
    at_s: float
    attempt: int
    item: Tokens


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    at_s: float
    attempt: int
    error: BatonError


@dataclass(frozen=True, slots=True)
class AttemptEnded:
    """The call ended well, though its last item named no finish reason."""

    at_s: float
    attempt: int


@dataclass(frozen=True, slots=True)
class StopStringFound:
    at_s: float


@dataclass(frozen=True, slots=True)
class ClientGone:
    at_s: float


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    at_s: float


SessionEvent = (
    Prepared
    | RouteArrived
    | RouteRefused
    | TokensArrived
    | AttemptFailed
    | AttemptEnded
    | StopStringFound
    | ClientGone
    | DeadlinePassed
)

# --- commands ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AskRoute:
    attempt: int
    body: Route


@dataclass(frozen=True, slots=True)
class OpenAttempt:
    attempt: int
    node: NodeAddress
    body: Generate


@dataclass(frozen=True, slots=True)
class CancelAttempt:
    """Stop asking for this attempt's route, or end its call."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Deliver:
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Finish:
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Fail:
    error: BatonError


SessionCommand = AskRoute | OpenAttempt | CancelAttempt | Deliver | Finish | Fail


@dataclass(slots=True, eq=False)
class Session:
    """`model` is the name to route by; times are on one clock, `deadline_s` too."""

    id: RequestId
    model: str
    prompt: Sequence[int]
    sampling: Sampling
    created_s: float
    deadline_s: float
    max_attempts: int
    status: SessionStatus = SessionStatus.PREPARING
    outcome: Outcome | None = None
    delivered: list[int] = field(default_factory=list)
    attempt: int = 0
    excluded: dict[Incarnation, str] = field(default_factory=dict)
    """Incarnation -> why it is not to be routed to."""
    routed: Routed | None = None
    cached_tokens: int = 0
    """Prompt tokens that the first attempt found computed."""
    node_phases: dict[str, float] = field(default_factory=dict)
    """What the last attempt's node says about its own time."""
    history: list[Transition] = field(default_factory=list)
    num_late: int = 0
    """Events dropped by R2."""
    _digest: str = ""
    _last_error: BatonError | None = None

    def __post_init__(self) -> None:
        self.history.append(Transition(self.created_s, self.status, "request"))

    def handle(self, event: SessionEvent) -> list[SessionCommand]:
        """The only mutator. Times in events must not go back."""
        if self.status is SessionStatus.ENDED or getattr(event, "attempt", self.attempt) != self.attempt:
            self.num_late += 1
            return []
        match event:
            case TokensArrived():
                return self._tokens(event)
            case Prepared(at_s):
                return self._ask_route(at_s, "prepared")
            case RouteArrived():
                return self._open(event)
            case RouteRefused(at_s, _, error):
                return self._fail(at_s, self._last_error or error)
            case AttemptFailed(at_s, _, error):
                return self._attempt_failed(at_s, error)
            case AttemptEnded(at_s, attempt):
                return self._attempt_failed(at_s, PeerLostError(f"attempt {attempt} ended without a finish reason"))
            case StopStringFound(at_s):
                return [*self._cancel(), *self._finish(at_s, FinishReason.STOP, "stop string")]
            case ClientGone(at_s):
                commands = self._cancel()
                self._end(at_s, Outcome.CANCELLED, "client gone")
                return commands
            case DeadlinePassed(at_s):
                return [*self._cancel(), *self._fail(at_s, DeadlineError("the request's deadline has passed"))]
            case _:
                assert_never(event)

    def phases(self) -> dict[str, float]:
        """Seconds by phase, in order of first appearance; they add up to the whole life of an ended session."""
        seconds: dict[str, float] = {}
        for earlier, later in zip(self.history, self.history[1:], strict=False):
            seconds[earlier.status.value] = seconds.get(earlier.status.value, 0.0) + later.at_s - earlier.at_s
        return seconds

    @property
    def num_failovers(self) -> int:
        return max(0, self.attempt - 1)

    def check_invariants(self) -> None:
        assert (self.outcome is not None) == (self.status is SessionStatus.ENDED)
        assert self.history[-1].status is self.status
        assert all(a.at_s <= b.at_s for a, b in zip(self.history, self.history[1:], strict=False))
        assert all(b.status in _MOVES[a.status] for a, b in zip(self.history, self.history[1:], strict=False))
        assert len(self.delivered) <= self.sampling.max_tokens
        assert self.attempt <= self.max_attempts
        assert len(self.excluded) <= self.attempt
        assert 0 <= self.cached_tokens <= len(self.prompt)

    # --- moves --------------------------------------------------------------------------------------------

    def _ask_route(self, at_s: float, why: str) -> list[SessionCommand]:
        self._move(SessionStatus.ROUTING, at_s, why)
        self.attempt += 1
        num_tokens = len(self.prompt) + len(self.delivered)
        return [AskRoute(self.attempt, Route(self.model, num_tokens, tuple(self.excluded)))]

    def _open(self, event: RouteArrived) -> list[SessionCommand]:
        decode = event.routed.decode
        if self.delivered and event.model_digest != self._digest:
            # R1: another model would not go on where this one stopped.
            return self._attempt_failed(
                event.at_s, PeerLostError(f"{decode.node} runs another version of the model"), decode.incarnation
            )
        self._digest = event.model_digest
        self.routed = event.routed
        self._move(SessionStatus.WAITING, event.at_s, event.routed.why)
        body = Generate(
            request=self.id,
            attempt=self.attempt,
            model_digest=event.model_digest,
            tokens=[*self.prompt, *self.delivered],
            num_prompt_tokens=len(self.prompt),
            sampling=self.sampling,
            prefill=event.routed.prefill,
        )
        return [OpenAttempt(self.attempt, decode, body)]

    def _tokens(self, event: TokensArrived) -> list[SessionCommand]:
        item = event.item
        if self.status is not SessionStatus.STREAMING:
            if not self.delivered:
                self.cached_tokens = min(item.cached_tokens, len(self.prompt))
            self._move(SessionStatus.STREAMING, event.at_s, "first token of the attempt")
        room = self.sampling.max_tokens - len(self.delivered)
        tokens = item.tokens if len(item.tokens) <= room else item.tokens[:room]
        self.delivered += tokens
        commands: list[SessionCommand] = [Deliver(tokens)] if tokens else []
        if item.finish is not None:
            self.node_phases = item.phases or {}
            return commands + self._finish(event.at_s, item.finish, "finished by the node")
        if len(item.tokens) > room:  # a node that cannot count: what was promised is there, so this is the end
            return commands + self._cancel() + self._finish(event.at_s, FinishReason.LENGTH, "over max_tokens")
        return commands

    def _attempt_failed(
        self, at_s: float, error: BatonError, incarnation: Incarnation | None = None
    ) -> list[SessionCommand]:
        reason = self._complete()
        if reason is not None:
            return self._finish(at_s, reason, "complete when the attempt failed")
        if incarnation is None:
            incarnation = self._condemned(error)
        if incarnation is not None:
            self.excluded[incarnation] = error.code.value
        self._last_error = error
        if not isinstance(error, NodeError | TransferError) or self.attempt >= self.max_attempts:
            return self._fail(at_s, error)
        if at_s >= self.deadline_s:
            return self._fail(at_s, DeadlineError("the request's deadline has passed"))
        return self._ask_route(at_s, error.code.value)

    def _complete(self) -> FinishReason | None:
        """R5."""
        if len(self.delivered) >= self.sampling.max_tokens:
            return FinishReason.LENGTH
        if self.delivered and self.delivered[-1] in self.sampling.stop_token_ids:
            return FinishReason.STOP
        return None

    def _condemned(self, error: BatonError) -> Incarnation | None:
        """R3: who is to be avoided after this error."""
        if self.routed is None:
            return None
        if isinstance(error, TransferError) and self.routed.prefill is not None:
            return self.routed.prefill.incarnation
        return self.routed.decode.incarnation

    def _cancel(self) -> list[SessionCommand]:
        return [] if self.status is SessionStatus.PREPARING else [CancelAttempt(self.attempt)]

    def _finish(self, at_s: float, reason: FinishReason, why: str) -> list[SessionCommand]:
        self._end(at_s, Outcome.FINISHED, why)
        return [Finish(reason)]

    def _fail(self, at_s: float, error: BatonError) -> list[SessionCommand]:
        self._last_error = error
        self._end(at_s, Outcome.FAILED, error.code.value)
        return [Fail(error)]

    def _end(self, at_s: float, outcome: Outcome, why: str) -> None:
        self._move(SessionStatus.ENDED, at_s, why)
        self.outcome = outcome

    def _move(self, status: SessionStatus, at_s: float, why: str) -> None:
        if status not in _MOVES[self.status]:
            story = " -> ".join(f"{entry.status} ({entry.why})" for entry in self.history)
            raise InvalidTransition(f"session {self.id}: {self.status} -> {status} after {story}")
        self.status = status
        self.history.append(Transition(at_s, status, why))

"""One HTTP request's life: routed, attempted, perhaps attempted again, ended exactly once.

                   ┌── asks again ── PARKED
                   v                   ^ nobody can take it now
    PREPARING ─> ROUTING ──────────────┘
                 ▲  │
                 │  └────> WAITING ──> STREAMING ──> ENDED (finished | failed | cancelled; from anywhere)
                 └────────────┴────────────┘  the attempt failed, another node may do better

Rules, referred to by the tests:

R1. Delivered tokens are facts. A new attempt carries prompt + delivered tokens and the same seed; its
    tokens follow them, none is lost, repeated or changed.
R2. Events name their attempt. News of any but the current attempt, and any news after the end, is
    dropped at the top of `handle`, nowhere else.
R3. An attempt that failed at a node (NodeError, TransferError) is made again while the budget of attempts and
    the deadline allow; any other error ends the request. Two failures cost nothing of that budget: a node that
    let go of the request because it is being drained (MovedError, at most `MAX_MOVES` times), and a node that
    refused a stream that has begun (R4 bounds that one).
R4. A route refused for want of a node parks the request: it asks again, under the same attempt, when the cluster
    has changed, when an exclusion ends or when the refusal said so. That goes on for `patience_s` since the last
    token, counted from where the waiting began, and at least once more after each wait: a pause of our own is
    nobody else's silence. A stream that has begun has no status left to refuse with: it waits out everything that
    may pass, for `stream_patience_s`. A full node is no missing node: before the first token its refusal is the
    answer as soon as no other node is left.
R5. If an attempt failed before the route was refused for want of a node, its error is the one to show.
R6. A failed transfer condemns the prefill node, everything else the decode node. That incarnation is excluded from
    the next routes until the request has waited and `exclusion_s` are over: it may have been paused or cut off only.
R7. An attempt that delivered all there was to deliver, but died before saying so, has finished.
R8. One Finish of each choice is ever returned, or one Fail in place of those that lack it, or none of it if the client
    left; whatever is open is cancelled with the last.
R9. Each of several choices finishes alone. What a node still says of it is dropped, and the node told to stop it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never

from common.errors import (
    BatonError,
    DeadlineError,
    InvalidTransition,
    MovedError,
    NodeError,
    NoPrefillError,
    OverloadedError,
    PeerLostError,
    TransferError,
    UnavailableError,
)
from common.messages import FinishReason, Generate, Incarnation, NodeAddress, Origin, RequestId, Route, Routed, Sampling
from coordinator.gateway.choice import AnswerChoice, AnswerChoices
from coordinator.gateway.session_events import (
    AskRoute,
    AttemptEnded,
    AttemptFailed,
    CancelAttempt,
    ClientGone,
    DeadlinePassed,
    Deliver,
    Exclusion,
    Fail,
    Finish,
    GatewayStopping,
    OpenAttempt,
    Outcome,
    Prepared,
    RouteArrived,
    RouteRefused,
    SessionCommand,
    SessionEvent,
    SessionStatus,
    StopAtNode,
    StopStringFound,
    TokensArrived,
    Transition,
    WaitEnded,
    WaitForCluster,
    seconds_by_status,
)

MAX_MOVES = 16
ASK_AGAIN_S = 1.0
"""A parked request asks again after this long if the refusal does not say when."""
_SHORTEST_WAIT_S = 0.05

_MOVES: dict[SessionStatus, tuple[SessionStatus, ...]] = {
    SessionStatus.PREPARING: (SessionStatus.ROUTING, SessionStatus.ENDED),
    SessionStatus.ROUTING: (SessionStatus.WAITING, SessionStatus.ROUTING, SessionStatus.PARKED, SessionStatus.ENDED),
    SessionStatus.PARKED: (SessionStatus.ROUTING, SessionStatus.ENDED),
    SessionStatus.WAITING: (SessionStatus.STREAMING, SessionStatus.ROUTING, SessionStatus.ENDED),
    SessionStatus.STREAMING: (SessionStatus.ROUTING, SessionStatus.ENDED),
    SessionStatus.ENDED: (),
}


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
    num_choices: int = 1
    patience_s: float = 5.0
    stream_patience_s: float = 60.0
    exclusion_s: float = 2.0
    prefix: bytes = b""
    """Names of the prompt's full blocks, as in `Route.prefix`."""
    origin: Origin = field(default_factory=Origin)
    first_token_s: float | None = None
    """How long the client waits for it."""
    status: SessionStatus = SessionStatus.PREPARING
    outcome: Outcome | None = None
    choices: AnswerChoices = field(init=False)
    attempt: int = 0
    num_failed: int = 0
    """Attempts that count against `max_attempts`."""
    num_moves: int = 0
    excluded: dict[Incarnation, Exclusion] = field(default_factory=dict)
    """Who is not to be routed to (R6)."""
    routed: Routed | None = None
    cached_tokens: int = 0
    """Prompt tokens that the first attempt found computed."""
    node_phases: dict[str, float] = field(default_factory=dict)
    """What the last attempt's node says about its own time."""
    paths: list[str] = field(default_factory=list)
    """How the prompt was computed (`Tokens.path`), for each attempt that brought a token."""
    history: list[Transition] = field(default_factory=list)
    num_late: int = 0
    """Events dropped by R2."""
    _digest: str = ""
    _last_error: BatonError | None = None
    _waiting_since_s: float | None = None

    def __post_init__(self) -> None:
        self.history.append(Transition(self.created_s, self.status, "request"))
        self.choices = AnswerChoices(self.prompt, self.sampling, self.num_choices)

    def handle(self, event: SessionEvent) -> list[SessionCommand]:
        """The only mutator. Times in events must not go back."""
        if self.status is SessionStatus.ENDED or getattr(event, "attempt", self.attempt) != self.attempt:
            self.num_late += 1
            return []
        match event:
            case TokensArrived():
                return self._tokens(event)
            case Prepared(at_s):
                return self._ask_next(at_s, "prepared")
            case RouteArrived():
                return self._open(event)
            case RouteRefused(at_s, _, error):
                return self._route_refused(at_s, error)
            case WaitEnded(at_s):
                return self._ask_again(at_s)
            case AttemptFailed(at_s, _, error):
                return self._attempt_failed(at_s, error)
            case AttemptEnded(at_s, attempt):
                return self._attempt_failed(at_s, PeerLostError(f"attempt {attempt} ended without a finish reason"))
            case StopStringFound(at_s, index):
                return self._stop(at_s, self.choices[index], FinishReason.STOP, "stop string")
            case ClientGone(at_s):
                commands = self._cancel()
                self._end(at_s, Outcome.CANCELLED, "client gone")
                return commands
            case DeadlinePassed(at_s):
                return [*self._cancel(), *self._fail(at_s, DeadlineError("the request's deadline has passed"))]
            case GatewayStopping(at_s):
                return [*self._cancel(), *self._fail(at_s, UnavailableError("this gateway is being stopped"))]
            case _:
                assert_never(event)

    def phases(self) -> dict[str, float]:
        """Seconds by phase; they add up to the whole life of an ended session."""
        return seconds_by_status(self.history)

    @property
    def path(self) -> str:
        """How the prompt was computed for the last attempt that brought a token, or is to be; "" before any route."""
        return self.paths[-1] if self.paths else self._planned_path

    @property
    def _planned_path(self) -> str:
        if self.routed is None:
            return ""
        return "home" if self.routed.prefill is None else "prefill"

    @property
    def num_failovers(self) -> int:
        """Attempts made again after a failure; those that only moved are not among them."""
        return max(0, self.attempt - 1 - self.num_moves)

    def check_invariants(self) -> None:
        assert (self.outcome is not None) == (self.status is SessionStatus.ENDED)
        assert self.history[-1].status is self.status
        assert all(a.at_s <= b.at_s for a, b in zip(self.history, self.history[1:], strict=False))
        assert all(b.status in _MOVES[a.status] for a, b in zip(self.history, self.history[1:], strict=False))
        assert all(len(choice.delivered) <= self.sampling.max_tokens for choice in self.choices)
        assert self.outcome is not Outcome.FINISHED or not self.choices.unfinished
        assert self.num_failed <= self.max_attempts
        assert self.num_moves <= MAX_MOVES + 1
        assert len(self.excluded) <= self.attempt
        assert 0 <= self.cached_tokens <= len(self.prompt)

    # --- the next attempt, before it is needed (`successor`) ----------------------------------------------

    def takeover_route(self) -> Route:
        """For whoever is to take over from the node that runs the attempt in progress."""
        assert self.routed is not None
        return self._route(*self.excluded, self.routed.decode.incarnation)

    def takeover(self, routed: Routed, model_digest: str) -> Generate | None:
        """The call that takes over, None if that node cannot go on where this attempt stops (R1) or nothing is left."""
        assert self.routed is not None
        if model_digest != self._digest or not self.choices.unfinished:
            return None
        return self._generate(self.attempt + 1, routed, source=self.routed.decode)

    # --- moves --------------------------------------------------------------------------------------------

    def _ask_next(self, at_s: float, why: str) -> list[SessionCommand]:
        self.attempt += 1
        return self._ask_route(at_s, why)

    def _ask_route(self, at_s: float, why: str) -> list[SessionCommand]:
        self._move(SessionStatus.ROUTING, at_s, why)
        return [AskRoute(self.attempt, self._route(*self.excluded))]

    def _route(self, *exclude: Incarnation) -> Route:
        first_token_s = None if self.choices.have_begun else self.first_token_s
        return Route(self.model, self.choices.longest, exclude, self.origin, self.prefix, first_token_s)

    def _generate(self, attempt: int, routed: Routed, *, source: NodeAddress | None) -> Generate:
        tokens, branches = self.choices.remaining(is_takeover=source is not None)
        return Generate(
            request=self.id,
            attempt=attempt,
            model_digest=self._digest,
            tokens=tokens,
            num_prompt_tokens=len(self.prompt),
            sampling=self.sampling,
            prefill=None if source else routed.prefill,
            origin=self.origin,
            source=source,
            branches=branches,
        )

    def _ask_again(self, at_s: float) -> list[SessionCommand]:
        if at_s >= self.deadline_s:
            return self._fail(at_s, DeadlineError("the request's deadline has passed"))
        self.excluded = {
            incarnation: exclusion
            for incarnation, exclusion in self.excluded.items()
            if at_s < exclusion.at_s + self.exclusion_s
        }
        return self._ask_route(at_s, "waited")

    def _route_refused(self, at_s: float, error: BatonError) -> list[SessionCommand]:
        if self._may_pass(error):
            patience_s = self._patience_left_s(at_s)
            if patience_s > 0:
                self._move(SessionStatus.PARKED, at_s, error.code.value)
                return [WaitForCluster(self.attempt, min(patience_s, self._next_chance_s(at_s, error)))]
        if isinstance(error, UnavailableError):  # R5
            error = self._last_error or error
        return self._fail(at_s, error)

    def _may_pass(self, refusal: BatonError) -> bool:
        """R4: may a route that was refused be granted later?"""
        if self.choices.have_begun:
            return isinstance(refusal, NodeError)
        is_full = isinstance(self._last_error, OverloadedError)
        return isinstance(refusal, UnavailableError) and not isinstance(refusal, NoPrefillError) and not is_full

    def _patience_left_s(self, at_s: float) -> float:
        """Starts the clock if it does not run yet."""
        if self._waiting_since_s is None:
            self._waiting_since_s = at_s
        limit_s = self.stream_patience_s if self.choices.have_begun else self.patience_s
        return self._waiting_since_s + limit_s - at_s

    def _next_chance_s(self, at_s: float, refusal: BatonError) -> float:
        """How long to wait for a change at most."""
        ends_s = [exclusion.at_s + self.exclusion_s for exclusion in self.excluded.values()]
        next_s = min(*ends_s, self.deadline_s, at_s + (refusal.retry_after_s or ASK_AGAIN_S))
        return max(_SHORTEST_WAIT_S, next_s - at_s)

    def _open(self, event: RouteArrived) -> list[SessionCommand]:
        decode = event.routed.decode
        if self.choices.have_begun and event.model_digest != self._digest:  # R1: it would go on otherwise
            return self._attempt_failed(
                event.at_s, PeerLostError(f"{decode.node} runs another version of the model"), decode.incarnation
            )
        self._digest = event.model_digest
        self.routed = event.routed
        self._move(SessionStatus.WAITING, event.at_s, event.routed.why)
        return [OpenAttempt(self.attempt, decode, self._generate(self.attempt, event.routed, source=None))]

    def _tokens(self, event: TokensArrived) -> list[SessionCommand]:
        item = event.item
        if self.status is not SessionStatus.STREAMING:
            if not self.choices.have_begun:
                self.cached_tokens = min(item.cached_tokens, len(self.prompt))
            self.paths.append(item.path or self._planned_path)
            self._move(SessionStatus.STREAMING, event.at_s, "first token of the attempt")
        elif item.path:
            self.paths[-1] = item.path
        choice = self.choices[item.choice]
        if choice.finish is not None:  # R9
            return [] if item.finish is not None else [StopAtNode(choice.index)]
        tokens = choice.take(item.tokens, item.logprob)
        commands: list[SessionCommand] = []
        if tokens:
            self._waiting_since_s = None
            commands.append(Deliver(tokens, choice.index))
        if item.finish is not None:
            self.node_phases = item.phases or {}
            return commands + self._finish(event.at_s, choice, item.finish, "finished by the node")
        if len(item.tokens) > len(tokens):  # a node that cannot count: what was promised is there, so this is the end
            return commands + self._stop(event.at_s, choice, FinishReason.LENGTH, "over max_tokens")
        return commands

    def _attempt_failed(
        self, at_s: float, error: BatonError, incarnation: Incarnation | None = None
    ) -> list[SessionCommand]:
        finished: list[SessionCommand] = []
        for choice in self.choices.unfinished:  # R7
            if (reason := choice.complete()) is not None:
                finished += self._finish(at_s, choice, reason, "complete when the attempt failed")
        return finished if not self.choices.unfinished else finished + self._try_again(at_s, error, incarnation)

    def _try_again(self, at_s: float, error: BatonError, incarnation: Incarnation | None) -> list[SessionCommand]:
        incarnation = incarnation or self._condemned(error)
        if incarnation is not None:
            self.excluded[incarnation] = Exclusion(at_s, error.code.value)
        if not self._is_worth_another(at_s, error):
            return self._fail(at_s, error)
        if at_s >= self.deadline_s:
            return self._fail(at_s, DeadlineError("the request's deadline has passed"))
        return self._ask_next(at_s, error.code.value)

    def _is_worth_another(self, at_s: float, error: BatonError) -> bool:
        """R3. Takes it off the budget that it belongs to."""
        match error:
            case MovedError():
                self.num_moves += 1
                return self.num_moves <= MAX_MOVES
            case OverloadedError() | UnavailableError() if self.choices.have_begun:
                self._last_error = error
                return self._patience_left_s(at_s) > 0
            case NodeError() | TransferError():
                self._last_error = error
                self.num_failed += 1
                return self.num_failed < self.max_attempts
            case _:
                return False

    def _condemned(self, error: BatonError) -> Incarnation | None:
        """R6: who is to be avoided after this error."""
        if self.routed is None:
            return None
        if isinstance(error, TransferError) and self.routed.prefill is not None:
            return self.routed.prefill.incarnation
        return self.routed.decode.incarnation

    def _cancel(self) -> list[SessionCommand]:
        return [] if self.status is SessionStatus.PREPARING else [CancelAttempt(self.attempt)]

    def _finish(self, at_s: float, choice: AnswerChoice, reason: FinishReason, why: str) -> list[SessionCommand]:
        choice.finish = reason
        if not self.choices.unfinished:
            self._end(at_s, Outcome.FINISHED, why)
        return [Finish(reason, choice.index)]

    def _stop(self, at_s: float, choice: AnswerChoice, reason: FinishReason, why: str) -> list[SessionCommand]:
        """Finish a choice that the node would go on with."""
        if choice.finish is not None:
            return []
        finished = self._finish(at_s, choice, reason, why)
        return [StopAtNode(choice.index) if self.choices.unfinished else CancelAttempt(self.attempt), *finished]

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

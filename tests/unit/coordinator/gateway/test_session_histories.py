"""Random lives of a session: nodes die, refuse, move, come back, resend and talk late; the client sees the one right
answer, and no request waits, or is tried, for longer than it may."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.errors import (
    BatonError,
    DeadlineError,
    MovedError,
    NoPrefillError,
    OverloadedError,
    PeerLostError,
    RequestError,
    TransferError,
    UnavailableError,
)
from common.messages import FinishReason, Incarnation, NodeAddress, NodeId, RequestId, Routed, Sampling, Tokens
from coordinator.gateway.session import MAX_MOVES, Outcome, Session, SessionStatus
from coordinator.gateway.session_events import (
    AskRoute,
    AttemptEnded,
    AttemptFailed,
    CancelAttempt,
    ClientGone,
    DeadlinePassed,
    Deliver,
    Fail,
    Finish,
    GatewayStopping,
    OpenAttempt,
    Prepared,
    RouteArrived,
    RouteRefused,
    SessionCommand,
    SessionEvent,
    StopStringFound,
    TokensArrived,
    WaitEnded,
    WaitForCluster,
)

PROMPT = [1, 2]
END = 99
ERRORS = st.sampled_from(
    [PeerLostError("p"), TransferError("t"), OverloadedError("o"), MovedError("m"), RequestError("r")]
)
REFUSALS = st.sampled_from(
    [UnavailableError("u"), UnavailableError("u", retry_after_s=0.3), NoPrefillError("n"), OverloadedError("o")]
)
MAX_ATTEMPTS = 3
PATIENCE_S, STREAM_PATIENCE_S, EXCLUSION_S = 3.0, 6.0, 2.0


def answer(position: int, length: int) -> int:
    """The token at a position is a function of the position alone, as sampling is."""
    return END if position == length - 1 else 1000 + position


class Lives(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.length = 6  # the answer's own: it ends with END unless max_tokens cuts it
        self.asked: AskRoute | None = None
        self.opened: OpenAttempt | None = None
        self.parked: WaitForCluster | None = None
        self.refused_since_s: float | None = None  # the first refusal since the last token
        self.failures: dict[str, float] = {}  # node -> when it last failed this request
        self.costly = 0  # failures that count
        self.moves = 0
        self.sent = 0  # tokens sent by the open attempt
        self.terminal: list[SessionCommand] = []
        self.shown: list[int] = []
        self.left = False
        self.past: list[SessionEvent] = []
        self.session = Session(
            id=RequestId("r"),
            model="m",
            prompt=PROMPT,
            sampling=Sampling(max_tokens=5, seed=1, stop_token_ids=(END,)),
            created_s=0.0,
            deadline_s=1000.0,
            max_attempts=MAX_ATTEMPTS,
            patience_s=PATIENCE_S,
            stream_patience_s=STREAM_PATIENCE_S,
            exclusion_s=EXCLUSION_S,
        )

    @rule(length=st.integers(1, 8))
    @precondition(lambda self: self.session.attempt == 0)
    def begin(self, length: int) -> None:
        self.length = length
        self.feed(Prepared(self.tick()))

    @rule(decode=st.integers(0, 3), prefill=st.none() | st.integers(0, 1))
    @precondition(lambda self: self.asked is not None)
    def route(self, decode: int, prefill: int | None) -> None:
        assert self.asked is not None
        found = [self.node(f"d{decode}"), None if prefill is None else self.node(f"p{prefill}")]
        if any(node is not None and node.incarnation in self.asked.body.exclude for node in found):
            self.refuse(UnavailableError("excluded"))
            return
        assert found[0] is not None
        self.feed(RouteArrived(self.tick(), self.asked.attempt, Routed(found[0], found[1]), "digest"))

    @rule(error=REFUSALS)
    @precondition(lambda self: self.asked is not None)
    def refuse(self, error: BatonError) -> None:
        assert self.asked is not None
        at_s = self.tick()
        if self.refused_since_s is None:
            self.refused_since_s = at_s
        self.feed(RouteRefused(at_s, self.asked.attempt, error))
        if self.parked is not None:
            assert 0 < self.parked.at_most_s <= STREAM_PATIENCE_S
            assert self.shown or isinstance(error, UnavailableError)

    @rule(share=st.floats(0, 1), pause_s=st.sampled_from([0.0, 0.0, 30.0]))
    @precondition(lambda self: self.parked is not None)
    def end_wait(self, share: float, pause_s: float) -> None:
        """The cluster changes, or the time is up, or this process was stopped meanwhile."""
        assert self.parked is not None
        self.now_s += share * self.parked.at_most_s + pause_s
        number = self.parked.attempt
        self.feed(WaitEnded(self.now_s, number))
        assert self.asked is not None
        assert self.asked.attempt == number
        expected = [name for name, at_s in self.failures.items() if self.now_s < at_s + EXCLUSION_S]
        assert sorted(self.asked.body.exclude) == sorted(expected)

    @rule(count=st.integers(0, 3), says_so=st.booleans())
    @precondition(lambda self: self.opened is not None)
    def send(self, count: int, says_so: bool) -> None:
        """A node that goes on where it was told to; it may die before it says that it has finished."""
        assert self.opened is not None
        first = len(self.opened.body.tokens) - len(PROMPT) + self.sent
        last = min(first + count, self.length, 5)
        tokens = [answer(position, self.length) for position in range(first, last)]
        self.sent += len(tokens)
        finish = None
        if says_so and last == self.length:
            finish = FinishReason.STOP
        elif says_so and last == 5:
            finish = FinishReason.LENGTH
        if tokens:
            self.refused_since_s = None
        self.feed(TokensArrived(self.tick(), self.opened.attempt, Tokens(tokens, finish)))

    @rule(error=st.none() | ERRORS)
    @precondition(lambda self: self.opened is not None)
    def end_attempt(self, error: BatonError | None) -> None:
        assert self.opened is not None
        number = self.opened.attempt
        self.account(self.opened, error)
        self.feed(AttemptEnded(self.tick(), number) if error is None else AttemptFailed(self.tick(), number, error))

    def account(self, opened: OpenAttempt, error: BatonError | None) -> None:
        """What the rules make of a failure, told independently."""
        prefill = opened.body.prefill
        condemned = prefill if isinstance(error, TransferError) and prefill is not None else opened.node
        self.failures[condemned.incarnation] = self.now_s + 0.5  # the next tick
        if isinstance(error, MovedError):
            self.moves += 1
        elif not (self.shown and isinstance(error, OverloadedError)):
            self.costly += 1
        elif self.refused_since_s is None:
            self.refused_since_s = self.now_s + 0.5

    @rule(which=st.integers(0, 1000))
    @precondition(lambda self: len(self.past) > 0)
    def repeat_old_news(self, which: int) -> None:
        """Whatever an old attempt said comes once more."""
        event = self.past[which % len(self.past)]
        if getattr(event, "attempt", 0) < self.session.attempt:
            shown, terminal = list(self.shown), list(self.terminal)
            self.feed(event)
            assert (self.shown, self.terminal) == (shown, terminal)

    @rule(event=st.sampled_from([StopStringFound, ClientGone, DeadlinePassed, GatewayStopping]))
    @precondition(lambda self: self.session.attempt > 0)
    def end_from_outside(
        self, event: type[StopStringFound] | type[ClientGone] | type[DeadlinePassed] | type[GatewayStopping]
    ) -> None:
        self.left = self.left or (event is ClientGone and not self.terminal)
        self.feed(event(self.tick()))

    def feed(self, event: SessionEvent) -> None:
        if hasattr(event, "attempt"):
            self.past.append(event)
        was_open = self.opened or self.asked or self.parked
        self.asked = self.opened = self.parked = None
        commands = self.session.handle(event)
        for command in commands:
            match command:
                case AskRoute():
                    self.asked = command
                case OpenAttempt():
                    self.opened, self.sent = command, 0
                case WaitForCluster():
                    self.parked = command
                case Deliver(tokens):
                    assert tokens
                    self.shown += tokens
                case Finish() | Fail():
                    self.terminal.append(command)
                    if isinstance(command, Fail):
                        assert self.may_fail(command, event), "given up too early"
                case CancelAttempt(attempt):
                    assert was_open is not None
                    assert attempt == was_open.attempt
        if self.session.outcome is None and all(isinstance(command, Deliver) for command in commands):
            self.asked = was_open if isinstance(was_open, AskRoute) else None
            self.opened = was_open if isinstance(was_open, OpenAttempt) else None
            self.parked = was_open if isinstance(was_open, WaitForCluster) else None

    def tick(self) -> float:
        self.now_s += 0.5
        return self.now_s

    def node(self, name: str) -> NodeAddress:
        return NodeAddress(NodeId(name), Incarnation(name), name)

    @invariant()
    def holds(self) -> None:
        self.session.check_invariants()
        assert self.shown == self.session.choices[0].delivered
        assert self.shown == [answer(position, self.length) for position in range(len(self.shown))]
        assert len(self.terminal) == (0 if self.session.outcome in (None, Outcome.CANCELLED) else 1)
        if self.left:
            assert self.terminal == []
        if self.session.outcome is not None:
            life_s = self.session.history[-1].at_s - self.session.created_s
            assert abs(sum(self.session.phases().values()) - life_s) < 1e-9
            assert self.asked is None
            assert self.opened is None
            assert self.parked is None
        assert (self.parked is not None) == (self.session.status is SessionStatus.PARKED)

    @invariant()
    def is_tried_and_waits_within_its_limits(self) -> None:
        assert self.costly <= MAX_ATTEMPTS
        assert self.moves <= MAX_MOVES + 1
        if self.parked is not None:
            assert self.refused_since_s is not None
            limit_s = STREAM_PATIENCE_S if self.shown else PATIENCE_S
            assert self.now_s + self.parked.at_most_s <= self.refused_since_s + limit_s + 0.051

    def may_fail(self, failure: Fail, after: SessionEvent) -> bool:
        """An end that the budget, patience, the deadline, our own end or an error that nothing mends explains."""
        limit_s = STREAM_PATIENCE_S if self.shown else PATIENCE_S
        is_impatient = self.refused_since_s is not None and self.now_s >= self.refused_since_s + limit_s
        is_spent = self.costly >= MAX_ATTEMPTS or self.moves > MAX_MOVES
        if is_impatient or is_spent or isinstance(failure.error, RequestError | DeadlineError):
            return True
        if isinstance(after, GatewayStopping):
            return True
        return (
            not self.shown
            and isinstance(after, RouteRefused)
            and any(isinstance(error, OverloadedError | NoPrefillError) for error in (failure.error, after.error))
        )


Lives.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestLives = Lives.TestCase

"""Random lives of a session: nodes die, refuse, resend and talk late; the client sees the one right answer."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.errors import OverloadedError, PeerLostError, RequestError, TransferError, UnavailableError
from common.messages import FinishReason, Incarnation, NodeAddress, NodeId, RequestId, Routed, Sampling, Tokens
from coordinator.gateway.session import (
    AskRoute,
    AttemptEnded,
    AttemptFailed,
    CancelAttempt,
    ClientGone,
    DeadlinePassed,
    Deliver,
    Fail,
    Finish,
    OpenAttempt,
    Outcome,
    Prepared,
    RouteArrived,
    RouteRefused,
    Session,
    SessionCommand,
    SessionEvent,
    StopStringFound,
    TokensArrived,
)

PROMPT = [1, 2]
END = 99
ERRORS = st.sampled_from([PeerLostError("p"), TransferError("t"), OverloadedError("o"), RequestError("r")])


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
            max_attempts=3,
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
            self.feed(RouteRefused(self.tick(), self.asked.attempt, UnavailableError("excluded")))
            return
        assert found[0] is not None
        self.feed(RouteArrived(self.tick(), self.asked.attempt, Routed(found[0], found[1]), "digest"))

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
        self.feed(TokensArrived(self.tick(), self.opened.attempt, Tokens(tokens, finish)))

    @rule(error=st.none() | ERRORS)
    @precondition(lambda self: self.opened is not None)
    def end_attempt(self, error: PeerLostError | None) -> None:
        assert self.opened is not None
        number = self.opened.attempt
        self.feed(AttemptEnded(self.tick(), number) if error is None else AttemptFailed(self.tick(), number, error))

    @rule(which=st.integers(0, 1000))
    @precondition(lambda self: len(self.past) > 0)
    def repeat_old_news(self, which: int) -> None:
        """Whatever an old attempt said comes once more."""
        event = self.past[which % len(self.past)]
        if getattr(event, "attempt", 0) < self.session.attempt:
            shown, terminal = list(self.shown), list(self.terminal)
            self.feed(event)
            assert (self.shown, self.terminal) == (shown, terminal)

    @rule(event=st.sampled_from([StopStringFound, ClientGone, DeadlinePassed]))
    @precondition(lambda self: self.session.attempt > 0)
    def end_from_outside(self, event: type[StopStringFound] | type[ClientGone] | type[DeadlinePassed]) -> None:
        self.left = self.left or (event is ClientGone and not self.terminal)
        self.feed(event(self.tick()))

    def feed(self, event: SessionEvent) -> None:
        if hasattr(event, "attempt"):
            self.past.append(event)
        was_open = self.opened or self.asked
        self.asked = self.opened = None
        commands = self.session.handle(event)
        for command in commands:
            match command:
                case AskRoute():
                    self.asked = command
                case OpenAttempt():
                    self.opened, self.sent = command, 0
                case Deliver(tokens):
                    assert tokens
                    self.shown += tokens
                case Finish() | Fail():
                    self.terminal.append(command)
                case CancelAttempt(attempt):
                    assert was_open is not None
                    assert attempt == was_open.attempt
        if not commands or all(isinstance(command, Deliver) for command in commands):
            self.asked = was_open if isinstance(was_open, AskRoute) and self.session.outcome is None else None
            self.opened = was_open if isinstance(was_open, OpenAttempt) and self.session.outcome is None else None

    def tick(self) -> float:
        self.now_s += 0.5
        return self.now_s

    def node(self, name: str) -> NodeAddress:
        return NodeAddress(NodeId(name), Incarnation(name), name)

    @invariant()
    def holds(self) -> None:
        self.session.check_invariants()
        assert self.shown == self.session.delivered
        assert self.shown == [answer(position, self.length) for position in range(len(self.shown))]
        assert len(self.terminal) == (0 if self.session.outcome in (None, Outcome.CANCELLED) else 1)
        if self.left:
            assert self.terminal == []
        if self.session.outcome is not None:
            life_s = self.session.history[-1].at_s - self.session.created_s
            assert abs(sum(self.session.phases().values()) - life_s) < 1e-9
            assert self.asked is None
            assert self.opened is None


Lives.TestCase.settings = settings(max_examples=50, stateful_step_count=20, deadline=None)
TestLives = Lives.TestCase

"""The rules of decode_node.role, one by one, then in random order."""

import msgspec
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.strategies import booleans, integers, sampled_from

from common.engine.events import Admit, Failed, Release, Reserve, Reserved
from common.engine.request import Progress
from common.errors import (
    ContextLengthError,
    OverloadedError,
    PeerLostError,
    RequestError,
    StaleBlockError,
    TransferError,
)
from common.messages import (
    BlockId,
    BlockRef,
    BlocksReady,
    FinishReason,
    Generate,
    Generation,
    Incarnation,
    KVLayout,
    LayerKV,
    NodeAddress,
    NodeId,
    Origin,
    PrefillDone,
    Priority,
    RequestId,
    Sampling,
)
from decode_node.role import (
    AskPrefill,
    Cancelled,
    ClosePrefill,
    Command,
    Emit,
    EndCall,
    Event,
    GenerateCall,
    Path,
    PrefillEnded,
    Pull,
    PullEnded,
    Reclaimed,
    State,
    StopPulls,
)

LAYOUT = KVLayout(16, "float32", 4, (LayerKV(1, 2, 2),))
OWNER = Incarnation("owner")
PREFILL = NodeAddress(NodeId("prefill-0"), OWNER, "memory://p")
ID = RequestId("engine-1")
SECRET = b"the prefill call's"


def generate(num_tokens: int = 40, *, max_tokens: int = 8, prefill: NodeAddress | None = PREFILL) -> Generate:
    sampling = Sampling(max_tokens=max_tokens, seed=1)
    return Generate(RequestId("r"), 0, "digest", list(range(num_tokens)), num_tokens, sampling, prefill)


def a_call(body: Generate) -> tuple[GenerateCall, list[Command]]:
    call = GenerateCall(body, id=ID, layout=LAYOUT, now_s=0.0)
    return call, call.begin(now_s=0.0)


def feed(call: GenerateCall, *events: Event, now_s: float = 0.0) -> list[Command]:
    commands: list[Command] = []
    for event in events:
        commands += call.handle(event, now_s=now_s)
        call.check_invariants()
    return commands


def blocks(count: int) -> tuple[BlockId, ...]:
    return tuple(BlockId(100 + index) for index in range(count))


def reserved(count: int = 3, num_cached: int = 0) -> Reserved:
    return Reserved(ID, blocks(count), num_cached)


def ready(first: int, count: int) -> BlocksReady:
    refs = tuple(BlockRef(BlockId(first + i), Generation(7)) for i in range(count))
    return BlocksReady(OWNER, first, refs, SECRET)


def kinds(commands: list[Command]) -> list[str]:
    return [type(command).__name__ for command in commands]


def the_admit(commands: list[Command]) -> Admit:
    return next(command for command in commands if isinstance(command, Admit))


def test_room_is_reserved_before_prefill_is_asked() -> None:
    call, commands = a_call(generate())
    assert commands == [Reserve(ID, list(range(40)))]
    [ask] = feed(call, reserved())
    assert isinstance(ask, AskPrefill)
    assert ask.address == PREFILL
    assert ask.body.tokens == list(range(40))


def test_the_engine_learns_when_the_calls_time_is_over() -> None:
    call = GenerateCall(generate(), id=ID, layout=LAYOUT, now_s=0.0, deadline_s=9.0)
    assert call.begin(now_s=0.0) == [Reserve(ID, list(range(40)), deadline_s=9.0)]
    home = GenerateCall(generate(prefill=None), id=ID, layout=LAYOUT, now_s=0.0, deadline_s=9.0)
    assert the_admit(home.begin(now_s=0.0)).request.deadline_s == 9.0


@pytest.mark.parametrize("prefill", [PREFILL, None])
def test_whose_request_it_is_goes_with_all_that_is_asked_for(prefill: NodeAddress | None) -> None:
    origin = Origin(b"tenant", Priority.LOW)
    call, commands = a_call(msgspec.structs.replace(generate(prefill=prefill), origin=origin))
    if prefill is None:
        assert the_admit(commands).request.origin == origin
        return
    assert commands == [Reserve(ID, list(range(40)), origin)]
    [ask] = feed(call, reserved())
    assert isinstance(ask, AskPrefill)
    assert ask.body.origin == origin
    assert feed(call, Reclaimed())[-1] == Reserve(ID, list(range(40)), origin)
    feed(call, reserved())
    assert the_admit(feed(call, PrefillEnded(PeerLostError("gone")))).request.origin == origin


def test_blocks_are_pulled_as_announced_and_decoding_starts_when_all_have_landed() -> None:
    call, _ = a_call(generate())
    feed(call, reserved())
    [first] = feed(call, ready(0, 2))
    assert first == Pull(OWNER, 0, ready(0, 2).refs, blocks(2), SECRET)
    [second] = feed(call, ready(2, 1))
    assert isinstance(second, Pull)
    assert second.into == (BlockId(102),)
    [emitted] = feed(call, PrefillDone(token=99))
    assert isinstance(emitted, Emit)
    assert emitted.item.tokens == [99]
    assert feed(call, PullEnded(0, 2)) == []
    close, admit = feed(call, PullEnded(2, 1))
    assert close == ClosePrefill(done=True)
    assert isinstance(admit, Admit)
    assert admit.request.tokens == [*range(40), 99]
    assert admit.request.num_computed == 40


def test_blocks_cached_here_are_not_pulled() -> None:
    call, _ = a_call(generate())
    feed(call, reserved(num_cached=16))
    [pull] = feed(call, ready(0, 3))
    assert isinstance(pull, Pull)
    assert (pull.first, pull.into) == (1, blocks(3)[1:])


def test_a_prompt_cached_here_but_for_one_block_is_computed_at_home() -> None:
    call, _ = a_call(generate())
    admit = the_admit(feed(call, reserved(num_cached=32)))
    assert admit.request.num_computed == 32
    assert call.path is Path.HOME


def test_without_a_prefill_node_the_engine_gets_the_whole_prompt() -> None:
    call, commands = a_call(generate(prefill=None))
    assert the_admit(commands).request.num_computed == 0
    assert call.path is Path.HOME


def test_a_request_for_one_token_reserves_and_pulls_nothing() -> None:
    call, commands = a_call(generate(max_tokens=1))
    assert kinds(commands) == ["AskPrefill"]
    assert feed(call, ready(0, 3)) == []
    assert kinds(feed(call, PrefillDone(token=9, finish=FinishReason.LENGTH))) == [
        "Emit",
        "ClosePrefill",
        "Release",
        "EndCall",
    ]


def test_a_first_token_that_ends_the_request_lets_reads_settle_before_blocks_are_freed() -> None:
    call, _ = a_call(generate())
    feed(call, reserved(), ready(0, 2))
    commands = feed(call, PrefillDone(token=2, finish=FinishReason.STOP))
    assert kinds(commands) == ["Emit", "ClosePrefill", "StopPulls"]
    assert kinds(feed(call, PullEnded(0, 2, TransferError("stopped")))) == ["Release", "EndCall"]


@pytest.mark.parametrize(
    "error", [PeerLostError("gone"), OverloadedError("full"), ContextLengthError("too long here"), None]
)
def test_a_lost_or_unwilling_prefill_node_leaves_the_rest_to_this_one(error: PeerLostError | None) -> None:
    call, _ = a_call(generate())
    feed(call, reserved(), ready(0, 2), PullEnded(0, 2))
    commands = feed(call, PrefillEnded(error))
    assert the_admit(commands).request.num_computed == 32
    assert call.path is Path.FALLBACK


def test_a_first_token_already_shown_is_forced_when_prefill_is_lost() -> None:
    call, _ = a_call(generate())
    feed(call, reserved(), ready(0, 3), PrefillDone(token=99), PrefillEnded(PeerLostError("gone")))
    admit = the_admit(feed(call, PullEnded(0, 3, PeerLostError("gone"))))
    assert admit.request.tokens == [*range(40), 99]
    assert admit.request.num_computed == 0
    [emitted] = feed(call, Progress(ID, 41, token=100))
    assert isinstance(emitted, Emit)
    assert emitted.item.tokens == [100]


@pytest.mark.parametrize(("prefill", "path"), [(PREFILL, Path.PREFILL), (None, Path.HOME)])
def test_every_item_says_who_computed_the_prompt(prefill: NodeAddress | None, path: Path) -> None:
    call, _ = a_call(generate(prefill=prefill))
    first = (
        feed(call, Progress(ID, 40, token=99))
        if prefill is None
        else feed(call, reserved(), ready(0, 3), PrefillDone(token=99))
    )
    assert [command.item.path for command in first if isinstance(command, Emit)] == [path]
    later = [] if prefill is None else feed(call, PullEnded(0, 3, TransferError("broke")))
    later += feed(call, Progress(ID, 41, token=100, finish=FinishReason.STOP))
    fell_back = Path.HOME if prefill is None else Path.FALLBACK
    assert [command.item.path for command in later if isinstance(command, Emit)] == [fell_back]


def test_a_stale_block_is_never_used() -> None:
    call, _ = a_call(generate())
    feed(call, reserved(), ready(0, 1), ready(1, 2), PullEnded(0, 1))
    commands = feed(call, PullEnded(1, 2, StaleBlockError("block 5 moved")))
    assert the_admit(commands).request.num_computed == 16


def test_cancelling_waits_for_reads_in_flight_before_blocks_are_freed() -> None:
    call, _ = a_call(generate())
    feed(call, reserved(), ready(0, 1), ready(1, 1))
    assert kinds(feed(call, Cancelled())) == ["ClosePrefill", "StopPulls"]
    assert feed(call, PullEnded(0, 1, TransferError("stopped"))) == []
    assert feed(call, PullEnded(1, 1)) == [Release(ID), EndCall(None)]
    assert feed(call, Cancelled(), PrefillEnded(None)) == []


def test_a_reclaimed_reservation_is_asked_for_again_with_the_token_already_shown() -> None:
    call, _ = a_call(generate())
    feed(call, reserved(), ready(0, 3), PrefillDone(token=99))
    assert call.holds_reservation
    assert kinds(feed(call, Reclaimed())) == ["ClosePrefill", "StopPulls"]
    assert feed(call, PullEnded(0, 3)) == [Release(ID), Reserve(ID, [*range(40), 99])]
    [ask] = feed(call, reserved())
    assert isinstance(ask, AskPrefill)
    assert ask.body.tokens == [*range(40), 99]


def test_an_engine_failure_ends_this_call_with_an_error() -> None:
    call, _ = a_call(generate(prefill=None))
    release, end = feed(call, Failed(ID, "boom"))
    assert release == Release(ID)
    assert isinstance(end, EndCall)
    assert end.error is not None


def test_phases_add_up_to_the_life_of_the_call() -> None:
    call, _ = a_call(generate())
    feed(call, reserved(), now_s=1.0)
    feed(call, ready(0, 3), PrefillDone(token=99), now_s=3.0)
    feed(call, PullEnded(0, 3), now_s=7.0)
    *_, last, _, _ = feed(call, Progress(ID, 41, token=5, finish=FinishReason.STOP), now_s=15.0)
    assert isinstance(last, Emit)
    assert last.item.phases == {"reserve": 1.0, "prefill": 2.0, "transfer": 4.0, "decode": 8.0}


class RandomLives(RuleBasedStateMachine):
    """Everything that can happen to a call, in any order that its peers could produce."""

    @initialize(
        num_tokens=integers(1, 70), max_tokens=integers(1, 4), with_prefill=booleans(), num_cached_blocks=integers(0, 2)
    )
    def begin(self, num_tokens: int, max_tokens: int, with_prefill: bool, num_cached_blocks: int) -> None:
        self.body = generate(num_tokens, max_tokens=max_tokens, prefill=PREFILL if with_prefill else None)
        self.num_cached_blocks = num_cached_blocks
        self.reserving = self.prefilling = self.scheduled = False
        self.announced = self.next_token = 0
        self.pulls: list[Pull] = []
        self.emitted: list[int] = []
        self.ends = self.releases = self.leases = 0
        self.call, commands = a_call(self.body)
        self.obey(commands)

    def feed(self, event: Event) -> None:
        self.obey(self.call.handle(event, now_s=0.0))

    def obey(self, commands: list[Command]) -> None:
        for command in commands:
            assert not self.ends, "a command after the end"
            match command:
                case Reserve(tokens=tokens):
                    assert tokens == self.so_far
                    self.reserving = True
                case AskPrefill(body=body):
                    assert body.tokens == self.so_far
                    self.prefilling, self.announced = True, 0
                case Pull():
                    self.pulls.append(command)
                case ClosePrefill():
                    self.prefilling = False
                case Admit(request=request):
                    assert not self.pulls, "scheduled while a read may write"
                    assert request.tokens == self.so_far
                    assert request.num_computed < len(request.tokens)
                    self.scheduled = True
                case Release():
                    assert not self.pulls, "freed while a read may write"
                    self.scheduled = self.reserving = False
                case Emit(item=item):
                    self.emitted += item.tokens
                case EndCall():
                    self.ends += 1
                case StopPulls():
                    pass

    @property
    def so_far(self) -> list[int]:
        return [*self.body.tokens, *self.emitted]

    def draw(self) -> tuple[int, FinishReason | None]:
        self.next_token += 1
        done = len(self.emitted) + 1 >= self.body.sampling.max_tokens
        return 1000 + self.next_token, FinishReason.LENGTH if done else None

    @precondition(lambda self: self.reserving)
    @rule()
    def reserved(self) -> None:
        self.reserving = False
        total = -(-len(self.so_far) // 16)
        num_cached = min(self.num_cached_blocks * 16, (len(self.so_far) - 1) // 16 * 16)
        self.feed(reserved(total, num_cached))

    @precondition(lambda self: self.prefilling)
    @rule(count=integers(1, 3))
    def announces(self, count: int) -> None:
        total = -(-len(self.so_far) // 16)
        count = min(count, total - self.announced)
        if count:
            self.announced += count
            self.feed(ready(self.announced - count, count))

    @precondition(lambda self: self.prefilling and self.call.state is State.PREFILLING)
    @rule()
    def first_token(self) -> None:
        total = -(-len(self.so_far) // 16)
        if self.announced == total:
            token, finish = self.draw()
            self.feed(PrefillDone(token=token, finish=finish))

    @precondition(lambda self: self.prefilling)
    @rule(error=sampled_from([None, PeerLostError("x"), OverloadedError("x"), RequestError("x")]))
    def prefill_ends(self, error: PeerLostError | None) -> None:
        self.prefilling = False
        self.feed(PrefillEnded(error))

    @precondition(lambda self: self.pulls)
    @rule(works=booleans(), which=integers(0, 5))
    def pull_ends(self, works: bool, which: int) -> None:
        pull = self.pulls.pop(which % len(self.pulls))
        self.feed(PullEnded(pull.first, len(pull.refs), None if works else TransferError("x")))

    @precondition(lambda self: self.scheduled)
    @rule()
    def steps(self) -> None:
        token, finish = self.draw()
        self.feed(Progress(ID, len(self.so_far), token=token, finish=finish, stopped=finish is not None))

    @rule(event=sampled_from([Reclaimed(), Cancelled(), Reclaimed()]))
    def from_outside(self, event: Reclaimed | Cancelled) -> None:
        self.feed(event)

    @invariant()
    def holds(self) -> None:
        self.call.check_invariants()
        assert self.ends == (self.call.state is State.ENDED)
        assert self.emitted == [1000 + index + 1 for index in range(self.next_token)], "lost, repeated or changed"

    def teardown(self) -> None:
        """From wherever it stands, a cancel and settled reads end it."""
        if hasattr(self, "call"):
            self.feed(Cancelled())
            while self.pulls:
                self.pull_ends(False, 0)
            assert self.ends == 1
            assert not (self.prefilling or self.scheduled or self.reserving)


RandomLives.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestRandomLives = RandomLives.TestCase

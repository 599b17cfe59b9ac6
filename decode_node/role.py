"""One Generate call as the decode node sees it. Pure: events in, commands out.

    RESERVING --Reserved--> PREFILLING --first token--> PULLING --all landed--> DECODING --finish--> ENDED
      |    ^                    |                          |                       ^
      |    |                    +------> SETTLING <--------+                       |
      |    +------(reclaimed)---------------+--------------(prefill lost)----------+
      +-----------------------------------------(no prefill node)------------------+

1. Room first: the prompt's blocks are leased before prefill is asked, so a full pool slows intake.
2. Blocks are pulled as they are announced. The prefill node's first token is passed on at once; it is
   a fact from then on, whatever happens to the blocks.
3. A block counts as landed only when its read returned. Blocks that a read may still write to are never
   given back: a request that lets go of its blocks first waits in SETTLING until every read has ended.
4. A lost prefill node, a failed read or a refusal does not end the request: this node has checked it and can
   serve it, so it computes what is missing at home, from the first block that has not landed.
5. A reservation that running requests need more (`Reclaimed`) is given back and asked for again.
6. The first token obeys every finish rule. A request for one token pulls nothing.
7. Whatever ends the call: one Release to the engine, one End to the caller, the prefill call closed.
"""

from dataclasses import dataclass
from enum import StrEnum

from common.engine.events import Admit, Failed, Release, Reserve, Reserved
from common.engine.request import EngineRequest, Progress
from common.errors import BatonError, InternalError, InvalidTransition
from common.messages import (
    BlockId,
    BlockRef,
    BlocksReady,
    FinishReason,
    Generate,
    Incarnation,
    KVLayout,
    NodeAddress,
    Prefill,
    PrefillDone,
    RequestId,
    Tokens,
    WireError,
)


class State(StrEnum):
    RESERVING = "reserve"
    PREFILLING = "prefill"
    PULLING = "transfer"
    SETTLING = "settle"
    DECODING = "decode"
    ENDED = "ended"


class Path(StrEnum):
    """Who computes the prompt, as far as is known yet."""

    PREFILL = "prefill"
    HOME = "home"
    FALLBACK = "fallback"


# --- events that only this role knows ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PullEnded:
    """One read is settled: `count` blocks from index `first` are in place, or `error` says why not."""

    first: int
    count: int
    error: BatonError | None = None


@dataclass(frozen=True, slots=True)
class PrefillEnded:
    """The Prefill call is over, with its error if it had one."""

    error: BatonError | None = None


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """Running requests need this reservation's blocks."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The call is over for its caller: cancelled, lost, or out of time."""


Event = Reserved | BlocksReady | PrefillDone | PullEnded | PrefillEnded | Progress | Failed | Reclaimed | Cancelled

# --- commands --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AskPrefill:
    address: NodeAddress
    body: Prefill


@dataclass(frozen=True, slots=True)
class Pull:
    """Read `refs` of `owner` into `into`; answered by exactly one PullEnded(first, ...)."""

    owner: Incarnation
    first: int
    refs: tuple[BlockRef, ...]
    into: tuple[BlockId, ...]
    secret: bytes


@dataclass(frozen=True, slots=True)
class StopPulls:
    """Post no more reads and let those in flight settle; each still answers."""


@dataclass(frozen=True, slots=True)
class ClosePrefill:
    """The prefill node may free the blocks: say Pulled if `done`, else cancel the call."""

    done: bool


@dataclass(frozen=True, slots=True)
class Emit:
    item: Tokens


@dataclass(frozen=True, slots=True)
class EndCall:
    error: WireError | None = None


Command = Reserve | Admit | Release | AskPrefill | Pull | StopPulls | ClosePrefill | Emit | EndCall

_WITH_PREFILL = frozenset({State.PREFILLING, State.PULLING})

_MOVES: dict[State, frozenset[State]] = {
    State.RESERVING: frozenset({State.PREFILLING, State.DECODING, State.ENDED}),
    State.PREFILLING: frozenset({State.PULLING, State.DECODING, State.SETTLING, State.ENDED}),
    State.PULLING: frozenset({State.DECODING, State.SETTLING, State.ENDED}),
    State.SETTLING: frozenset({State.RESERVING, State.DECODING, State.ENDED}),
    State.DECODING: frozenset({State.ENDED}),
    State.ENDED: frozenset(),
}


class GenerateCall:
    """The life of one Generate call; `history` is its account of time."""

    def __init__(self, body: Generate, *, id: RequestId, layout: KVLayout, now_s: float) -> None:
        self._body = body
        self._id = id  # unique in this engine; the request's own id may come twice (another attempt)
        self._layout = layout
        self._tokens = list(body.tokens)  # prompt, delivered tokens, and what this call emitted
        self._blocks: tuple[BlockId, ...] = ()
        self._landed: list[bool] = []  # by block index of the reservation
        self._pulling = 0  # reads in flight
        self._after_settling = State.ENDED
        self._end_error: WireError | None = None
        self.path = Path.PREFILL if body.prefill else Path.HOME
        self.num_cached = 0
        self.state = State.RESERVING
        self.history: list[tuple[State, float]] = [(State.RESERVING, now_s)]

    # --- what the shell asks ------------------------------------------------------------------------------

    @property
    def holds_reservation(self) -> bool:
        """True while the call leases blocks that no running request uses yet."""
        return self.state in _WITH_PREFILL and bool(self._blocks)

    def phases(self, now_s: float) -> dict[str, float]:
        """Seconds by state, summing to the call's life."""
        spans: dict[str, float] = {}
        ends = [at for _, at in self.history[1:]] + [now_s]
        for (state, start), end in zip(self.history, ends, strict=True):
            if state is not State.ENDED:
                spans[state] = spans.get(state, 0.0) + end - start
        return spans

    def check_invariants(self) -> None:
        assert self._pulling >= 0
        assert len(self._landed) == len(self._blocks)
        if self.state in (State.RESERVING, State.DECODING, State.ENDED):
            assert not self._pulling, "blocks are in use elsewhere while a read may write to them"
            assert not self._blocks

    # --- moves ----------------------------------------------------------------------------------------------

    def begin(self, *, now_s: float) -> list[Command]:
        if self._body.prefill is None:
            return self._admit(now_s)
        if self._num_wanted == 1:  # rule 6: its one token comes from prefill, nothing to reserve
            return self._ask_prefill(now_s)
        return [Reserve(self._id, list(self._tokens), self._body.origin)]

    def handle(self, event: Event, *, now_s: float) -> list[Command]:
        if self.state is State.ENDED:
            return []  # late news
        match event:
            case Reserved():
                return self._reserved(event, now_s)
            case BlocksReady():
                return self._blocks_ready(event)
            case PrefillDone():
                return self._prefill_done_with(event, now_s)
            case PullEnded():
                return self._pull_ended(event, now_s)
            case PrefillEnded():
                return self._prefill_ended(now_s)
            case Progress():
                return self._progressed(event, now_s)
            case Failed(message=message):
                return self._end(now_s, InternalError(message))
            case Reclaimed():
                return self._let_go(State.RESERVING, now_s) if self.holds_reservation else []
            case Cancelled():
                return self._end(now_s)

    def _reserved(self, event: Reserved, now_s: float) -> list[Command]:
        if self.state is not State.RESERVING:
            return []
        self._blocks = event.blocks
        self.num_cached = event.num_cached
        num_cached_blocks = event.num_cached // self._layout.block_size
        self._landed = [index < num_cached_blocks for index in range(len(event.blocks))]
        if event.num_cached and len(self._tokens) - event.num_cached <= self._layout.block_size:
            self.path = Path.HOME
            return self._admit(now_s)  # one short step here is cheaper than asking anybody
        return self._ask_prefill(now_s)

    def _ask_prefill(self, now_s: float) -> list[Command]:
        body = self._body
        assert body.prefill is not None
        self._move(State.PREFILLING, now_s)
        prefill = Prefill(
            request=body.request,
            attempt=body.attempt,
            model_digest=body.model_digest,
            tokens=list(self._tokens),
            num_prompt_tokens=body.num_prompt_tokens,
            sampling=body.sampling,
            layout=self._layout,
            origin=body.origin,
        )
        return [AskPrefill(body.prefill, prefill)]

    def _blocks_ready(self, event: BlocksReady) -> list[Command]:
        if self.state is not State.PREFILLING or not self._blocks:
            return []  # every block is announced before the first token
        wanted = [
            (index, ref)
            for index, ref in enumerate(event.refs, start=event.first)
            if index < len(self._landed) and not self._landed[index]
        ]
        if not wanted:
            return []
        # Cached blocks are a prefix, so what is wanted of one announcement is one run.
        first = wanted[0][0]
        self._pulling += 1
        into = tuple(self._blocks[index] for index, _ in wanted)
        return [Pull(event.owner, first, tuple(ref for _, ref in wanted), into, event.secret)]

    def _prefill_done_with(self, event: PrefillDone, now_s: float) -> list[Command]:
        if self.state is not State.PREFILLING:
            return []
        self._move(State.PULLING, now_s)
        self.num_cached = max(self.num_cached, event.cached_tokens)
        self._tokens.append(event.token)
        if event.finish is not None:
            return self._finish([event.token], event.finish, now_s)
        return [self._emit([event.token]), *self._start_if_complete(now_s)]

    def _pull_ended(self, event: PullEnded, now_s: float) -> list[Command]:
        self._pulling -= 1
        if event.error is None:
            for index in range(event.first, event.first + event.count):
                self._landed[index] = True
        if self.state is State.SETTLING:
            return self._leave_settling(now_s) if not self._pulling else []
        if event.error is not None:
            return self._fall_back(now_s)
        return self._start_if_complete(now_s)

    def _start_if_complete(self, now_s: float) -> list[Command]:
        if self.state is not State.PULLING or self._pulling or not all(self._landed):
            return []
        return [ClosePrefill(done=True), *self._admit(now_s, num_computed=len(self._tokens) - 1)]

    def _prefill_ended(self, now_s: float) -> list[Command]:
        if self.state not in _WITH_PREFILL:
            return []
        return self._fall_back(now_s)

    def _fall_back(self, now_s: float) -> list[Command]:
        self.path = Path.FALLBACK
        return self._let_go(State.DECODING, now_s)

    def _progressed(self, event: Progress, now_s: float) -> list[Command]:
        if event.token is None:
            return []
        if self.path is not Path.PREFILL:
            self.num_cached = max(self.num_cached, event.num_cached)
        self._tokens.append(event.token)
        if event.finish is not None:
            return self._finish([event.token], event.finish, now_s)
        return [self._emit([event.token])]

    # --- leaving ----------------------------------------------------------------------------------------------

    def _finish(self, tokens: list[int], finish: FinishReason, now_s: float) -> list[Command]:
        return [self._emit(tokens, finish, self.phases(now_s)), *self._end(now_s)]

    def _emit(
        self, tokens: list[int], finish: FinishReason | None = None, phases: dict[str, float] | None = None
    ) -> Emit:
        return Emit(Tokens(tokens, finish, self.num_cached, phases, self.path))

    def _end(self, now_s: float, error: BatonError | None = None) -> list[Command]:
        self._end_error = WireError.of(error) if error else None
        if self.state is State.SETTLING:
            self._after_settling = State.ENDED
            return []
        return self._let_go(State.ENDED, now_s)

    def _let_go(self, towards: State, now_s: float) -> list[Command]:
        """Close the prefill call, settle the reads, then go on `towards` (rule 3)."""
        commands: list[Command] = [ClosePrefill(done=False)] if self.state in _WITH_PREFILL else []
        self._after_settling = towards
        if not self._pulling:
            return commands + self._leave_settling(now_s)
        self._move(State.SETTLING, now_s)
        return [*commands, StopPulls()]

    def _leave_settling(self, now_s: float) -> list[Command]:
        match self._after_settling:
            case State.RESERVING:
                self._drop_blocks()
                self._to_reserving(now_s)
                return [Release(self._id), Reserve(self._id, list(self._tokens), self._body.origin)]
            case State.DECODING:
                return self._admit(now_s, num_computed=self._num_landed_tokens())
            case _:
                self._drop_blocks()
                self._move(State.ENDED, now_s)
                return [Release(self._id), EndCall(self._end_error)]

    def _to_reserving(self, now_s: float) -> None:
        if self.state is not State.SETTLING:
            self._move(State.SETTLING, now_s)
        self._move(State.RESERVING, now_s)

    def _admit(self, now_s: float, *, num_computed: int | None = None) -> list[Command]:
        """Hand the request to the engine; its lease, if there is one, becomes its block table."""
        if num_computed is None:
            num_computed = self._num_landed_tokens()
        request = EngineRequest(
            id=self._id,
            tokens=list(self._tokens),
            num_prompt_tokens=self._body.num_prompt_tokens,
            sampling=self._body.sampling,
            num_computed=num_computed,
            num_cached=self.num_cached,
            origin=self._body.origin,
        )
        self._drop_blocks()  # the scheduler's from here on
        self._move(State.DECODING, now_s)
        return [Admit(request)]

    def _drop_blocks(self) -> None:
        self._blocks = ()
        self._landed = []

    def _num_landed_tokens(self) -> int:
        """Tokens in the leading run of landed whole blocks; the last token is always left to compute."""
        run = next((index for index, landed in enumerate(self._landed) if not landed), len(self._landed))
        size = self._layout.block_size
        return min(run * size, (len(self._tokens) - 1) // size * size)

    @property
    def _num_wanted(self) -> int:
        return self._body.sampling.max_tokens - (len(self._body.tokens) - self._body.num_prompt_tokens)

    def _move(self, to: State, now_s: float) -> None:
        if to not in _MOVES[self.state]:
            raise InvalidTransition(f"generate call {self.state} -> {to}; history {self.history}")
        self.state = to
        self.history.append((to, now_s))

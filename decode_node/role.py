"""One Generate call as the decode node sees it. Pure: events in, commands out.

    RESERVING --Reserved--> PREFILLING --first token--> PULLING --all landed--> DECODING --finish--> ENDED
      |    ^                    |                          |                       ^
      |    |                    +------> SETTLING <--------+                       |
      |    +------(reclaimed)---------------+--------------(prefill lost)----------+
      +-----------------------------------------(no prefill node)------------------+
      +-----(a draining node runs it)---> TAKING --HandedOver--> DECODING

1. Room first: the prompt's blocks are leased before prefill is asked, so a full pool slows intake.
2. Blocks are pulled as they are announced. The prefill node's first token is passed on at once; it is
   a fact from then on, whatever happens to the blocks.
3. A block counts as landed only when its read returned. Blocks that a read may still write to are never
   given back: a request that lets go of its blocks first waits in SETTLING until every read has ended.
4. A lost prefill node, a failed read or a refusal does not end the request: this node has checked it and can
   serve it, so it computes what is missing at home, from the first block that has not landed.
5. A reservation that running requests need more (`Reclaimed`) is given back and asked for again.
6. The first token obeys every finish rule. A request for one token pulls nothing.
7. Whatever ends the call: all it has in the engine is released, one End to the caller, the prefill call closed.
8. A request that a draining node runs is taken over: its full blocks are pulled while that node goes on, then it is
   stopped there and goes on here from the tokens that it had by then. If anything of that fails the call ends:
   the other node goes on, or its caller asks anew.
9. Several answers to one prompt (`choices`) are one reservation, one Prefill call and one transfer, then as many
   requests in the engine, each with its own end. The call ends with the last; `StopChoice` lets one go alone.
10. A node that is drained itself says so to whoever could have a running request taken over, and lets go of
   it (MOVED) once it is, or when the time is over; what does not run yet it lets go of at once.
"""

from math import inf

from common.engine.events import Admit, Failed, Release, Reserved
from common.engine.request import Progress
from common.errors import BatonError, InternalError, InvalidTransition, MovedError, UnavailableError
from common.messages import (
    BlockId,
    BlocksReady,
    Drawn,
    Generate,
    HandedOver,
    Handover,
    KVLayout,
    Leaving,
    Prefill,
    PrefillDone,
    RequestId,
    StopChoice,
    Tokens,
    WireError,
)
from decode_node.choices import Choice, Choices
from decode_node.role_events import (
    AskHandover,
    AskPrefill,
    Cancelled,
    ClosePrefill,
    Command,
    Emit,
    EndCall,
    Event,
    Evicted,
    LeaveAsked,
    Path,
    PrefillEnded,
    Pull,
    PullEnded,
    Reclaimed,
    State,
    StopPulls,
    StopSource,
)

_WITH_CALL = frozenset({State.PREFILLING, State.PULLING, State.TAKING})
"""A Prefill or Handover call of ours may be open."""

_MOVES: dict[State, frozenset[State]] = {
    State.RESERVING: frozenset({State.PREFILLING, State.TAKING, State.DECODING, State.ENDED}),
    State.PREFILLING: frozenset({State.PULLING, State.DECODING, State.SETTLING, State.ENDED}),
    State.PULLING: frozenset({State.DECODING, State.SETTLING, State.ENDED}),
    State.TAKING: frozenset({State.DECODING, State.SETTLING, State.ENDED}),
    State.SETTLING: frozenset({State.RESERVING, State.DECODING, State.ENDED}),
    State.DECODING: frozenset({State.ENDED}),
    State.ENDED: frozenset(),
}


class GenerateCall:
    """The life of one Generate call; `history` is its account of time."""

    def __init__(
        self, body: Generate, *, id: RequestId, layout: KVLayout, now_s: float, deadline_s: float = inf
    ) -> None:
        self._body = body
        self._id = id  # unique in this engine; the request's own id may come twice (another attempt)
        self._layout = layout
        self._choices = Choices(body, id, deadline_s)
        self._blocks: tuple[BlockId, ...] = ()
        self._landed: list[bool] = []  # by block index of the reservation
        self._pulling = 0  # reads in flight
        self._after_settling = State.ENDED
        self._end_error: WireError | None = None
        self._has_stopped_source = False
        self.path = Path.HANDOVER if body.source else Path.PREFILL if body.prefill else Path.HOME
        self.num_cached = 0
        self.state = State.RESERVING
        self.history: list[tuple[State, float]] = [(State.RESERVING, now_s)]

    # --- what the shell asks ------------------------------------------------------------------------------

    @property
    def holds_reservation(self) -> bool:
        """True while the call leases blocks that no running request uses yet."""
        return self.state in _WITH_CALL and bool(self._blocks) and not self._has_stopped_source

    @property
    def engine_ids(self) -> list[RequestId]:
        """All that it may have in the engine."""
        return self._choices.ids

    @property
    def running_id(self) -> RequestId:
        """One of those that run in the engine, if any does."""
        return self._choices.first_running

    def handed_over(self) -> HandedOver:
        """Prompt, delivered tokens and those that this call passed on."""
        return self._choices.handed_over()

    @property
    def is_running(self) -> bool:
        return self.state is State.DECODING

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
        if self._body.source is None:
            if self._body.prefill is None:
                return self._admit(now_s)
            if self._wants_one_token:  # rule 6: it comes from prefill, nothing to reserve
                return self._ask_prefill(now_s)
        return [self._choices.reservation()]

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
            case HandedOver():
                return self._handed_over(event, now_s)
            case PullEnded():
                return self._pull_ended(event, now_s)
            case PrefillEnded(error=error):
                return self._lost(error, now_s)
            case Progress():
                return self._progressed(event, now_s)
            case StopChoice(choice=index):
                choice = self._choices.at(index)
                return self._let_choice_go(choice, now_s) if choice is not None else []
            case Failed(message=message):
                return self._end(now_s, InternalError(message))
            case Reclaimed():
                return self._let_go(State.RESERVING, now_s) if self.holds_reservation else []
            case LeaveAsked() if self.is_running:
                return [Emit(Leaving())]
            case LeaveAsked() | Evicted():
                return self._end(now_s, MovedError("this node is being drained"))
            case Cancelled():
                return self._end(now_s)

    def _reserved(self, event: Reserved, now_s: float) -> list[Command]:
        if self.state is not State.RESERVING:
            return []
        self._blocks = event.blocks
        self.num_cached = event.num_cached
        num_cached_blocks = event.num_cached // self._layout.block_size
        self._landed = [index < num_cached_blocks for index in range(len(event.blocks))]
        if self._body.source is not None:
            return self._ask_handover(now_s)
        if event.num_cached and len(self._choices.shared) - event.num_cached <= self._layout.block_size:
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
            tokens=list(self._choices.shared),
            num_prompt_tokens=body.num_prompt_tokens,
            sampling=body.sampling,
            layout=self._layout,
            origin=body.origin,
            choices=self._choices.indexes,
        )
        return [AskPrefill(body.prefill, prefill)]

    def _ask_handover(self, now_s: float) -> list[Command]:
        body = self._body
        assert body.source is not None
        self._move(State.TAKING, now_s)
        return [AskHandover(body.source, Handover(body.request, body.attempt - 1, self._layout))]

    def _blocks_ready(self, event: BlocksReady) -> list[Command]:
        if self.state not in (State.PREFILLING, State.TAKING) or not self._blocks:
            return []  # every block is announced before the first token
        wanted = [
            (index, ref)
            for index, ref in enumerate(event.refs, start=event.first)
            if index < len(self._landed) and not self._landed[index]
        ]
        if not wanted:
            return self._stop_source()
        # Cached blocks are a prefix, so what is wanted of one announcement is one run.
        first = wanted[0][0]
        self._pulling += 1
        into = tuple(self._blocks[index] for index, _ in wanted)
        return [Pull(event.owner, first, tuple(ref for _, ref in wanted), into, event.secret)]

    def _prefill_done_with(self, event: PrefillDone, now_s: float) -> list[Command]:
        if self.state is not State.PREFILLING:
            return []
        if 1 + len(event.others) != len(self._choices):
            return self._lost(InternalError("prefill drew for other choices than it was asked for"), now_s)
        self._move(State.PULLING, now_s)
        self.num_cached = max(self.num_cached, event.cached_tokens)
        commands: list[Command] = []
        drawn = Drawn(event.token, event.finish, event.logprob), *event.others
        for choice, one in zip(self._choices, drawn, strict=True):
            # One that had tokens before had this one too: it is a fact.
            if choice.is_open and len(choice.tokens) == len(self._choices.shared):
                commands += self._pass_on(choice, one.token, one, now_s)
        return commands + self._start_if_complete(now_s)

    def _pull_ended(self, event: PullEnded, now_s: float) -> list[Command]:
        self._pulling -= 1
        if event.error is None:
            for index in range(event.first, event.first + event.count):
                self._landed[index] = True
        if self.state is State.SETTLING:
            return self._leave_settling(now_s) if not self._pulling else []
        if event.error is not None:
            return self._lost(event.error, now_s)
        return self._stop_source() if self.state is State.TAKING else self._start_if_complete(now_s)

    def _start_if_complete(self, now_s: float) -> list[Command]:
        if self.state is not State.PULLING or self._pulling or not all(self._landed):
            return []
        return [ClosePrefill(done=True), *self._admit(now_s, num_computed=len(self._choices.shared))]

    def _stop_source(self) -> list[Command]:
        """Rule 8: everything that was announced is here."""
        if self.state is not State.TAKING or self._has_stopped_source:
            return []
        self._has_stopped_source = True
        return [StopSource()]

    def _handed_over(self, event: HandedOver, now_s: float) -> list[Command]:
        if self.state is not State.TAKING:
            return []
        if not self._choices.take_over(event):
            return self._end(now_s, InternalError("the node that handed over runs another request"))
        return [ClosePrefill(done=True), *self._admit(now_s)] if self._choices.open else self._end(now_s)

    def _lost(self, error: BatonError | None, now_s: float) -> list[Command]:
        """The other node of our call, or a read from it, failed: rule 4, or rule 8."""
        if self.state not in _WITH_CALL:
            return []
        if self.state is State.TAKING:
            why = f": {error.message}" if error else ""
            return self._end(now_s, UnavailableError(f"the handover failed{why}"))
        self.path = Path.FALLBACK
        return self._let_go(State.DECODING, now_s)

    def _progressed(self, event: Progress, now_s: float) -> list[Command]:
        choice = self._choices.by_id.get(event.request)
        if event.token is None or choice is None or not choice.is_open:
            return []
        choice.is_running = True
        if choice.is_unwanted:
            return self._let_choice_go(choice, now_s)
        if self.path is not Path.PREFILL and event.num_cached > self.num_cached:
            self.num_cached = event.num_cached
        return self._pass_on(choice, event.token, event, now_s)

    def _pass_on(self, choice: Choice, token: int, drawn: Drawn | Progress, now_s: float) -> list[Command]:
        start = None if choice.has_emitted else len(choice.tokens)
        choice.has_emitted = True
        choice.tokens.append(token)
        finish = drawn.finish
        if finish is None:
            tokens = Tokens([token], None, self.num_cached, None, self.path, start, choice.index, drawn.logprob)
            return [Emit(tokens)]
        choice.is_open = False
        is_over = not self._choices.open
        phases = self.phases(now_s) if is_over else None
        tokens = Tokens([token], finish, self.num_cached, phases, self.path, start, choice.index, drawn.logprob)
        return [Emit(tokens), *self._end(now_s)] if is_over else [Emit(tokens)]

    # --- leaving ----------------------------------------------------------------------------------------------

    def _let_choice_go(self, choice: Choice, now_s: float) -> list[Command]:
        """Rule 9. Before a choice runs by itself the engine knows it only as part of another."""
        if choice.id is not None and not choice.is_running:
            choice.is_unwanted = True
            return []
        choice.is_open = False
        commands: list[Command] = [] if choice.id is None else [Release(choice.id)]
        return commands if self._choices.open else commands + self._end(now_s)

    def _end(self, now_s: float, error: BatonError | None = None) -> list[Command]:
        self._end_error = WireError.of(error) if error else None
        if self.state is State.SETTLING:
            self._after_settling = State.ENDED
            return []
        return self._let_go(State.ENDED, now_s)

    def _let_go(self, towards: State, now_s: float) -> list[Command]:
        """Close the prefill call, settle the reads, then go on `towards` (rule 3)."""
        commands: list[Command] = [ClosePrefill(done=False)] if self.state in _WITH_CALL else []
        self._after_settling = towards
        if not self._pulling:
            return commands + self._leave_settling(now_s)
        self._move(State.SETTLING, now_s)
        return [*commands, StopPulls()]

    def _leave_settling(self, now_s: float) -> list[Command]:
        match self._after_settling:
            case State.RESERVING:
                self._drop_blocks()
                self._choices.narrow()
                self._to_reserving(now_s)
                return [Release(self._id), self._choices.reservation()]
            case State.DECODING:
                return self._admit(now_s, num_computed=self._num_landed_tokens())
            case _:
                self._drop_blocks()
                self._move(State.ENDED, now_s)
                return [*(Release(id) for id in self._choices.ids), EndCall(self._end_error)]

    def _to_reserving(self, now_s: float) -> None:
        if self.state is not State.SETTLING:
            self._move(State.SETTLING, now_s)
        self._move(State.RESERVING, now_s)

    def _admit(self, now_s: float, *, num_computed: int | None = None) -> list[Command]:
        """Hand the open choices to the engine; the lease, if there is one, becomes the first one's block table."""
        if num_computed is None:
            num_computed = self._num_landed_tokens()
        request, *forks = self._choices.requests()
        request.num_computed, request.num_cached = num_computed, self.num_cached
        self._drop_blocks()  # the scheduler's from here on
        self._move(State.DECODING, now_s)
        return [Admit(request, tuple(forks), len(self._choices.shared) if forks else 0)]

    def _drop_blocks(self) -> None:
        self._blocks = ()
        self._landed = []

    def _num_landed_tokens(self) -> int:
        """Shared tokens in the leading run of landed whole blocks; the last token is always left to compute."""
        run = next((index for index, landed in enumerate(self._landed) if not landed), len(self._landed))
        size = self._layout.block_size
        computable = min(len(self._choices.shared), len(self._choices.open[0].tokens) - 1)
        return min(run * size, computable // size * size)

    @property
    def _wants_one_token(self) -> bool:
        num_tokens = len(self._choices.shared) - self._body.num_prompt_tokens
        return self._choices.are_bare and self._body.sampling.max_tokens - num_tokens == 1

    def _move(self, to: State, now_s: float) -> None:
        if to not in _MOVES[self.state]:
            raise InvalidTransition(f"generate call {self.state} -> {to}; history {self.history}")
        self.state = to
        self.history.append((to, now_s))

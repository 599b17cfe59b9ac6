"""Which tokens the next step computes, and what its result means. Pure; knows no phases.

    plan = scheduler.schedule()
    progress = scheduler.update(plan, runner.execute(plan))

A request has total tokens and computed tokens. One that lacks a single token decodes, one that lacks more
is a prompt, whether it never ran, lost its blocks or came with some of them; the rules are the same.

    add ──> waiting ──blocks and a place──> running ──stop──> gone (freed, or a lease)
              ▲  (with a lease: ready)         │
              └───────── pre-empted ───────────┘

1. Blocks go out in one order, over requests and reservations alike: that of `fair`, which is by arrival as
   long as there is one tenant, one class and no other policy. Who is first there waits until it fits, and
   nobody passes it who is not put before it. Whoever gets blocks for the first time has its turn, which
   orders it for good. A request that brings its blocks (a lease) needs only a place and takes the next one.
2. A running request's blocks cover all of its tokens; a prompt gets them all when it gets its place. So
   only a drawn token can ask for one more block.
3. When there is none, the latest turn of those that hold blocks gives up its own: first who only waits
   for a place, then running requests of a later turn than the one that grows. It keeps its tokens, loses
   what was computed and waits again, ahead of all that had no turn yet; it returns when its whole context
   fits and a block is left. With nobody later to take from, the request pauses a step instead. The oldest
   running one can take from all others, so it always goes on, unless leases hold the pool (`starving`).
4. `admit_whole`, and every request with `keep_blocks` (its finished blocks are promised to a reader), gets
   at once all the blocks it can ever need. It never grows, so it is never taken from.
5. Every running decode has its token in each step; prompts get what the step's limits leave, at least a
   block between them, and as much as they can take one after the other: that of the class and tenant that
   had least (`fair`), and there the oldest. Waiting ones are admitted in their order among them, after
   running ones of the same class and tenant. The limits are tokens and, through `Pace`, seconds.
6. Several answers to one prompt are one request until its first token, then several that share blocks (`forks`).
7. A reservation never waits for others' arithmetic: a request before it gets its place and blocks at once.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from math import inf

from common.engine.fair import FairQueue
from common.engine.forks import Forks
from common.engine.leases import Lease, Leases
from common.engine.names import Names
from common.engine.pace import Pace
from common.engine.policy import Policy, Ticket, ticket
from common.engine.request import Chunk, EngineRequest, Progress, Status, StepPlan
from common.engine.roster import Roster
from common.engine.share import RunningPrompts, goes_before
from common.engine.sizes import Sizes
from common.errors import InvalidTransition
from common.kv_cache.block_pool import BlockPool
from common.kv_cache.prefix_cache import cached_prefix
from common.messages import BlockHash, BlockId, BlockRef, Drawn, Origin, RequestId

_FIRST_STEP_BLOCKS = 8
"""A prompt's first chunk while nothing is known of the model's speed."""


class Scheduler:
    """Owns every request from `add` to its stop, and the leases, on one pool.

    `root_of` starts a tenant's hash chains (`prefix_cache.root_hash`); None turns prefix sharing off.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        max_running: int,
        max_step_tokens: int,
        max_step_s: float,
        itl_target_s: float = 0.0,
        max_model_len: int,
        admit_whole: bool,
        root_of: Callable[[bytes], BlockHash] | None,
        policy: Policy = "fcfs",
    ) -> None:
        self._pool = pool
        self._block_size = block_size
        self._max_step_tokens = max_step_tokens
        self._sizes = Sizes(pool.num_blocks, block_size, max_model_len, admit_whole)
        self.fits_alone, self._blocks_for = self._sizes.fits_alone, self._sizes.blocks_for
        self._names = Names(pool, block_size, root_of)
        self.pace = Pace(
            first_tokens=_FIRST_STEP_BLOCKS * block_size,
            max_step_s=max_step_s,
            itl_target_s=itl_target_s,
            block_size=block_size,
        )
        self._leases = Leases(pool, block_size)
        self._forks = Forks(pool, block_size, self._names)
        self._policy = policy
        self._queue = FairQueue(policy)
        self._roster = Roster(min(max_running, max_step_tokens))
        self._turns = 0
        self.starving = False
        """No running request could be planned, and leases hold what they need."""
        self.num_uncomputed_tokens = 0
        self.num_preemptions = 0
        self.num_cached_tokens = 0

    # --- what the shell asks ---------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self._roster.running)

    @property
    def num_waiting(self) -> int:
        return len(self._queue) + len(self._roster.ready)

    @property
    def num_leased_blocks(self) -> int:
        return self._leases.num_blocks

    @property
    def ids(self) -> list[RequestId]:
        """Everything that has anything here: requests, forks to be, leases, queued reservations."""
        return [*self._roster.requests, *self._forks.ids, *self._leases.ids]

    def full_blocks(self, id: RequestId) -> tuple[BlockRef, ...]:
        """The blocks of a running request that no step writes to any more; none if it does not run."""
        request = self._roster.requests.get(id)
        blocks = request.blocks[: request.num_computed // self._block_size] if request is not None else ()
        return tuple(self._pool.ref(block) for block in blocks)

    def held(self) -> Iterator[tuple[str, RequestId, list[BlockId]]]:
        """Everything that has blocks here or waits for them: what it is, its id, its block table."""
        for part in (self._roster, self._forks, self._leases):
            yield from part.held()

    # --- arrivals and departures -----------------------------------------------------------------------

    def reserve(
        self, id: RequestId, tokens: list[int], origin: Origin, *, deadline_s: float = inf, num_forks: int = 0
    ) -> None:
        """Queue a reservation of blocks for `tokens`. ContextLengthError if the pool is too small for them."""
        self._check_new(id)
        self._sizes.check_reservation(len(tokens))
        hashes: list[BlockHash] = []
        self._names.extend(hashes, tokens, origin)
        self._leases.reserve(id, len(tokens), hashes, num_forks)
        self._queue.add(id, origin, self._ticket(hashes, len(tokens), deadline_s))

    def add(self, request: EngineRequest, forks: Sequence[EngineRequest] = (), num_shared: int = 0) -> None:
        """Schedule a request; a lease of its id becomes its block table. `forks` share its first `num_shared` tokens.

        Without a lease its `num_computed` counts for nothing. RequestError if one is not whole or could never finish.
        """
        lease = self._leases.peek(request.id)
        for one in (request, *forks):
            self._check_new(one.id, lease=one is request)
            self._sizes.check(one, lease if one is request else None)
        self._forks.attach(request, forks, num_shared)
        request.hashes = [] if lease is None else lease.hashes
        self._names.extend(request.hashes, request.tokens, request.origin)
        self._leases.take(request.id)
        self._queue.remove(request.id)  # a reservation that it did not wait for
        if lease is None:
            request.blocks, request.num_computed, request.turn = [], 0, 0
        else:
            self._adopt(request, lease)
        self._enter(request)

    def release(self, id: RequestId) -> bool:
        """Free all that this id has, whatever it is doing. Idempotent. True if a lease ended."""
        self._queue.remove(id)
        self._forks.drop(id)
        request = self._roster.requests.get(id)
        if request is not None:
            self._remove(request)
            self._pool.free(request.take_blocks())
        return self._leases.release(id)

    # --- one step --------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """The next step's chunks: decodes by turn, then prompts by rule 5. Empty if nothing can run now."""
        self._roster.seat_ready()
        self._grow_running()
        block_size = self._block_size
        chunks: list[Chunk] = []
        prompts: list[EngineRequest] = []
        for request in self._roster.running:
            total = len(request.tokens)
            if total > len(request.blocks) * block_size:
                continue  # pauses: rule 3
            if total - request.num_computed == 1:
                chunks.append(Chunk(request, total - 1, 1, 1 + len(request.also) if request.also else 1))
            else:
                prompts.append(request)
        num_decodes = len(chunks)
        left = self._max_step_tokens - num_decodes
        left = self.pace.prompt_tokens(num_decodes, most=left, joining=self._leases.has_granted)
        self._add_prompts(chunks, prompts, left)
        plan = StepPlan(tuple(chunks))
        self.pace.planned = num_decodes, plan.num_tokens - num_decodes
        self.starving = not chunks and bool(self._roster.running)
        return plan

    def grant(self) -> tuple[RequestId, Lease] | None:
        """The reservation that is first of all that wait, if it fits beside the running ones: rules 1 and 7."""
        while self._leases.has_wanted and (first := self._next()) is not None and self._admit(first):
            pass
        id = self._queue.first
        if id is None or id in self._roster.requests:
            return None
        spare = len(self._roster.running) + len(self._roster.ready)
        if (lease := self._leases.grant(id, turn=self._turns + 1, spare=spare)) is None:
            return None
        self._turns = lease.turn
        self._queue.charge(self._queue.origin(id), self._block_size * len(lease.blocks) - lease.num_cached)
        self._queue.serve(id)
        return id, lease

    def update(self, plan: StepPlan, tokens: list[int]) -> tuple[Progress, ...]:
        """Book an executed plan; `tokens` has those of each chunk that samples, in plan order.

        Chunks of requests that were released meanwhile are dropped.
        """
        drawn = iter(tokens)
        progress = []
        for chunk in plan.chunks:
            request, samples = chunk.request, chunk.samples
            token = next(drawn) if samples else None
            others = () if samples < 2 else tuple(islice(drawn, samples - 1))
            if request.status is Status.RUNNING:
                progress.append(self._advance(request, chunk.num_tokens, token, others))
        return tuple(progress)

    # --- places and blocks -----------------------------------------------------------------------------

    def _grow_running(self) -> None:
        block_size = self._block_size
        for request in tuple(self._roster.running):
            if len(request.tokens) > len(request.blocks) * block_size and request.status is Status.RUNNING:
                self._grow(request)

    def _grow(self, request: EngineRequest) -> None:
        """Rules 2 and 3; without success the request keeps what it has."""
        missing = self._blocks_for(len(request.tokens)) - len(request.blocks)
        while (blocks := self._pool.allocate(missing)) is None:
            victim = self._roster.latest_after(request)
            if victim is not None:
                self._preempt(victim)
            elif request.copy_of is not None:  # what it holds to copy from may be what it lacks
                self.num_uncomputed_tokens += self._forks.give_up_copy(request)
            else:
                return
        if request.copy_of is not None:
            self._forks.copy(request, blocks[0])
        request.blocks.extend(blocks)

    def _preempt(self, victim: EngineRequest) -> None:
        self._pool.free(victim.take_blocks())
        self.num_uncomputed_tokens += victim.num_computed
        self.num_preemptions += 1
        victim.num_computed = 0
        victim.num_preemptions += 1
        self._roster.send_back(victim)
        self._queue.put_back(victim.id, victim.origin, turn=victim.turn)

    def _next(self) -> EngineRequest | None:
        """The request that is first of all that wait, if there is a place for it and no reservation before it."""
        first = self._queue.first
        return None if first is None or self._roster.full else self._roster.requests.get(first)

    def _admit(self, request: EngineRequest) -> bool:
        """Give the first of all that wait its place and blocks, if there are enough."""
        roster = self._roster
        shared = cached_prefix(self._pool, request.hashes, len(request.tokens), self._block_size)
        whole = self._sizes.is_whole(request)  # rule 4
        need = self._blocks_for(self._sizes.longest(request) - 1 if whole else len(request.tokens))
        spare = 0 if whole or not roster.running else 1 + self._forks.of(request.id)
        if (blocks := self._pool.claim(shared, need - len(shared), spare=spare)) is None:
            return False
        self._queue.serve(request.id)
        if not request.turn:
            self._turns = request.turn = self._turns + 1
        roster.seat_waiting(request)
        request.blocks = blocks
        request.num_computed = len(shared) * self._block_size
        self.num_cached_tokens += request.num_computed
        self.num_uncomputed_tokens -= request.num_computed
        if request.num_preemptions == 0:
            request.num_cached = request.num_computed
        return True

    def _adopt(self, request: EngineRequest, lease: Lease) -> None:
        """The lease's blocks, those whose bytes have landed now offered to others as well."""
        request.blocks = lease.blocks
        # Shared blocks are complete by definition, whatever the request says; nobody may write to them.
        request.num_computed = max(request.num_computed, lease.num_cached)
        self.num_cached_tokens += lease.num_cached
        request.turn = lease.turn
        self._names.offer(request, lease.num_cached // self._block_size)

    # --- the step's share ------------------------------------------------------------------------------

    def _add_prompts(self, chunks: list[Chunk], running: list[EngineRequest], left: int) -> None:
        """Rule 5."""
        prompts = RunningPrompts(self._policy, running)
        admits, rank = True, self._queue.rank
        while left > 0:
            request = prompts.head(rank)
            first = self._next() if admits else None
            if first is not None and goes_before(first, request, rank):
                admits = self._admit(first)
                if not admits:
                    continue
                request = first
            elif request is not None:
                prompts.take(request)
            else:
                return
            chunk, is_whole = self._next_chunk(request, left)
            chunks.append(chunk)
            self._queue.charge(request.origin, chunk.num_tokens)
            prompts.pass_by(request, chunk.num_tokens)
            left = 0 if is_whole and not chunk.samples else left - chunk.num_tokens

    def _next_chunk(self, request: EngineRequest, left: int) -> tuple[Chunk, bool]:
        """The prompt's next chunk, and whether it is all that fits: for a reader it may be cut shorter."""
        if not request.keep_blocks:
            return request.next_chunk(left, self._block_size), True
        most = self.pace.chunk_tokens(request.num_uncomputed, request.pull_left_s, most=left)
        chunk = request.next_chunk(most, self._block_size)
        request.pull_left_s = self.pace.pull_left_s(request.pull_left_s, chunk.num_tokens)
        return chunk, most == left

    # --- results ---------------------------------------------------------------------------------------

    def _advance(self, request: EngineRequest, num_tokens: int, token: int | None, others: Sequence[int]) -> Progress:
        computed_blocks = request.num_computed // self._block_size
        request.num_computed += num_tokens
        self.num_uncomputed_tokens -= num_tokens
        if request.num_computed // self._block_size > computed_blocks:
            self._names.offer(request, computed_blocks)
        finish, stopped = None, False
        if token is not None:
            request.tokens.append(token)
            self.num_uncomputed_tokens += 1
            finish = request.finish_reason(token, self._sizes.max_model_len)
            stopped = finish is not None or request.stop_after_first
            if self._forks.attached:
                self._start_forks(request)
        if not request.keep_blocks:
            if stopped:
                self.release(request.id)
            return Progress(request.id, request.num_computed, token, finish, request.num_cached, stopped)
        num_ready = self._blocks_for(request.num_computed) if stopped else request.num_computed // self._block_size
        drawn = tuple(Drawn(other, request.finish_reason(other, self._sizes.max_model_len)) for other in others)
        news = *request.announce(num_ready, self._pool), drawn
        if stopped:
            self._remove(request)
            self._leases.keep(request)
        return Progress(request.id, request.num_computed, token, finish, request.num_cached, stopped, *news)

    def _start_forks(self, parent: EngineRequest) -> None:
        """Rule 6."""
        for fork in self._forks.start(parent):
            if fork.held_blocks:
                self._turns = fork.turn = self._turns + 1
            self._enter(fork)

    # --- small ones ------------------------------------------------------------------------------------

    def _ticket(self, hashes: list[BlockHash], num_tokens: int, deadline_s: float) -> Ticket:
        """For a newcomer, by what it would have to compute now."""
        cached = cached_prefix(self._pool, hashes, num_tokens, self._block_size) if self._policy == "shortest" else []
        return ticket(self._policy, num_tokens=num_tokens - len(cached) * self._block_size, deadline_s=deadline_s)

    def _enter(self, request: EngineRequest) -> None:
        """What has no turn yet waits for blocks."""
        if not request.turn:
            request.ticket = self._ticket(request.hashes, len(request.tokens), request.deadline_s)
            self._queue.add(request.id, request.origin, request.ticket)
        self._roster.add(request)
        self.num_uncomputed_tokens += request.num_uncomputed

    def _remove(self, request: EngineRequest) -> None:
        self.num_uncomputed_tokens -= request.num_uncomputed
        self._roster.remove(request)

    def _check_new(self, id: RequestId, *, lease: bool = False) -> None:
        if id in self._roster.requests or (not lease and id in self._leases):
            raise InvalidTransition(f"request {id} is already here")

    def check_invariants(self) -> None:
        for part in (self._roster, self._leases, self._queue):
            part.check_invariants()
        wanted = [id for id in self._leases.ids if self._leases.peek(id) is None]
        assert sorted(self._queue.ids) == sorted([*self._roster.waiting, *wanted])
        held = [*self._roster.running, *self._roster.ready]
        self._pool.check_invariants([*(request.held_blocks for request in held), *self._leases.tables()])
        assert all(self._blocks_for(request.num_computed) <= len(request.held_blocks) for request in held)
        assert self.num_uncomputed_tokens == sum(one.num_uncomputed for one in self._roster.requests.values())

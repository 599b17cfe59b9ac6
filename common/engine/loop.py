"""The one engine thread: commands in, `schedule -> execute -> update`, events out.

1. Whatever happens to a request happens between two steps, on this thread. The shell posts and listens.
2. With nothing to run the thread blocks on its inbox; any command wakes it. It never polls.
3. Grants and refusals are delivered before the step that follows them, a step's progress after it.
4. A step that fails is run again request by request: those that fail alone have failed, the others go
   on. Running a chunk again writes the same bytes to the same places, so nothing of theirs is lost.
5. An error of our own, outside the runner, means that the accounts cannot be trusted: everybody here has
   failed, later comers fail at once, and `last_progress_s` stands still, which takes the node out of service.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from threading import Thread
from typing import assert_never

import numpy as np
import numpy.typing as npt

from common import telemetry
from common.clock import Clock, SystemClock
from common.config import EngineConfig
from common.engine.events import (
    Admit,
    Announce,
    Announced,
    CacheChanged,
    Command,
    Count,
    Counted,
    EngineStats,
    Event,
    Failed,
    Probe,
    PullTook,
    Release,
    Reserve,
    Reserved,
    Starved,
    Stepped,
)
from common.engine.meter import Meter
from common.engine.request import StepPlan
from common.engine.scheduler import Scheduler
from common.errors import BatonError, InternalError
from common.kv_cache.block_pool import BlockPool, Generations
from common.kv_cache.prefix_cache import root_hash
from common.messages import BlockHash, HeldSequence, RequestId
from common.model.base import Runner

log = telemetry.logger(__name__)


class Engine:
    """One pool, one runner, one thread.

    `generations` is the pool memory's int64 array (or anything indexable), one for each block.
    `deliver` is called on the engine thread with what happened, in order; it must not block.
    """

    def __init__(
        self,
        *,
        runner: Runner,
        generations: Generations | npt.NDArray[np.int64],
        config: EngineConfig,
        deliver: Callable[[Sequence[Event]], None],
        clock: Clock | None = None,
        admit_whole: bool = False,
    ) -> None:
        if isinstance(generations, np.ndarray):
            generations = generations.data  # plain ints, and several times faster one by one
        self._runner = runner
        self._deliver = deliver
        self._clock: Clock = clock or SystemClock()
        self._pool = BlockPool(len(generations), generations, runner.num_host_blocks)
        self._scheduler = Scheduler(
            self._pool,
            block_size=runner.layout.block_size,
            max_running=config.max_running,
            max_step_tokens=config.max_step_tokens,
            max_step_s=config.max_step_s,
            itl_target_s=config.itl_target_s,
            max_model_len=runner.max_model_len,
            admit_whole=admit_whole,
            root_of=self._root_of if config.prefix_cache else None,
            policy=config.policy,
        )
        self._inbox: SimpleQueue[Command | None] = SimpleQueue()  # None: stop
        self._events: list[Event] = []
        self._logprobs: dict[RequestId, Sequence[float]] = {}
        self._meter = Meter()
        self._num_posted = self._num_posted_tokens = 0
        self._num_taken = self._num_taken_tokens = 0
        self._said_starved = False
        self._broken = ""
        self._stopping = False
        self._last_progress_s = self._clock.now_s()
        self._thread = Thread(target=self._run, name="engine", daemon=True)
        self._stats = self._snapshot()

    # --- for the shell, from any thread ----------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the step in progress; what is still here is dropped without a word."""
        self._inbox.put(None)
        if self._thread.ident is not None:
            self._thread.join()

    def post(self, command: Command) -> None:
        """Queue a command; never blocks. Reserve and Admit from one thread only: they are counted."""
        if isinstance(command, Reserve | Admit):
            self._num_posted += 1
            self._num_posted_tokens += _tokens_to_compute(command)
        self._inbox.put(command)

    def stats(self) -> EngineStats:
        return self._stats

    def num_waiting(self) -> tuple[int, int]:
        """Requests and reservations that wait, and tokens to be computed; what is still in the inbox included."""
        stats = self._stats
        num_unseen, num_unseen_tokens = (
            self._num_posted - stats.num_taken,
            self._num_posted_tokens - stats.num_taken_tokens,
        )
        return stats.num_waiting + num_unseen, stats.num_waiting_tokens + num_unseen_tokens

    def fits_alone(self, num_tokens_max: int) -> bool:
        """Whether a request that may reach so many tokens could ever finish here."""
        return self._scheduler.fits_alone(num_tokens_max)

    # --- the loop --------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Take in what was posted and run one step; False if there is nothing to do until the next command.

        For tests without the thread; never beside it.
        """
        return self._turn(wait=False)

    def _run(self) -> None:
        busy = True
        while not self._stopping:
            busy = self._turn(wait=not busy)

    def _turn(self, *, wait: bool) -> bool:
        did = False
        try:
            self._take_in(wait=wait)
            did = not self._broken and not self._stopping and self._advance()
            if not did and not self._broken:
                self._last_progress_s = self._clock.now_s()
        except Exception as error:
            self._break(error)
        self._stats = self._snapshot()
        self._flush()
        return did

    def _root_of(self, tenant: bytes) -> BlockHash:
        return root_hash(model_digest=self._runner.model_digest, tenant_salt=tenant)

    def _take_in(self, *, wait: bool) -> None:
        if wait:
            if self._inbox.empty():
                self._runner.rest()
            self._obey(self._inbox.get())
        while True:
            try:
                command = self._inbox.get_nowait()
            except Empty:
                return
            self._obey(command)

    def _obey(self, command: Command | None) -> None:
        if isinstance(command, Reserve | Admit):
            self._num_taken += 1
            self._num_taken_tokens += _tokens_to_compute(command)
        match command:
            case None:
                self._stopping = True
            case Probe():
                pass  # it has woken us
            case Count():
                self._events.append(self._counted())
            case PullTook(num_tokens=num_tokens, seconds=seconds):
                self._scheduler.pace.observe_pull(num_tokens, seconds)
            case Announce(request=id):
                self._events.append(Announced(id, () if self._broken else self._scheduler.full_blocks(id)))
            case Release(request=id):
                if not self._broken and self._scheduler.release(id):
                    self._said_starved = False
            case Reserve(request=id):
                with self._refusing(id):
                    deadline_s, num_forks = command.deadline_s, command.num_forks
                    self._scheduler.reserve(
                        id, command.tokens, command.origin, deadline_s=deadline_s, num_forks=num_forks
                    )
            case Admit(request=request):
                with self._refusing(request.id):
                    self._scheduler.add(request, command.forks, command.num_shared)
            case _:
                assert_never(command)

    @contextmanager
    def _refusing(self, id: RequestId) -> Iterator[None]:
        """What the scheduler does not take has failed, alone."""
        try:
            if self._broken:
                raise InternalError(self._broken)
            yield
        except BatonError as error:
            self._fail(id, error.message)

    def _advance(self) -> bool:
        plan = self._scheduler.schedule()
        granted = self._grant()
        self._copy()  # before a reservation's owner hears of its blocks, and before the pass
        if self._scheduler.starving and not self._said_starved:
            self._events.append(Starved())
        self._said_starved = self._scheduler.starving
        if not plan.chunks:
            return granted
        self._flush()
        self._stats = self._snapshot()  # who joined this step waits no longer, and it may take a while
        self._logprobs.clear()
        started_s = self._clock.now_s()
        done, tokens = self._execute(plan)
        now_s = self._clock.now_s()
        if done is plan:
            self._scheduler.pace.observe(now_s - started_s)
        if done.chunks:
            self._meter.count_step(done, num_drawn=len(tokens), seconds=now_s - started_s)
            progress = self._scheduler.update(done, tokens)
            if self._logprobs:
                progress = tuple(
                    one.scored(self._logprobs[one.request]) if one.request in self._logprobs else one
                    for one in progress
                )
            self._events.append(Stepped(progress))
            self._last_progress_s = now_s
        return True

    def _copy(self) -> None:
        copies = self._pool.take_copies()
        if copies:
            started_s = self._clock.now_s()
            self._runner.copy_blocks(copies)
            self._scheduler.pace.observe_copies(len(copies), self._clock.now_s() - started_s)
            self._pool.host.is_worth_it = self._scheduler.pace.copying_pays

    def _grant(self) -> bool:
        granted = False
        while (grant := self._scheduler.grant()) is not None:
            id, lease = grant
            self._events.append(Reserved(id, tuple(lease.blocks), lease.num_cached))
            granted = True
        return granted

    # --- what can go wrong -----------------------------------------------------------------------------

    def _execute(self, plan: StepPlan) -> tuple[StepPlan, list[int]]:
        """What could be computed of the plan, and its tokens (rule 4)."""
        try:
            return plan, self._tokens_of(plan)
        except Exception as error:
            log.exception("step failed", requests=len(plan.chunks), tokens=plan.num_tokens)
            if len(plan.chunks) == 1:
                self._fail(plan.chunks[0].request.id, _words(error))
                return StepPlan(()), []
        done, tokens = [], []
        for chunk in plan.chunks:
            try:
                tokens += self._tokens_of(StepPlan((chunk,)))
                done.append(chunk)
            except Exception as error:
                log.exception("request failed", request=chunk.request.id, start=chunk.start, tokens=chunk.num_tokens)
                self._fail(chunk.request.id, _words(error))
        return StepPlan(tuple(done)), tokens

    def _tokens_of(self, plan: StepPlan) -> list[int]:
        tokens = self._runner.execute(plan)
        self._logprobs.update(self._runner.logprobs)
        wanted = sum(chunk.samples for chunk in plan.chunks)
        if len(tokens) != wanted:
            raise InternalError(f"the runner drew {len(tokens)} tokens where {wanted} were wanted")
        return tokens

    def _fail(self, id: RequestId, message: str) -> None:
        if not self._broken and self._scheduler.release(id):
            self._said_starved = False
        self._meter.num_failed += 1
        self._events.append(Failed(id, message))

    def _break(self, error: Exception) -> None:
        """Rule 5."""
        log.exception("engine broken", requests=len(self._scheduler.ids))
        self._broken = f"the engine stopped: {_words(error)}"
        self._events += [Failed(id, self._broken) for id in self._scheduler.ids]

    # --- to the shell ----------------------------------------------------------------------------------

    def _flush(self) -> None:
        if self._pool.changes:
            self._events.append(CacheChanged(self._pool.changes))
            self._pool.changes = []
        if not self._events:
            return
        events, self._events = self._events, []
        try:
            self._deliver(events)
        except Exception:  # the shell's bug must not end the thread that serves everybody
            log.exception("events not delivered", events=len(events))

    def _snapshot(self) -> EngineStats:
        scheduler, meter = self._scheduler, self._meter
        return EngineStats(
            num_waiting=scheduler.num_waiting,
            num_running=scheduler.num_running,
            num_waiting_tokens=scheduler.num_uncomputed_tokens,
            free_blocks=self._pool.num_free,
            leased_blocks=scheduler.num_leased_blocks,
            tokens_per_s=meter.tokens_per_s,
            prompt_tokens_per_s=scheduler.pace.prompt_tokens_per_s,
            last_progress_s=self._last_progress_s,
            num_steps=meter.num_steps,
            num_preemptions=scheduler.num_preemptions,
            num_generated_tokens=meter.num_generated_tokens,
            num_computed_prompt_tokens=meter.num_computed_prompt_tokens,
            num_cached_tokens=scheduler.num_cached_tokens,
            num_failed=meter.num_failed,
            num_blocks_out=self._pool.host.num_out,
            num_blocks_in=self._pool.host.num_in,
            num_taken=self._num_taken,
            num_taken_tokens=self._num_taken_tokens,
        )

    def _counted(self) -> Counted:
        held = list(self._scheduler.held())
        return Counted(
            sequences=tuple(HeldSequence(id, kind, None, len(blocks)) for kind, id, blocks in held),
            num_blocks=self._pool.num_blocks,
            used_blocks=self._pool.num_blocks - self._pool.num_free,
            owned_blocks=len({block for _, _, blocks in held for block in blocks}),
            host_blocks=self._pool.host.num_used,
        )

    def check_invariants(self) -> None:
        """Never beside the running thread."""
        self._scheduler.check_invariants()


def _tokens_to_compute(command: Reserve | Admit) -> int:
    """Before forks share what their parent computed, they count for what only they have."""
    if isinstance(command, Reserve):
        return 0
    own = sum(len(fork.tokens) - command.num_shared for fork in command.forks)
    return command.request.num_uncomputed + own


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"

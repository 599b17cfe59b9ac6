"""An engine over the fake model, stepped by hand: what it said, and whether it was right."""

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import numpy as np

from common.clock import ManualClock
from common.config import EngineConfig
from common.engine.events import Admit, Event, Failed, Release, Reserve, Reserved, Starved, Stepped
from common.engine.loop import Engine
from common.engine.request import NOBODY, Chunk, EngineRequest, Progress, StepPlan, sampling_of
from common.kv_cache.memory import PoolMemory
from common.messages import BlockId, BlockRef, FinishReason, Incarnation, Origin, RequestId, Sampling
from common.model.fake import FakeRunner, fake_layout, fake_oracle

VOCAB_SIZE = 32_000


def plain_memory(num_blocks: int, *, num_layers: int = 1, block_size: int = 16) -> PoolMemory:
    """A pool in ordinary memory, full of what earlier owners might have left."""
    layout = fake_layout(num_layers=num_layers, block_size=block_size)
    blocks = np.full((num_blocks, layout.block_bytes), 0xA5, np.uint8)
    return PoolMemory(Incarnation("0" * 32), layout, blocks, np.zeros(num_blocks, np.int64))


class NotingRunner(FakeRunner):
    """Keeps what was copied, from and to."""

    def __init__(self, memory: PoolMemory, **settings: Any) -> None:
        super().__init__(memory, **settings)
        self.copies: list[tuple[BlockId, BlockId]] = []

    def copy_blocks(self, copies: Sequence[tuple[BlockId, BlockId]]) -> None:
        self.copies += copies
        super().copy_blocks(copies)


class Rig:
    """`tokens`, `ready` and `finished` gather by request what the engine's events said."""

    def __init__(
        self,
        num_blocks: int = 64,
        *,
        admit_whole: bool = False,
        block_size: int = 16,
        max_model_len: int = 512,
        num_host_blocks: int = 0,
        before_step: Callable[[StepPlan], None] | None = None,
        **config: object,
    ) -> None:
        self.memory = plain_memory(num_blocks, block_size=block_size)
        self.clock = ManualClock()
        self.plans: list[StepPlan] = []
        self._before_step = before_step
        self.runner = NotingRunner(
            self.memory,
            max_model_len=max_model_len,
            vocab_size=VOCAB_SIZE,
            before_step=self._note_step,
            num_host_blocks=num_host_blocks,
        )
        self.engine = Engine(
            runner=self.runner,
            generations=self.memory.generations,
            config=EngineConfig(**config),  # type: ignore[arg-type]
            deliver=self._deliver,
            clock=self.clock,
            admit_whole=admit_whole,
        )
        self.events: list[Event] = []
        self.progress: dict[RequestId, list[Progress]] = {}
        self.tokens: dict[RequestId, list[int]] = {}
        self.finished: dict[RequestId, FinishReason | None] = {}
        self.ready: dict[RequestId, list[BlockRef]] = {}
        self.reserved: dict[RequestId, Reserved] = {}
        self.failed: dict[RequestId, str] = {}
        self.num_starved = 0
        self.requests: dict[RequestId, tuple[list[int], Sampling]] = {}

    @property
    def copies(self) -> list[tuple[BlockId, BlockId]]:
        return self.runner.copies

    # --- commands ------------------------------------------------------------------------------------------

    def admit(
        self,
        id: str,
        tokens: Sequence[int],
        max_tokens: int = 4,
        *,
        num_prompt_tokens: int | None = None,
        num_computed: int = 0,
        prefill: bool = False,
        seed: int = 0,
        stop: tuple[int, ...] = (),
        origin: Origin = NOBODY,
        deadline_s: float = inf,
        forks: Sequence[Sequence[int]] = (),
        num_shared: int = 0,
    ) -> EngineRequest:
        """`forks` are the tokens of choices 1, 2, ..., under the ids "id/1", "id/2", ..."""
        sampling = Sampling(max_tokens=max_tokens, seed=seed, stop_token_ids=stop)
        request = EngineRequest(
            id=RequestId(id),
            tokens=list(tokens),
            num_prompt_tokens=num_prompt_tokens or len(tokens),
            sampling=sampling,
            num_computed=num_computed,
            stop_after_first=prefill,
            keep_blocks=prefill,
            origin=origin,
            deadline_s=deadline_s,
        )
        self.requests[request.id] = (list(tokens), sampling)
        others = tuple(self._fork(request, choice, more) for choice, more in enumerate(forks, start=1))
        self.engine.post(Admit(request, others, num_shared))
        return request

    def _fork(self, parent: EngineRequest, choice: int, tokens: Sequence[int]) -> EngineRequest:
        id, sampling = RequestId(f"{parent.id}/{choice}"), sampling_of(parent.sampling, choice)
        self.requests[id] = (list(tokens), sampling)
        return EngineRequest(id, list(tokens), parent.num_prompt_tokens, sampling, origin=parent.origin)

    def reserve(
        self, id: str, tokens: Sequence[int], origin: Origin = NOBODY, *, deadline_s: float = inf, num_forks: int = 0
    ) -> None:
        self.engine.post(Reserve(RequestId(id), list(tokens), origin, deadline_s, num_forks))

    def release(self, id: str) -> None:
        self.engine.post(Release(RequestId(id)))

    def pull(self, id: str, tokens: Sequence[int]) -> None:
        """Let the bytes of `tokens` land in the blocks that were reserved, cached ones left alone."""
        lease = self.reserved[RequestId(id)]
        self.write(lease.blocks, tokens, lease.num_cached)

    def write(self, blocks: Sequence[BlockId], tokens: Sequence[int], start: int = 0) -> None:
        """Put the KV of `tokens[start:]` where it belongs, as a transfer would."""
        request = EngineRequest(RequestId("pull"), list(tokens), len(tokens), Sampling(max_tokens=1, seed=0))
        request.blocks = list(blocks)
        if start < len(tokens):
            FakeRunner(self.memory).execute(StepPlan((Chunk(request, start, len(tokens) - start, False),)))

    # --- steps ---------------------------------------------------------------------------------------------

    def step(self) -> bool:
        did = self.engine.step()
        self.engine.check_invariants()
        return did

    def run(self, most_steps: int = 10_000) -> None:
        """Until nothing can run."""
        for _ in range(most_steps):
            if not self.step():
                return
        raise AssertionError(f"still running after {most_steps} steps")

    # --- what must hold ------------------------------------------------------------------------------------

    def expected(self, id: str, num_new: int | None = None) -> list[int]:
        tokens, sampling = self.requests[RequestId(id)]
        return fake_oracle(
            tokens,
            sampling.max_tokens if num_new is None else num_new,
            sampling,
            vocab_size=VOCAB_SIZE,
            max_model_len=self.runner.max_model_len,
        )

    def assert_right(self, *ids: str) -> None:
        for id in ids:
            assert self.tokens.get(RequestId(id), []) == self.expected(id), id

    def assert_empty(self) -> None:
        self.engine.step()
        self.engine.check_invariants()
        stats = self.engine.stats()
        assert stats.free_blocks == self.memory.num_blocks
        assert stats.num_running == stats.num_waiting == stats.num_waiting_tokens == stats.leased_blocks == 0

    def _note_step(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        if self._before_step is not None:
            self._before_step(plan)

    def _deliver(self, events: Sequence[Event]) -> None:
        for event in events:
            self.events.append(event)
            match event:
                case Stepped(progress=progress):
                    for one in progress:
                        self._note(one)
                case Reserved():
                    self.reserved[event.request] = event
                case Failed(request=id, message=message):
                    self.failed[id] = message
                case Starved():
                    self.num_starved += 1

    def _note(self, progress: Progress) -> None:
        id = progress.request
        self.progress.setdefault(id, []).append(progress)
        if progress.token is not None:
            self.tokens.setdefault(id, []).append(progress.token)
        if progress.stopped:
            assert id not in self.finished, "stopped twice"
            self.finished[id] = progress.finish
        if progress.ready:
            assert progress.first_ready == len(self.ready.setdefault(id, [])), "announced out of order"
            self.ready[id].extend(progress.ready)

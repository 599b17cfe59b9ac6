"""Random histories on tiny pools: whatever the interleaving, everybody gets the oracle's tokens and all ends empty."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.engine.policy import Policy
from common.engine.request import EngineRequest
from common.engine.scheduler import Scheduler
from common.kv_cache.block_pool import BlockPool
from common.messages import BlockId, Origin, Priority, RequestId
from common.model.fake import FakeRunner
from tests.unit.common.engine.rig import Rig

LENGTHS = st.sampled_from([1, 3, 4, 5, 7, 8, 9, 12, 16, 20])
ORIGINS = st.builds(Origin, st.sampled_from([b"a", b"b"]), st.sampled_from(Priority))
POLICIES = st.sampled_from(["fcfs", "shortest", "priority", "deadline"])
DEADLINES = st.sampled_from([1.0, 5.0, float("inf")])
HOST_BLOCKS = st.sampled_from([0, 1, 3, 40])
BLOCK_SIZE = 4


def prompt(family: int, num_tokens: int) -> list[int]:
    """Prompts of one family are prefixes of each other."""
    return [family * 1000 + position for position in range(num_tokens)]


class DecodeHistory(RuleBasedStateMachine):
    """Prompts computed here, prompts pulled, hang-ups, at any moment, in a pool for about one of them."""

    @initialize(
        num_blocks=st.integers(5, 12),
        max_running=st.integers(1, 4),
        max_step_tokens=st.sampled_from([3, 8, 64]),
        prefix_cache=st.booleans(),
        policy=POLICIES,
        num_host_blocks=HOST_BLOCKS,
    )
    def build(
        self,
        num_blocks: int,
        max_running: int,
        max_step_tokens: int,
        prefix_cache: bool,
        policy: Policy,
        num_host_blocks: int,
    ) -> None:
        self.rig = Rig(
            num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=40,
            max_running=max_running,
            max_step_tokens=max_step_tokens,
            prefix_cache=prefix_cache,
            policy=policy,
            num_host_blocks=num_host_blocks,
        )
        self.wanted: dict[str, int] = {}  # tokens still to come from this engine, by request
        self.reserving: dict[str, tuple[list[int], int]] = {}  # prompt and max_tokens, until the hand-over
        self.origins: dict[str, Origin] = {}
        self.num_starved = 0
        self.count = 0

    @rule(family=st.integers(0, 2), num_tokens=LENGTHS, max_tokens=LENGTHS, origin=ORIGINS, deadline_s=DEADLINES)
    def arrive(self, family: int, num_tokens: int, max_tokens: int, origin: Origin, deadline_s: float) -> None:
        id, tokens = self._next_id(), prompt(family, num_tokens)
        self.rig.admit(id, tokens, max_tokens, seed=self.count, origin=origin, deadline_s=deadline_s)
        if self.rig.engine.fits_alone(num_tokens + max_tokens):
            self.wanted[id] = max_tokens

    @rule(family=st.integers(0, 2), num_tokens=LENGTHS, max_tokens=LENGTHS, origin=ORIGINS, num_forks=st.integers(1, 3))
    def arrive_for_several_answers(
        self, family: int, num_tokens: int, max_tokens: int, origin: Origin, num_forks: int
    ) -> None:
        """Some of them with a part of theirs, as after a failover."""
        id, tokens = self._next_id(), prompt(family, num_tokens)
        tails = [prompt(7, (choice * num_tokens) % max_tokens) for choice in range(num_forks + 1)]
        self.rig.admit(
            id,
            [*tokens, *tails[0]],
            max_tokens,
            num_prompt_tokens=num_tokens,
            seed=self.count,
            origin=origin,
            forks=[[*tokens, *tail] for tail in tails[1:]],
            num_shared=num_tokens,
        )
        if self.rig.engine.fits_alone(num_tokens + max_tokens):
            self.wanted |= {
                id if choice == 0 else f"{id}/{choice}": max_tokens - len(tail) for choice, tail in enumerate(tails)
            }

    @rule(family=st.integers(0, 2), num_tokens=LENGTHS, max_tokens=LENGTHS, origin=ORIGINS)
    def reserve(self, family: int, num_tokens: int, max_tokens: int, origin: Origin) -> None:
        if self.rig.engine.fits_alone(num_tokens + max_tokens + 1):
            id = self._next_id()
            self.reserving[id] = prompt(family, num_tokens), max_tokens
            self.origins[id] = origin
            self.rig.reserve(id, prompt(family, num_tokens), origin)

    @precondition(lambda self: self.granted)
    @rule(choice=st.data(), landed=st.integers(0, 20))
    def some_blocks_land_and_the_rest_is_computed_here(self, choice: st.DataObject, landed: int) -> None:
        id = choice.draw(st.sampled_from(self.granted))
        tokens, max_tokens = self.reserving.pop(id)
        landed = min(landed, len(tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE
        lease = self.rig.reserved[RequestId(id)]
        self.rig.write(lease.blocks, tokens[:landed], min(landed, lease.num_cached))
        self.rig.admit(id, tokens, max_tokens, num_computed=landed, seed=self.count, origin=self.origins[id])
        self.wanted[id] = max_tokens

    @precondition(lambda self: self.granted)
    @rule(choice=st.data())
    def all_blocks_land(self, choice: st.DataObject) -> None:
        self._hand_over(choice.draw(st.sampled_from(self.granted)))

    @precondition(lambda self: self.wanted or self.reserving)
    @rule(choice=st.data())
    def hang_up(self, choice: st.DataObject) -> None:
        id = choice.draw(st.sampled_from([*self.wanted, *self.reserving]))
        lost = {id: None}
        if RequestId(id) not in self.rig.tokens:  # perhaps nothing is forked yet: all of one call
            lost |= {one: None for one in self.wanted if one.partition("/")[0] == id.partition("/")[0]}
        for one in lost:
            self.wanted.pop(one, None)
            self.reserving.pop(one, None)
            self.rig.release(one)

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self._step()

    @invariant()
    def tokens_so_far_are_right(self) -> None:
        if hasattr(self, "rig"):
            for id in self.wanted:
                tokens = self.rig.tokens.get(RequestId(id), [])
                assert tokens == self.rig.expected(id, len(tokens) or None)[: len(tokens)]

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        for _ in range(200):
            for _ in range(2000):
                if not self._step():
                    break
            if not self.granted:
                break
            self._hand_over(self.granted[0])
        assert not self.reserving, "a reservation starves"
        for id, num_new in self.wanted.items():
            assert self.rig.tokens[RequestId(id)] == self.rig.expected(id, num_new)
        self.rig.assert_empty()

    @property
    def granted(self) -> list[str]:
        return [id for id in self.reserving if RequestId(id) in self.rig.reserved]

    def _next_id(self) -> str:
        self.count += 1
        return str(self.count)

    def _hand_over(self, id: str) -> None:
        tokens, max_tokens = self.reserving.pop(id)
        self.rig.pull(id, tokens)
        self.rig.admit(
            id,
            [*tokens, 777],
            max_tokens + 1,
            num_prompt_tokens=len(tokens),
            num_computed=len(tokens),
            seed=self.count,
            origin=self.origins[id],
        )
        self.wanted[id] = max_tokens

    def _step(self) -> bool:
        did = self.rig.step()
        if self.rig.num_starved > self.num_starved and self.granted:
            # As a node does: the newest lease is given back and asked for again.
            id = self.granted[-1]
            self.rig.release(id)
            del self.rig.reserved[RequestId(id)]
            self.reserving[id] = self.reserving.pop(id)
            self.rig.reserve(id, self.reserving[id][0], self.origins[id])
            did = True
        self.num_starved = self.rig.num_starved
        return did


TestDecodeHistory = DecodeHistory.TestCase
TestDecodeHistory.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


class PrefillHistory(RuleBasedStateMachine):
    """What is announced stays as it is, bytes and generation, until its reader lets go."""

    @initialize(
        num_blocks=st.integers(6, 12),
        max_running=st.integers(1, 4),
        max_step_tokens=st.sampled_from([3, 8, 64]),
        policy=POLICIES,
        num_host_blocks=HOST_BLOCKS,
    )
    def build(
        self, num_blocks: int, max_running: int, max_step_tokens: int, policy: Policy, num_host_blocks: int
    ) -> None:
        self.rig = Rig(
            num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=40,
            admit_whole=True,
            max_running=max_running,
            max_step_tokens=max_step_tokens,
            policy=policy,
            num_host_blocks=num_host_blocks,
        )
        self.open: dict[str, list[int]] = {}
        self.count = 0

    @rule(family=st.integers(0, 2), num_tokens=LENGTHS, origin=ORIGINS)
    def arrive(self, family: int, num_tokens: int, origin: Origin) -> None:
        self.count += 1
        self.open[str(self.count)] = prompt(family, num_tokens)
        self.rig.admit(str(self.count), prompt(family, num_tokens), prefill=True, origin=origin)

    @precondition(lambda self: self.open)
    @rule(choice=st.data())
    def reader_lets_go(self, choice: st.DataObject) -> None:
        self._let_go(choice.draw(st.sampled_from(list(self.open))))

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.rig.step()

    @invariant()
    def announced_blocks_are_whole(self) -> None:
        for id in self.open if hasattr(self, "rig") else ():
            self._check_announced(id)

    def teardown(self) -> None:
        while hasattr(self, "rig") and self.open:
            self.rig.run()
            done = [id for id in self.open if RequestId(id) in self.rig.finished]
            assert done, "a prompt starves"
            for id in done:
                assert self.rig.tokens[RequestId(id)] == self.rig.expected(id, 1)
                assert len(self.rig.ready[RequestId(id)]) == -(-len(self.open[id]) // BLOCK_SIZE)
                self._let_go(id)
        if hasattr(self, "rig"):
            assert self.rig.engine.stats().num_preemptions == 0
            self.rig.assert_empty()

    def _let_go(self, id: str) -> None:
        del self.open[id]
        self.rig.release(id)

    def _check_announced(self, id: str) -> None:
        refs, tokens, memory = self.rig.ready.get(RequestId(id), []), self.open[id], self.rig.memory
        if not refs:
            return
        right = Rig(6, block_size=BLOCK_SIZE)
        right.write([BlockId(block) for block in range(6)], tokens)
        width = memory.layout.block_bytes // 2 // BLOCK_SIZE  # K bytes of a token; the tail of a block is anything
        for index, ref in enumerate(refs):
            assert memory.generations[ref.block] == ref.generation
            num_bytes = width * min(BLOCK_SIZE, len(tokens) - index * BLOCK_SIZE)
            assert memory.blocks[ref.block, :num_bytes].tolist() == right.memory.blocks[index, :num_bytes].tolist()


TestPrefillHistory = PrefillHistory.TestCase
TestPrefillHistory.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)


# --- planted faults: the oracle must see them ------------------------------------------------------------------


def shared_prompt_under_pressure() -> Rig:
    """Two readers of one cached prompt, then a stranger that needs most of the pool."""
    rig = Rig(10, max_step_tokens=64)
    rig.admit("first", prompt(0, 40), 1)
    while rig.engine.step():
        pass
    rig.admit("second", prompt(0, 40), 20)
    rig.admit("stranger", prompt(1, 100), 20)
    while rig.engine.step():
        pass
    return rig


def wrong(rig: Rig) -> list[str]:
    return [id for id in rig.requests if rig.tokens.get(id, []) != rig.expected(id)]


def test_without_a_fault_this_history_is_right() -> None:
    rig = shared_prompt_under_pressure()
    assert not wrong(rig)
    assert rig.engine.stats().num_cached_tokens >= 32


def test_a_block_shared_without_a_reference_gives_wrong_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    def share_without_counting(pool: BlockPool, block: BlockId) -> None:
        pass

    def free_what_is_counted(pool: BlockPool, blocks: list[BlockId]) -> None:
        for block in reversed(blocks):
            if pool.references(block) > 0:
                free(pool, [block])

    free = BlockPool.free
    monkeypatch.setattr(BlockPool, "share", share_without_counting)
    monkeypatch.setattr(BlockPool, "free", free_what_is_counted)
    assert "second" in wrong(shared_prompt_under_pressure())


def test_blocks_named_one_too_many_give_wrong_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a hash were offered before the block's bytes had landed."""

    def name_at_admission(scheduler: Scheduler, request: EngineRequest) -> bool:
        admitted = admit(scheduler, request)
        for block, content in zip(request.blocks, request.hashes, strict=False):
            scheduler._pool.name(block, content)
        return admitted

    admit = Scheduler._admit
    monkeypatch.setattr(Scheduler, "_admit", name_at_admission)
    rig = Rig(20, max_step_tokens=48)
    rig.admit("first", prompt(0, 100), 5)
    rig.engine.step()
    rig.release("first")
    rig.admit("second", prompt(0, 100), 5)
    while rig.engine.step():
        pass
    assert "second" in wrong(rig)


def test_a_fork_that_writes_to_a_block_it_did_not_copy_gives_wrong_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    def copy_nothing(runner: FakeRunner, copies: object) -> None:
        pass

    def run() -> list[str]:
        rig = Rig()
        rig.admit("a", prompt(0, 20), 5, forks=[prompt(0, 20)], num_shared=20)
        while rig.engine.step():
            pass
        return wrong(rig)

    assert not run()
    monkeypatch.setattr(FakeRunner, "copy_blocks", copy_nothing)
    assert run() == ["a/1"]


def test_a_preempted_request_that_kept_its_computed_count_gives_wrong_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    def preempt_and_forget_nothing(scheduler: Scheduler, victim: EngineRequest) -> None:
        computed = victim.num_computed
        preempt(scheduler, victim)
        kept[victim.id] = computed

    def admit_with_the_old_count(scheduler: Scheduler, request: EngineRequest) -> bool:
        admitted = admit(scheduler, request)
        if admitted and request.id in kept:
            request.num_computed = kept.pop(request.id)
        return admitted

    preempt, admit = Scheduler._preempt, Scheduler._admit
    kept: dict[RequestId, int] = {}
    monkeypatch.setattr(Scheduler, "_preempt", preempt_and_forget_nothing)
    monkeypatch.setattr(Scheduler, "_admit", admit_with_the_old_count)
    rig = Rig(5, prefix_cache=False)
    rig.admit("old", prompt(0, 30), 40)
    rig.admit("new", prompt(1, 30), 20)
    while rig.engine.step():
        pass
    assert rig.engine.stats().num_preemptions == 1
    assert wrong(rig) == ["new"]

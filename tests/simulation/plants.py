"""Bugs put in on purpose, each a small patch of production code: the simulation must find every one of them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import msgspec

import kv_transfer.memory
from common.engine.events import Release
from common.engine.forks import Forks
from common.engine.leases import Leases
from common.engine.request import EngineRequest, Progress
from common.engine.scheduler import Scheduler
from common.kv_cache.block_pool import BlockPool
from common.kv_cache.memory import PoolMemory
from common.messages import BlockId, BlockRef, Branch, Generate, ItemFrame
from common.rpc.callee import CalleeLink
from common.rpc.caller import CallerLink, DeliverItem
from coordinator.gateway.session import Session
from decode_node import role as decode_role
from decode_node.choices import Choices
from decode_node.readers import Readers
from kv_transfer.blocks import check_generations
from prefill_node import role as prefill_role

Plant = Callable[[], AbstractContextManager[Any]]
PLANTS: dict[str, Plant] = {}


def plant(bug: Callable[[], Iterator[None]]) -> Callable[[], Iterator[None]]:
    PLANTS[bug.__name__] = contextmanager(bug)
    return bug


def _around(owner: Any, name: str, changed: Callable[..., Any]) -> AbstractContextManager[Any]:
    """`changed(original, ...)` in place of a method."""
    original = getattr(owner, name)

    def method(*args: Any, **more: Any) -> Any:
        return changed(original, *args, **more)

    return patch.object(owner, name, method)


# --- ownership of blocks -------------------------------------------------------------------------------------


@plant
def blocks_are_given_back_while_reads_still_write_to_them() -> Iterator[None]:
    def let_go(_: Any, self: Any, towards: Any, now_s: float) -> Any:
        with_prefill = self.state in decode_role._WITH_CALL
        self._after_settling, self._pulling = towards, 0
        commands = [decode_role.ClosePrefill(done=False), decode_role.StopPulls()] if with_prefill else []
        return commands + self._leave_settling(now_s)

    def pull_ended(original: Any, self: Any, event: Any, now_s: float) -> Any:
        return original(self, event, now_s) if self._pulling else []

    with (
        _around(decode_role.GenerateCall, "_let_go", let_go),
        _around(decode_role.GenerateCall, "_pull_ended", pull_ended),
    ):
        yield


@plant
def a_cancelled_call_releases_nothing() -> Iterator[None]:
    def leave(original: Any, self: Any, now_s: float) -> Any:
        commands = original(self, now_s)
        ended = self.state is decode_role.State.ENDED
        return [one for one in commands if not (ended and isinstance(one, Release))]

    with _around(decode_role.GenerateCall, "_leave_settling", leave):
        yield


def _freed_early() -> AbstractContextManager[Any]:
    def progressed(original: Any, self: Any, event: Progress, now_s: float) -> Any:
        commands = original(self, event, now_s)
        return [*commands, Release(self._id)] if event.stopped else commands

    return _around(prefill_role.PrefillCall, "_progressed", progressed)


@plant
def prefill_frees_its_blocks_before_they_are_pulled() -> Iterator[None]:
    with _freed_early():
        yield


@plant
def prefill_keeps_the_blocks_of_a_caller_that_left() -> Iterator[None]:
    def handle(original: Any, self: Any, event: Any, *, now_s: float) -> Any:
        commands = original(self, event, now_s=now_s)
        if isinstance(event, prefill_role.Cancelled):
            return [one for one in commands if not isinstance(one, Release)]
        return commands

    with _around(prefill_role.PrefillCall, "handle", handle):
        yield


@plant
def blocks_are_offered_to_others_before_their_bytes_have_landed() -> Iterator[None]:
    def hold(original: Any, self: Leases, request: Any, lease: Any) -> None:
        original(self, request, lease)
        for block, content in zip(lease.blocks, lease.hashes, strict=False):
            self._pool.name(block, content)

    with _around(Leases, "hold", hold):
        yield


@plant
def a_reader_that_failed_is_used_again() -> Iterator[None]:
    with patch.object(Readers, "_drop", lambda self, owner, opening: None):
        yield


# --- generations ---------------------------------------------------------------------------------------------


@plant
def blocks_freed_too_early_are_read_without_a_check() -> Iterator[None]:
    with (
        _freed_early(),
        patch.object(kv_transfer.memory, "check_readable", lambda *_: None),
        patch.object(kv_transfer.memory, "check_generations", lambda *_: None),
    ):
        yield


@plant
def blocks_freed_too_early_keep_their_generation_when_they_are_reused() -> Iterator[None]:
    def hand_out(original: Any, self: BlockPool) -> BlockId:
        before = list(self._generations)  # type: ignore[call-overload]
        block: BlockId = original(self)
        self._generations[block] = before[block]
        return block

    def without_secret(pool: PoolMemory, refs: Sequence[BlockRef], secret: bytes) -> None:
        check_generations(refs, pool.generations)

    with (
        _freed_early(),
        _around(BlockPool, "_hand_out", hand_out),
        patch.object(kv_transfer.memory, "check_readable", without_secret),
    ):
        yield


# --- attempts and failover -----------------------------------------------------------------------------------


def _opening(change: Callable[[Session, Generate], Generate]) -> AbstractContextManager[Any]:
    return _around(
        Session, "_generate", lambda original, self, *args, **more: change(self, original(self, *args, **more))
    )


@plant
def failover_forgets_the_tokens_that_were_delivered() -> Iterator[None]:
    """And no node says where its tokens start, which would give it away."""

    def pass_on(original: Any, *args: Any) -> Any:
        emit, *others = original(*args)
        return [decode_role.Emit(msgspec.structs.replace(emit.item, start=None)), *others]

    def forgetful(session: Session, body: Generate) -> Generate:
        branches = tuple(Branch(branch.choice) for branch in body.branches)
        return msgspec.structs.replace(body, tokens=list(session.prompt), branches=branches)

    with _opening(forgetful), _around(decode_role.GenerateCall, "_pass_on", pass_on):
        yield


@plant
def choices_are_drawn_alike() -> Iterator[None]:
    def requests(original: Any, self: Choices) -> Any:
        first, *forks = original(self)
        for fork in forks:
            fork.sampling = first.sampling
        return [first, *forks]

    with _around(Choices, "requests", requests):
        yield


@plant
def a_fork_writes_to_the_block_that_it_shares() -> Iterator[None]:
    def copy(original: Any, self: Forks, fork: EngineRequest, block: Any) -> None:
        original(self, fork, block)
        self._pool.copies.pop()

    with _around(Forks, "copy", copy):
        yield


@plant
def a_choice_that_has_finished_is_asked_for_again() -> Iterator[None]:
    def finish(original: Any, self: Session, at_s: float, choice: Any, reason: Any, why: str) -> Any:
        commands = original(self, at_s, choice, reason, why)
        if self.choices.unfinished:
            choice.finish = None
        return commands

    with _around(Session, "_finish", finish):
        yield


@plant
def another_attempt_draws_with_another_seed() -> Iterator[None]:
    def reseeded(session: Session, body: Generate) -> Generate:
        seed = session.sampling.seed + session.attempt - 1
        return msgspec.structs.replace(body, sampling=msgspec.structs.replace(body.sampling, seed=seed))

    with _opening(reseeded):
        yield


@plant
def a_failed_node_is_asked_again_at_once() -> Iterator[None]:
    from coordinator.core import policy

    def usable(original: Any, node: Any, route: Any) -> bool:
        return bool(original(node, msgspec.structs.replace(route, exclude=())))

    with _around(policy, "_usable", usable):
        yield


@plant
def the_first_token_is_drawn_again_when_its_blocks_are_lost() -> Iterator[None]:
    def lost(original: Any, self: Any, error: Any, now_s: float) -> Any:
        if self.state is decode_role.State.PULLING:
            for choice in self._choices.open:
                choice.tokens.pop()
        return original(self, error, now_s)

    with _around(decode_role.GenerateCall, "_lost", lost):
        yield


@plant
def a_deadline_is_not_kept() -> Iterator[None]:
    def late(original: Any, self: Session) -> None:
        self.deadline_s += 30.0
        original(self)

    with _around(Session, "__post_init__", late):
        yield


# --- numbers on the wire -------------------------------------------------------------------------------------


def _items(takes: Callable[[int, int], bool]) -> AbstractContextManager[Any]:
    """The caller takes an item whose number is not the expected one, if `takes(number, expected)`."""

    def came(original: Any, self: CallerLink, event: Any, out: list[Any]) -> None:
        for frame in event.frames:
            call = self.calls.get(frame.call) if isinstance(frame, ItemFrame) else None
            if call is not None and isinstance(frame, ItemFrame) and takes(frame.seq, call.num_received):
                call.num_received = frame.seq + 1
                out.append(DeliverItem(frame.call, frame.body))
            else:
                original(self, msgspec.structs.replace(event, frames=[frame]), out)

    return _around(CallerLink, "_came", came)


@plant
def a_hole_in_the_items_is_not_noticed() -> Iterator[None]:
    with _items(lambda number, expected: number > expected):
        yield


@plant
def an_item_that_comes_twice_is_delivered_twice() -> Iterator[None]:
    with _items(lambda number, expected: number < expected):
        yield


@plant
def an_open_that_comes_twice_starts_two_calls() -> Iterator[None]:
    def opened(original: Any, self: CalleeLink, frame: Any, now_s: float, out: list[Any]) -> None:
        self.highest_id = min(self.highest_id, frame.call - 1)
        original(self, frame, now_s, out)

    with _around(CalleeLink, "_open", opened):
        yield


@plant
def a_call_that_its_caller_left_goes_on() -> Iterator[None]:
    with patch.object(CalleeLink, "_left", lambda self, *_: None):
        yield


@plant
def handlers_of_a_lost_link_go_on() -> Iterator[None]:
    def lose(original: Any, self: CalleeLink, error: Any, now_s: float, out: list[Any]) -> None:
        calls, self.calls = self.calls, {}
        original(self, error, now_s, out)
        self.calls = calls

    with _around(CalleeLink, "_lose", lose):
        yield


@plant
def a_preempted_request_believes_its_blocks_are_computed() -> Iterator[None]:
    def admit(original: Any, self: Scheduler, request: EngineRequest) -> bool:
        admitted = bool(original(self, request))
        if admitted and request.num_preemptions:
            skipped = min(request.num_uncomputed - 1, 4)
            request.num_computed += skipped
            self.num_uncomputed_tokens -= skipped
        return admitted

    with _around(Scheduler, "_admit", admit):
        yield

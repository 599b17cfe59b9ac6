"""The decode node's shell: one handler, thin around `role.GenerateCall`.

The engine's events reach a call as plain function calls on the loop, so a token costs no task switch.
"""

import asyncio
from collections.abc import Coroutine
from contextlib import ExitStack
from functools import partial
from typing import Any, assert_never

from common import telemetry
from common.config import NodeConfig
from common.engine.events import Admit, Announce, Announced, Failed, Release, Reserve, Reserved
from common.engine.request import Progress
from common.errors import BatonError, IncompatibleError, InternalError, RequestError, TransferError, UnavailableError
from common.kv_cache.grants import new_secret
from common.messages import (
    BlockRef,
    BlocksReady,
    Branch,
    Generate,
    HandedOver,
    Handover,
    NodeAddress,
    PrefillDone,
    Pulled,
    RequestId,
    Role,
    Stop,
    StopChoice,
)
from common.model.runner import load_runner
from common.node import NodeHost, keep_for_good, new_incarnation
from common.rpc.base import IncomingCall, Network, OutgoingCall
from common.tasks import ended
from decode_node.readers import Readers
from decode_node.role import GenerateCall
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
    PrefillEnded,
    Pull,
    PullEnded,
    Reclaimed,
    StopPulls,
    StopSource,
)
from kv_transfer.base import BlockReader, TransferSettings
from kv_transfer.choose import connect, serve_all
from kv_transfer.layout import mismatch

log = telemetry.logger(__name__)


def serve(config: NodeConfig, network: Network) -> Coroutine[Any, Any, None]:
    """Load the model, then serve until drained or cancelled. Loading comes before there is a loop: it takes seconds."""
    runner, memory = load_runner(config.model, config.engine, new_incarnation())
    keep_for_good()
    settings = TransferSettings.of(config.links)
    serve_blocks = partial(serve_all, settings=settings)
    host = NodeHost(config, Role.DECODE, runner=runner, memory=memory, network=network, serve_blocks=serve_blocks)

    async def open_reader(owner: NodeAddress) -> tuple[str, BlockReader]:
        return await connect(
            owner.offers, owner=owner.incarnation, pool=memory, wanted=config.transport, settings=settings
        )

    async def until_drained() -> None:
        readers = Readers(open_reader)
        try:
            async with host:
                await DecodeNode(host, readers).join()
                await host.until_drained()
        finally:
            await readers.close()

    return until_drained()


class DecodeNode:
    """Answers Generate calls on a started host."""

    def __init__(self, host: NodeHost, readers: Readers) -> None:
        self._host = host
        self._readers = readers
        self._calls: dict[RequestId, _GenerateShell] = {}  # by engine id, oldest first
        host.on_starved = self._reclaim
        host.reading = readers.connections
        host.client.on_lost = readers.lose

    async def join(self) -> None:
        await self._host.join({Generate: self._generate, Handover: self._hand_over})

    async def _generate(self, call: IncomingCall) -> None:
        body = call.body
        assert isinstance(body, Generate)
        for branch in body.branches or (Branch(0),):
            self._host.limits.check(
                model_digest=body.model_digest,
                tokens=[*body.tokens, *branch.tokens] if branch.tokens else body.tokens,
                num_prompt_tokens=body.num_prompt_tokens,
                sampling=body.sampling,
            )
        if len({branch.choice for branch in body.branches}) < len(body.branches):
            raise RequestError("a choice is asked for twice")
        self._host.check_queue(body.origin.priority)
        shell = _GenerateShell(self._host, self._readers, call, body)
        with self._host.draining.admitted(shell):
            self._calls[shell.id] = shell
            try:
                await shell.run()
            finally:
                del self._calls[shell.id]

    async def _hand_over(self, call: IncomingCall) -> None:
        """A running request goes on at the caller's node, which pulls what is finished of it first."""
        body = call.body
        assert isinstance(body, Handover)
        if reason := mismatch(self._host.memory.layout, body.layout):
            raise IncompatibleError(f"{self._host.name} cannot hand its blocks over: {reason}")
        shell = self._running(body.request, body.attempt)
        refs, secret, grants = await shell.full_blocks(), new_secret(), self._host.memory.grants
        grants.grant(secret, refs, request=body.request)
        try:
            call.send(BlocksReady(self._host.incarnation, 0, refs, secret))
            async for sent in call:
                if isinstance(sent, Stop):
                    call.send(shell.hand_over())
                    return
        finally:
            grants.revoke(secret)

    def _running(self, request: RequestId, attempt: int) -> "_GenerateShell":
        for shell in self._calls.values():
            if shell.is_running(request, attempt):
                return shell
        raise UnavailableError(f"{self._host.name} does not run attempt {attempt} of this request")

    def _reclaim(self) -> None:
        """Running requests cannot grow: the newest reservation gives its blocks back."""
        for shell in reversed(self._calls.values()):
            if shell.holds_reservation:
                shell.feed(Reclaimed())
                return


class _GenerateShell:
    """Carries out what one call's role commands."""

    def __init__(self, host: NodeHost, readers: Readers, call: IncomingCall, body: Generate) -> None:
        self.id = host.engine_id()
        self._host = host
        self._readers = readers
        self._call = call
        self._role = GenerateCall(
            body,
            id=self.id,
            layout=host.memory.layout,
            now_s=host.clock.now_s(),
            deadline_s=host.deadline_s(call),
        )
        self._owner: NodeAddress | None = body.source or body.prefill
        self._request = body.request
        self._attempt = body.attempt
        self._receiver: asyncio.Task[None] | None = None
        self._announced: asyncio.Future[tuple[BlockRef, ...]] | None = None
        self._prefill: OutgoingCall | None = None
        self._asking: asyncio.Task[None] | None = None  # None as soon as the role has closed it
        self._asks: set[asyncio.Task[None]] = set()
        self._pulls: set[asyncio.Task[None]] = set()
        self._ended: asyncio.Future[BatonError | None] = asyncio.get_running_loop().create_future()

    @property
    def holds_reservation(self) -> bool:
        return self._role.holds_reservation

    async def run(self) -> None:
        with ExitStack() as listening:
            for id in self._role.engine_ids:
                listening.enter_context(self._host.port.listen(id, self._on_engine, owner=self._request))
            try:
                self._obey(self._role.begin(now_s=self._host.clock.now_s()))
                if len(self._role.engine_ids) > 1:  # nobody says anything into the call of a single choice
                    self._receiver = asyncio.create_task(self._receive())
                if error := await self._ended:
                    raise error
            finally:
                # Reads settle before their blocks are given back, whatever ended the call.
                self.feed(Cancelled())
                self._announce(())
                if self._receiver is not None:
                    await ended(self._receiver)
                while tasks := self._asks | self._pulls:
                    await asyncio.wait(tasks)

    # --- being drained -----------------------------------------------------------------------------------------

    def leave(self) -> None:
        self.feed(LeaveAsked())

    def evict(self) -> None:
        self.feed(Evicted())

    def is_running(self, request: RequestId, attempt: int) -> bool:
        return (self._request, self._attempt) == (request, attempt) and self._role.is_running

    async def full_blocks(self) -> tuple[BlockRef, ...]:
        """The blocks that are finished by now; none if the request ends meanwhile."""
        if self._announced is None or self._announced.done():
            self._announced = asyncio.get_running_loop().create_future()
            self._host.engine.post(Announce(self._role.running_id))
        return await asyncio.shield(self._announced)

    def hand_over(self) -> HandedOver:
        """End the call as moved; returns the tokens that it had by then. UnavailableError if it has ended already."""
        if not self._role.is_running:
            raise UnavailableError("the request has ended here")
        handed_over = self._role.handed_over()
        self.feed(Evicted())
        return handed_over

    async def _receive(self) -> None:
        async for sent in self._call:
            if isinstance(sent, StopChoice):
                self.feed(sent)

    def _announce(self, refs: tuple[BlockRef, ...]) -> None:
        if self._announced is not None and not self._announced.done():
            self._announced.set_result(refs)

    def _on_engine(self, event: Reserved | Progress | Failed | Announced) -> None:
        if isinstance(event, Announced):
            self._announce(event.refs)
        else:
            self.feed(event)

    def feed(self, event: Event) -> None:
        self._obey(self._role.handle(event, now_s=self._host.clock.now_s()))

    def _obey(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Reserve() | Admit() | Release():
                    self._host.engine.post(command)
                case AskPrefill() | AskHandover():
                    self._prefill = None
                    self._asking = self._spawn(self._ask(command), self._asks)
                    self._asking.add_done_callback(self._prefill_ended)
                case StopSource():
                    assert self._prefill is not None
                    self._prefill.send(Stop())
                case Pull():
                    self._pull(command)
                case StopPulls():
                    for pull in self._pulls:
                        pull.cancel()
                case ClosePrefill(done=done):
                    self._close_prefill(done=done)
                case Emit(item=item):
                    self._call.send(item)
                case EndCall(error=error):
                    if not self._ended.done():
                        self._ended.set_result(error.exception() if error else None)
                case _:
                    assert_never(command)

    # --- the prefill or handover call ------------------------------------------------------------------------

    async def _ask(self, command: AskPrefill | AskHandover) -> None:
        address = command.address
        async with self._host.client.open(
            address.address, command.body, incarnation=address.incarnation, timeout_s=self._call.remaining_s
        ) as call:
            self._prefill = call
            async for item in call:
                assert isinstance(item, BlocksReady | PrefillDone | HandedOver)
                self._check(item)
                self.feed(item)

    def _check(self, item: BlocksReady | PrefillDone | HandedOver) -> None:
        """What a model of ours could not have drawn must reach no engine: on a GPU it would end all requests."""
        match item:
            case PrefillDone():
                drawn = [item.token, *(one.token for one in item.others)]
            case HandedOver():
                drawn = [*item.tokens, *(token for branch in item.branches for token in branch.tokens)]
            case BlocksReady():
                return
        if not all(0 <= token < self._host.limits.vocab_size for token in drawn):
            raise IncompatibleError("the other node drew a token that this model has not")

    def _prefill_ended(self, task: asyncio.Task[None]) -> None:
        error = _error_of(task)  # looked at in any case, lest the loop complains about an error nobody saw
        if task is self._asking:  # else closed by us: the role knows
            self._asking = None
            log.info("prefill ended early", request=self.id, error=error)
            self.feed(PrefillEnded(error))

    def _close_prefill(self, *, done: bool) -> None:
        asking, self._asking = self._asking, None
        if asking is None:
            return
        if done and self._prefill is not None:
            self._prefill.send(Pulled())  # the node ends the call; the task ends with it
        else:
            asking.cancel()

    # --- reads -------------------------------------------------------------------------------------------------

    def _pull(self, command: Pull) -> None:
        assert self._owner is not None
        task = self._spawn(
            self._readers.read(self._owner, command.refs, command.into, secret=command.secret), self._pulls
        )

        def ended(task: asyncio.Task[None]) -> None:
            self.feed(PullEnded(command.first, len(command.refs), _error_of(task)))

        task.add_done_callback(ended)

    def _spawn(self, work: Coroutine[Any, Any, None], kind: set[asyncio.Task[None]]) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        kind.add(task)
        task.add_done_callback(kind.discard)
        return task


def _error_of(task: asyncio.Task[None]) -> BatonError | None:
    """How a task ended, in our words. Anything else than a BatonError is a bug: logged here, fatal to no other call."""
    if task.cancelled():
        return TransferError("stopped")
    error = task.exception()
    if error is None or isinstance(error, BatonError):
        return error
    log.error("a call's task failed", error=repr(error))
    return InternalError(f"{type(error).__name__}: {error}")

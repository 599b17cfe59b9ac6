"""The decode node's shell: one handler, thin around `role.GenerateCall`.

The engine's events reach a call as plain function calls on the loop, so a token costs no task switch.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, assert_never

from common import telemetry
from common.config import NodeConfig
from common.engine.events import Admit, Release, Reserve
from common.errors import BatonError, InternalError, TransferError
from common.messages import BlocksReady, Generate, NodeAddress, PrefillDone, Pulled, RequestId, Role
from common.model.runner import load_runner
from common.node import NodeHost, keep_for_good, new_incarnation
from common.rpc.base import IncomingCall, Network, OutgoingCall
from decode_node.readers import Readers
from decode_node.role import (
    AskPrefill,
    Cancelled,
    ClosePrefill,
    Command,
    Emit,
    EndCall,
    Event,
    GenerateCall,
    PrefillEnded,
    Pull,
    PullEnded,
    Reclaimed,
    StopPulls,
)
from kv_transfer.base import BlockReader
from kv_transfer.choose import connect, serve_all

log = telemetry.logger(__name__)


def serve(config: NodeConfig, network: Network) -> Coroutine[Any, Any, None]:
    """Load the model, then serve until cancelled. Loading happens before there is a loop: it takes seconds."""
    runner, memory = load_runner(config.model, config.engine, new_incarnation())
    keep_for_good()
    host = NodeHost(config, Role.DECODE, runner=runner, memory=memory, network=network, serve_blocks=serve_all)

    async def open_reader(owner: NodeAddress) -> tuple[str, BlockReader]:
        return await connect(owner.offers, owner=owner.incarnation, pool=memory, wanted=config.transport)

    async def until_cancelled() -> None:
        readers = Readers(open_reader)
        try:
            async with host:
                await DecodeNode(host, readers).join()
                await asyncio.Event().wait()
        finally:
            await readers.close()

    return until_cancelled()


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
        await self._host.join({Generate: self._generate})

    async def _generate(self, call: IncomingCall) -> None:
        body = call.body
        assert isinstance(body, Generate)
        self._host.limits.check(
            model_digest=body.model_digest,
            tokens=body.tokens,
            num_prompt_tokens=body.num_prompt_tokens,
            sampling=body.sampling,
        )
        self._host.check_queue(body.origin.priority)
        shell = _GenerateShell(self._host, self._readers, call, body)
        self._calls[shell.id] = shell
        try:
            await shell.run()
        finally:
            del self._calls[shell.id]

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
        self._role = GenerateCall(body, id=self.id, layout=host.memory.layout, now_s=host.clock.now_s())
        self._owner: NodeAddress | None = body.prefill
        self._request = body.request
        self._prefill: OutgoingCall | None = None
        self._asking: asyncio.Task[None] | None = None  # None as soon as the role has closed it
        self._asks: set[asyncio.Task[None]] = set()
        self._pulls: set[asyncio.Task[None]] = set()
        self._ended: asyncio.Future[BatonError | None] = asyncio.get_running_loop().create_future()

    @property
    def holds_reservation(self) -> bool:
        return self._role.holds_reservation

    async def run(self) -> None:
        with self._host.port.listen(self.id, self.feed, owner=self._request):
            try:
                self._obey(self._role.begin(now_s=self._host.clock.now_s()))
                if error := await self._ended:
                    raise error
            finally:
                # Reads settle before their blocks are given back, whatever ended the call.
                self.feed(Cancelled())
                while tasks := self._asks | self._pulls:
                    await asyncio.wait(tasks)

    def feed(self, event: Event) -> None:
        self._obey(self._role.handle(event, now_s=self._host.clock.now_s()))

    def _obey(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Reserve() | Admit() | Release():
                    self._host.engine.post(command)
                case AskPrefill():
                    self._prefill = None
                    self._asking = self._spawn(self._ask_prefill(command), self._asks)
                    self._asking.add_done_callback(self._prefill_ended)
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

    # --- the prefill call ------------------------------------------------------------------------------------

    async def _ask_prefill(self, command: AskPrefill) -> None:
        address = command.address
        async with self._host.client.open(
            address.address, command.body, incarnation=address.incarnation, timeout_s=self._call.remaining_s
        ) as call:
            self._prefill = call
            async for item in call:
                assert isinstance(item, BlocksReady | PrefillDone)
                self.feed(item)

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

"""The prefill node's shell: one handler, thin around `role.PrefillCall`."""

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any, assert_never

from common.config import NodeConfig
from common.engine.events import Admit, Announced, Failed, PullTook, Release, Reserved
from common.engine.request import Progress
from common.errors import BatonError, IncompatibleError
from common.kv_cache.grants import new_secret
from common.messages import BlocksReady, Prefill, Pulled, Role
from common.model.runner import load_runner
from common.node import NodeHost, keep_for_good, new_incarnation
from common.rpc.base import IncomingCall, Network
from common.tasks import ended
from kv_transfer.base import TransferSettings
from kv_transfer.choose import serve_all
from kv_transfer.layout import mismatch
from prefill_node.role import Cancelled, Command, Emit, EndCall, Event, Evicted, PrefillCall


def serve(config: NodeConfig, network: Network) -> Coroutine[Any, Any, None]:
    """Load the model, then serve until drained or cancelled. Loading comes before there is a loop: it takes seconds."""
    runner, memory = load_runner(config.model, config.engine, new_incarnation())
    keep_for_good()
    serve_blocks = partial(serve_all, settings=TransferSettings.of(config.links))
    host = NodeHost(config, Role.PREFILL, runner=runner, memory=memory, network=network, serve_blocks=serve_blocks)

    async def until_drained() -> None:
        async with host:
            await PrefillNode(host).join()
            await host.until_drained()

    return until_drained()


class PrefillNode:
    """Answers Prefill calls on a started host."""

    def __init__(self, host: NodeHost) -> None:
        self._host = host

    async def join(self) -> None:
        await self._host.join({Prefill: self._prefill})

    async def _prefill(self, call: IncomingCall) -> None:
        body = call.body
        assert isinstance(body, Prefill)
        host = self._host
        if reason := mismatch(host.memory.layout, body.layout):
            raise IncompatibleError(f"{host.name} cannot hand its blocks over: {reason}")
        host.limits.check(
            model_digest=body.model_digest,
            tokens=body.tokens,
            num_prompt_tokens=body.num_prompt_tokens,
            sampling=body.sampling,
            stops_after_first=True,
        )
        host.check_queue(body.origin.priority)
        shell = _PrefillShell(host, call, body)
        with host.draining.admitted(shell):
            await shell.run()


class _PrefillShell:
    """Carries out what one call's role commands."""

    def __init__(self, host: NodeHost, call: IncomingCall, body: Prefill) -> None:
        self._host = host
        self._call = call
        self._id = host.engine_id()
        self._request = body.request
        self._secret = new_secret()
        self._role = PrefillCall(
            body,
            id=self._id,
            incarnation=host.incarnation,
            secret=self._secret,
            now_s=host.clock.now_s(),
            deadline_s=host.deadline_s(call),
        )
        self._ended: asyncio.Future[BatonError | None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        with self._host.port.listen(self._id, self._on_engine, owner=self._request):
            receiver = asyncio.create_task(self._receive())
            try:
                self._obey(self._role.begin())
                if error := await self._ended:
                    raise error
            finally:
                self._feed(Cancelled())
                await ended(receiver)

    def leave(self) -> None:
        """What runs is finished: its reader takes the blocks, or leaves them at the drain's timeout."""

    def evict(self) -> None:
        self._feed(Evicted())

    def _on_engine(self, event: Reserved | Progress | Failed | Announced) -> None:
        assert isinstance(event, Progress | Failed), "a prefill call reserves nothing and runs nothing to take over"
        self._feed(event)

    async def _receive(self) -> None:
        async for sent in self._call:
            if isinstance(sent, Pulled):
                self._feed(sent)

    def _feed(self, event: Event) -> None:
        self._obey(self._role.handle(event, now_s=self._host.clock.now_s()))

    def _obey(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Admit() | PullTook():
                    self._host.engine.post(command)
                case Release():
                    self._host.memory.grants.revoke(self._secret)
                    self._host.engine.post(command)
                case Emit(item=item):
                    if isinstance(item, BlocksReady):
                        self._host.memory.grants.grant(item.secret, item.refs, request=self._request)
                    self._call.send(item)
                case EndCall(error=error):
                    if not self._ended.done():
                        self._ended.set_result(error.exception() if error else None)
                case _:
                    assert_never(command)

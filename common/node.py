"""What both kinds of node share: an engine, its pool served to readers, calls, and a place in the cluster.

A node adds its role: the handlers of the calls that it answers. Order matters at both ends: nothing is
announced before it works, and nothing is torn down that a running call still uses.
"""

import asyncio
import gc
import itertools
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from importlib.metadata import PackageNotFoundError, version
from math import inf
from typing import Protocol, Self

from msgspec.structs import replace

from common import telemetry
from common.clock import Clock, SystemClock, new_id
from common.config import NodeConfig
from common.draining import Draining
from common.engine.events import Count, Probe
from common.engine.limits import Limits, QueueBounds
from common.engine.loop import Engine
from common.engine.port import EnginePort
from common.kv_cache.cache_news import OfferedNames
from common.kv_cache.memory import PoolMemory
from common.messages import (
    Audit,
    Drain,
    HeldConnection,
    Holdings,
    Incarnation,
    NodeCard,
    NodeId,
    NodeLoad,
    Offer,
    Priority,
    RequestBody,
    RequestId,
    Role,
)
from common.model.base import Runner
from common.rpc.base import Client, Handler, IncomingCall, Network, Server
from common.rpc.registration import stay_registered
from common.tasks import ended

log = telemetry.logger(__name__)

_LAST_WORDS_S = 0.2


class ServedBlocks(Protocol):
    """`kv_transfer.base.BlockServer` once it has started."""

    def connections(self) -> list[HeldConnection]: ...

    async def close(self) -> None: ...


class ServeBlocks(Protocol):
    """Starts the block servers of a pool for the wanted transport (`kv_transfer.choose.serve_all`)."""

    def __call__(
        self, pool: PoolMemory, wanted: str, *, listen_host: str
    ) -> Awaitable[Sequence[tuple[Offer, ServedBlocks]]]: ...


class NodeHost:
    """Owns everything a node runs. `async with` starts it, without a role; `join` opens it to calls."""

    def __init__(
        self,
        config: NodeConfig,
        role: Role,
        *,
        runner: Runner,
        memory: PoolMemory,
        network: Network,
        serve_blocks: ServeBlocks,
        clock: Clock | None = None,
        report_s: float = 0.5,
    ) -> None:
        self.config = config
        self.role = role
        self.incarnation: Incarnation = memory.incarnation
        self.name = NodeId(config.name or f"{role}-{memory.incarnation[:6]}")
        self.runner = runner
        self.memory = memory
        self.clock: Clock = clock or SystemClock()
        self.limits = Limits(
            model_digest=runner.model_digest,
            max_model_len=runner.max_model_len,
            vocab_size=runner.vocab_size,
            num_blocks=memory.num_blocks,
            block_size=memory.layout.block_size,
        )
        self.on_starved: Callable[[], None] = lambda: None
        self.draining = Draining(self.name, self.clock)
        self.reading: Callable[[], list[HeldConnection]] = list
        """The connections by which the role reads other pools."""
        self._offered = OfferedNames()
        self._network = network
        self._serve_blocks = serve_blocks
        self._report_s = report_s
        self._numbers = itertools.count()
        self._resources = AsyncExitStack()
        self._server: Server | None = None

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._resources.aclose()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._resources.aclose()

    async def _start(self) -> None:
        self.port = EnginePort(on_starved=lambda: self.on_starved(), on_cache_changed=self._offered.change)
        self.engine = Engine(
            runner=self.runner,
            generations=self.memory.generations,
            config=self.config.engine,
            deliver=self.port.deliver,
            clock=self.clock,
            # A prefill node's announced blocks are promised: it takes a prompt whole and never pre-empts.
            admit_whole=self.role is Role.PREFILL,
        )
        self.engine.start()
        self._resources.push_async_callback(asyncio.to_thread, self.engine.stop)
        self._offers: list[Offer] = []
        self._served: list[ServedBlocks] = []
        listen_host = _host_of(self.config.listen)
        for offer, server in await self._serve_blocks(self.memory, self.config.transport, listen_host=listen_host):
            self._offers.append(offer)
            self._served.append(server)
            self._resources.push_async_callback(server.close)
        self.client: Client = self._network.client(node=self.name, incarnation=self.incarnation)
        self._resources.push_async_callback(self.client.close)

    async def join(self, handlers: Mapping[type[RequestBody], Handler]) -> NodeCard:
        """Answer calls and stay registered with every coordinator until the host is left."""
        handlers = {**handlers, Audit: self._audit, Drain: self.draining.drain}
        server = await self._network.serve(self.config.listen, handlers, node=self.name, incarnation=self.incarnation)
        self._server = server
        self._resources.push_async_callback(server.close)
        card = NodeCard(
            node=self.name,
            incarnation=self.incarnation,
            role=self.role,
            address=self.config.advertise or server.address,
            model=self.config.model.served_name or self.config.model.model,
            model_digest=self.runner.model_digest,
            layout=self.memory.layout,
            # What can be promised: a small pool holds less than the model takes.
            max_model_len=min(self.runner.max_model_len, self.memory.num_blocks * self.memory.layout.block_size),
            num_blocks=self.memory.num_blocks,
            quantization=self.runner.quantization,
            offers=tuple(self._offers),
            host=os.uname().nodename,
            pid=os.getpid(),
            version=_version(),
        )
        for coordinator in self.config.coordinators:
            standing = asyncio.create_task(
                stay_registered(self.client, coordinator, card, self.load, self._offered, report_s=self._report_s)
            )
            self._resources.push_async_callback(ended, standing)
        log.info("serving", node=self.name, role=self.role, address=server.address)
        return card

    def check_queue(self, priority: Priority) -> None:
        """OverloadedError if as many as may wait are waiting already."""
        num_waiting, num_waiting_tokens = self.engine.num_waiting()
        bounds = QueueBounds(self.config.engine.max_waiting, self.config.engine.max_waiting_tokens)
        bounds.check(
            priority,
            num_waiting=num_waiting,
            num_waiting_tokens=num_waiting_tokens,
            tokens_per_s=self.engine.stats().tokens_per_s,
        )

    def deadline_s(self, call: IncomingCall) -> float:
        """When the call's time is over, on this node's clock; inf if never."""
        left_s = call.remaining_s
        return inf if left_s is None else self.clock.now_s() + left_s

    def engine_id(self) -> RequestId:
        """An id for one call's request in this engine."""
        return RequestId(f"{next(self._numbers)}")

    async def _audit(self, call: IncomingCall) -> None:
        call.send(await self.holdings())

    async def holdings(self) -> Holdings:
        """Everything at one moment: the engine's when it next comes to answer, the calls' in the same turn."""
        counting = self.port.next_count()
        self.engine.post(Count())
        counted = await counting
        owners = self.port.owners
        return Holdings(
            kind=self.role,
            node=self.name,
            incarnation=self.incarnation,
            incoming=tuple(self._server.held_calls()) if self._server else (),
            outgoing=tuple(self.client.held_calls()),
            sequences=tuple(replace(one, request=owners.get(RequestId(one.id))) for one in counted.sequences),
            num_blocks=counted.num_blocks,
            used_blocks=counted.used_blocks,
            owned_blocks=counted.owned_blocks,
            host_blocks=counted.host_blocks,
            serving=tuple(one for served in self._served for one in served.connections()),
            reading=tuple(self.reading()),
            grants=self.memory.grants.requests,
        )

    async def until_drained(self) -> None:
        """Return when nothing is left to do here and the last words are on their way."""
        await self.draining.drained.wait()
        await asyncio.sleep(_LAST_WORDS_S)

    def load(self) -> NodeLoad:
        self.engine.post(Probe())
        stats = self.engine.stats()
        is_idle = stats.num_running + stats.num_waiting == 0
        return NodeLoad(
            num_waiting=stats.num_waiting,
            num_running=stats.num_running,
            is_draining=self.draining.is_draining,
            num_waiting_tokens=stats.num_waiting_tokens,
            free_blocks=stats.free_blocks,
            leased_blocks=stats.leased_blocks,
            num_calls=self._server.num_calls if self._server else 0,
            progress_age_s=max(0.0, self.clock.now_s() - stats.last_progress_s),
            tokens_per_s=0.0 if is_idle else stats.tokens_per_s,  # the engine's is that of its last steps
            prompt_tokens_per_s=stats.prompt_tokens_per_s,
            num_preemptions=stats.num_preemptions,
            num_generated_tokens=stats.num_generated_tokens,
            num_computed_prompt_tokens=stats.num_computed_prompt_tokens,
            num_cached_tokens=stats.num_cached_tokens,
            num_blocks_out=stats.num_blocks_out,
            num_blocks_in=stats.num_blocks_in,
        )


def new_incarnation() -> Incarnation:
    return Incarnation(new_id())


def _host_of(endpoint: str) -> str:
    """Blocks are served where calls are. A node is reached under the address that it listens on."""
    if not endpoint.startswith("tcp://"):
        return "127.0.0.1"
    return endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def keep_for_good() -> None:
    """What is here now (the model, above all) lives as long as the process: spare every later garbage collection
    the look at it, which stalls all streams for a fifth of a second."""
    gc.collect()
    gc.freeze()


def _version() -> str:
    try:
        return version("baton")
    except PackageNotFoundError:
        return "source"

"""The cluster's processes, as production starts them, on the loop of the simulation."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import numpy as np

from common.clock import Clock, new_id
from common.config import EngineConfig, ModelConfig, NodeConfig
from common.kv_cache.memory import PoolMemory
from common.messages import Audit, GatewayCard, Holdings, Incarnation, NodeAddress, NodeId, Offer, RequestId, Role
from common.model.fake import FakeRunner, fake_layout
from common.node import NodeHost
from common.rpc.base import Client, IncomingCall
from common.rpc.carrier import Process
from common.tasks import ended
from coordinator.core.record import Patience
from coordinator.gateway.metrics import GatewayMetrics
from coordinator.gateway.watch import ClusterWatch
from coordinator.server import Coordinator
from decode_node.node import DecodeNode
from decode_node.readers import Readers
from kv_transfer.base import BlockReader, BlockServer
from prefill_node.node import PrefillNode
from tests.simulation.engine import SteppedEngine
from tests.simulation.network import SimulatedNetwork
from tests.simulation.transfer import DataPlane
from tests.simulation.virtual_time import VirtualLoop

MODEL = "fake"
BLOCK_SIZE = 4
MAX_MODEL_LEN = 256
REPORT_S = 1.0
IDLE_S = 0.5
HOME_AFTER_S = 0.02
PATIENCE = Patience(silence_s=2.0, progress_s=3.0, model_memory_s=600.0)


class Running:
    """One incarnation of one process: `main` is its main task, which runs until it is cancelled."""

    kind = ""

    def __init__(self, name: str, world: "Surroundings", *, incarnation: Incarnation | None = None) -> None:
        self.name = name
        self.incarnation = incarnation or Incarnation(new_id())
        self.process: Process = world.network.process(self.incarnation)
        self._world = world
        self.main: asyncio.Task[None] = world.loop.start(self.process, self._live(), name)

    @property
    def is_alive(self) -> bool:
        return not self.process.is_dead and not self.main.done()

    @property
    def is_frozen(self) -> bool:
        return self.process.is_frozen

    async def stop(self) -> None:
        """As SIGTERM: it tidies up."""
        self.main.cancel()
        await asyncio.wait([self.main])

    def kill(self) -> None:
        self._world.network.kill(self.incarnation)

    async def _live(self) -> None:
        async with AsyncExitStack() as life:
            await self._begin(life)
            await asyncio.Event().wait()

    async def _begin(self, life: AsyncExitStack) -> None:
        raise NotImplementedError


class Surroundings:
    """What every process is born into."""

    def __init__(self, loop: VirtualLoop, network: SimulatedNetwork, plane: DataPlane) -> None:
        self.loop = loop
        self.clock: Clock = loop
        self.network = network
        self.plane = plane
        self.coordinators: tuple[str, ...] = ()


class CoordinatorProcess(Running):
    kind = "coordinator"

    def __init__(self, name: str, world: Surroundings, *, address: str) -> None:
        self.address = address
        self.coordinator = Coordinator(clock=world.clock, patience=PATIENCE, home_after_s=HOME_AFTER_S)
        super().__init__(name, world, incarnation=self.coordinator._incarnation)

    async def _begin(self, life: AsyncExitStack) -> None:
        server = await self.coordinator.listen(self.address, self._world.network)
        life.push_async_callback(server.close)
        ticking = asyncio.create_task(self.coordinator.tick_forever())
        life.push_async_callback(ended, ticking)


class GatewayProcess(Running):
    kind = "gateway"

    def __init__(self, name: str, world: "Surroundings") -> None:
        self.requests: dict[RequestId, None] = {}
        """Those in flight."""
        self.is_serving = False
        super().__init__(name, world)

    async def _begin(self, life: AsyncExitStack) -> None:
        world = self._world
        self.client: Client = world.network.client(node=NodeId(self.name), incarnation=self.incarnation)
        life.push_async_callback(self.client.close)
        self.metrics = GatewayMetrics()
        self.watch = ClusterWatch(self.client, world.coordinators, model=MODEL, clock=world.clock)
        name = NodeId(self.name)
        self.server = await world.network.serve(
            "tcp://gateway:0", {Audit: self._audit}, node=name, incarnation=self.incarnation
        )
        life.push_async_callback(self.server.close)
        self.watch.card = GatewayCard(name, self.incarnation, self.server.address, "", MODEL)
        watching = asyncio.create_task(self.watch.run())
        life.push_async_callback(ended, watching)
        self.is_serving = True

    async def _audit(self, call: IncomingCall) -> None:
        holdings = Holdings(
            kind="gateway",
            node=NodeId(self.name),
            incarnation=self.incarnation,
            incoming=tuple(self.server.held_calls()),
            outgoing=tuple(self.client.held_calls()),
            requests=tuple(self.requests),
        )
        call.send(holdings)


class NodeProcess(Running):
    kind = "node"

    def __init__(
        self,
        name: str,
        world: Surroundings,
        *,
        role: Role,
        listen: str,
        num_blocks: int,
        num_host_blocks: int,
        **engine: Any,
    ) -> None:
        self.role = role
        self._listen = listen
        self._num_blocks = num_blocks
        self._num_host_blocks = num_host_blocks
        self._engine_settings = engine
        self.host: NodeHost | None = None
        self.node: DecodeNode | PrefillNode | None = None
        self.readers: Readers | None = None
        self.servers: list[BlockServer] = []
        super().__init__(name, world)

    @property
    def engine(self) -> SteppedEngine:
        assert self.host is not None
        assert isinstance(self.host.engine, SteppedEngine)
        return self.host.engine

    @property
    def address(self) -> str | None:
        """Where it is called, once it is."""
        server = None if self.host is None else self.host._server
        return None if server is None else server.address

    @property
    def calls(self) -> list[Any]:
        """The shells of its open calls."""
        return list(getattr(self.node, "_calls", {}).values())

    def kill(self) -> None:
        super().kill()
        for server in self.servers:  # its memory is gone with it
            _at_once(server.close())

    async def _begin(self, life: AsyncExitStack) -> None:
        memory = _memory(self._num_blocks, self.incarnation)
        self.host = host = NodeHost(
            NodeConfig(
                model=ModelConfig(model=MODEL),
                engine=EngineConfig(block_size=BLOCK_SIZE, **self._engine_settings),
                name=self.name,
                listen=self._listen,
                coordinators=self._world.coordinators,
            ),
            self.role,
            runner=FakeRunner(
                memory,
                max_model_len=MAX_MODEL_LEN,
                before_step=lambda plan: self.engine.spend(plan),
                num_host_blocks=self._num_host_blocks,
            ),
            memory=memory,
            network=self._world.network,
            serve_blocks=self._serve_blocks,
            clock=self._world.clock,
            report_s=REPORT_S,
        )
        if self.role is Role.PREFILL:
            await life.enter_async_context(host)
            self.node = PrefillNode(host)
            await self.node.join()
        else:
            self.readers = Readers(lambda owner: self._open_reader(owner, memory), idle_s=IDLE_S)
            life.push_async_callback(self.readers.close)
            await life.enter_async_context(host)
            self.node = DecodeNode(host, self.readers)
            await self.node.join()

    async def _serve_blocks(self, pool: PoolMemory, wanted: str, **where: Any) -> list[tuple[Offer, BlockServer]]:
        server = self._world.plane.serve(pool)
        self.servers.append(server)
        return [(await server.start(), server)]

    async def _open_reader(self, owner: NodeAddress, memory: PoolMemory) -> tuple[str, BlockReader]:
        reader = self._world.plane.reader(owner.offers[0], owner=owner.incarnation, pool=memory)
        await reader.open()
        return "memory", reader


def _memory(num_blocks: int, incarnation: Incarnation) -> PoolMemory:
    """No memfd: nobody maps it, and there are thousands of them."""
    layout = fake_layout(block_size=BLOCK_SIZE)
    blocks = np.zeros((num_blocks, layout.block_bytes), np.uint8)
    return PoolMemory(incarnation, layout, blocks, np.zeros(num_blocks, np.int64))


def _at_once(work: Any) -> None:
    """Run a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration:
        return
    raise AssertionError("it waited")

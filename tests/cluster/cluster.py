"""The whole cluster in one process: fake model, links in memory, real engines, real roles, faults on demand.

Every wire message is encoded and decoded, every block really moves, and a wrong block is a wrong token. What
happens at the same time is up to the loop and the engine threads, as in production.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

from common.clock import SystemClock, new_id
from common.config import EngineConfig, ModelConfig, NodeConfig
from common.engine.request import StepPlan
from common.errors import UnavailableError
from common.kv_cache.memory import PoolMemory, allocate
from common.messages import Incarnation, NodeAddress, NodeId, NodeLoad, NodeState, Offer, Role, Sampling
from common.model.fake import FakeRunner, fake_layout, fake_oracle
from common.node import NodeHost, new_incarnation
from common.rpc.call import LinkTimes
from common.rpc.memory import MemoryNetwork
from common.tasks import ended
from coordinator.auditor import Auditor
from coordinator.core.record import Patience
from coordinator.server import Coordinator
from decode_node.node import DecodeNode
from decode_node.readers import Readers
from kv_transfer.base import BlockReader, BlockServer
from kv_transfer.faulty import Faults, FaultyTransport
from kv_transfer.memory import MemoryTransport
from prefill_node.node import PrefillNode
from tests.caller import Answer, Caller

Predicate = Callable[[], bool]
_MOMENT_S = 0.002

MODEL = "fake"
COORDINATOR = "tcp://coordinator:7070"
TIMES = LinkTimes(beat_s=0.05, lost_after_s=0.4, connect_timeout_s=0.3, accept_timeout_s=0.5)


class Brake:
    """Called before every step of a node's engine: lets a test hold the engine, or make a step fail."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []
        self.fail: str = ""
        self._hold_after: int | None = None
        self._changed = threading.Condition()

    def __call__(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        with self._changed:
            self._changed.wait_for(lambda: self._hold_after is None or len(self.plans) <= self._hold_after)
        if self.fail:
            raise RuntimeError(self.fail)

    def hold_after(self, num_steps: int) -> None:
        """Let the engine finish so many more steps, then hold it in the next one; also one that is held already."""
        with self._changed:
            self._hold_after = len(self.plans) + num_steps
            self._changed.notify_all()

    def release(self) -> None:
        with self._changed:
            self._hold_after = None
            self._changed.notify_all()

    @property
    def num_tokens(self) -> int:
        return sum(plan.num_tokens for plan in self.plans)


@dataclass(slots=True)
class Node:
    host: NodeHost
    brake: Brake
    life: AsyncExitStack

    @property
    def incarnation(self) -> Incarnation:
        return self.host.incarnation

    @property
    def load(self) -> NodeLoad:
        return self.host.load()

    def is_empty(self) -> bool:
        load = self.load
        held = load.num_calls, load.num_waiting, load.num_running, load.leased_blocks
        memory = self.host.memory
        return held == (0, 0, 0, 0) and load.free_blocks == memory.num_blocks and not memory.grants.requests


class Cluster:
    """Use as an async context manager; leaving it proves that nothing is left on any node that still lives."""

    def __init__(self) -> None:
        self.clock = SystemClock()
        self.network = MemoryNetwork(clock=self.clock, times=TIMES)
        self.coordinators = [COORDINATOR]
        """Where nodes that are started register, and what a gateway is given."""
        self.home_after_s = 0.0
        """Of coordinators that are started from now on."""
        self.nodes: dict[str, Node] = {}
        self.faults = Faults()
        self._transport = FaultyTransport(MemoryTransport(), self.faults)
        self._servers: dict[Incarnation, BlockServer] = {}
        self._life = AsyncExitStack()

    async def __aenter__(self) -> "Cluster":
        self._life.push_async_callback(self.network.close)
        await self.start_coordinator()
        client = self.network.client(node=NodeId("test"), incarnation=Incarnation(new_id()))
        self._life.push_async_callback(client.close)
        self.caller = Caller(client, COORDINATOR)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                await self.is_empty()
        finally:
            for name in list(self.nodes):
                await self.stop(name)
            await self._life.aclose()

    # --- coordinator ---------------------------------------------------------------------------------------

    async def restart_coordinator(self) -> None:
        """As kill -9 and a new process at the same address, which knows nothing."""
        self.kill_coordinator()
        await self.start_coordinator()

    def kill_coordinator(self) -> None:
        self.network.kill(COORDINATOR)

    async def start_coordinator(self) -> None:
        self.coordinator = Coordinator(clock=self.clock, patience=Patience(), home_after_s=self.home_after_s)
        self.coordinator_incarnation = await self._run(self.coordinator, COORDINATOR)

    async def second_coordinator(self) -> Coordinator:
        """One more beside the first, for nodes that are started from now on."""
        self.coordinators.append("tcp://coordinator:7071")
        coordinator = Coordinator(clock=self.clock, patience=Patience())
        await self._run(coordinator, self.coordinators[-1])
        return coordinator

    async def _run(self, coordinator: Coordinator, address: str) -> Incarnation:
        server = await coordinator.listen(address, self.network)
        self._life.push_async_callback(server.close)
        ticking = asyncio.create_task(coordinator.tick_forever())
        self._life.push_async_callback(ended, ticking)
        return server.incarnation

    # --- nodes ---------------------------------------------------------------------------------------------

    async def start(
        self,
        role: Role,
        name: str,
        *,
        num_blocks: int = 64,
        block_size: int = 16,
        num_host_blocks: int = 0,
        **engine: int | float | bool,
    ) -> Node:
        incarnation = new_incarnation()
        memory = allocate(fake_layout(block_size=block_size), num_blocks, incarnation)
        brake = Brake()
        life = AsyncExitStack()
        host = NodeHost(
            NodeConfig(
                model=ModelConfig(model=MODEL),
                engine=EngineConfig(block_size=block_size, **engine),  # type: ignore[arg-type]
                name=name,
                listen="tcp://node:0",
                coordinators=tuple(self.coordinators),
            ),
            role,
            runner=FakeRunner(memory, before_step=brake, num_host_blocks=num_host_blocks),
            memory=memory,
            network=self.network,
            serve_blocks=self._serve_blocks,
            clock=self.clock,
            report_s=0.05,
        )
        if role is Role.PREFILL:
            await life.enter_async_context(host)
            await PrefillNode(host).join()
        else:
            readers = Readers(lambda owner: self._open_reader(owner, memory))
            life.push_async_callback(readers.close)
            await life.enter_async_context(host)
            await DecodeNode(host, readers).join()
        node = self.nodes[name] = Node(host, brake, life)
        await self.until(lambda: self._is_routed_to(name))
        return node

    async def start_pools(self, *, prefill: int = 1, decode: int = 1, **settings: int | float | bool) -> None:
        for number in range(prefill):
            await self.start(Role.PREFILL, f"prefill-{number}", **settings)  # type: ignore[arg-type]
        for number in range(decode):
            await self.start(Role.DECODE, f"decode-{number}", **settings)  # type: ignore[arg-type]

    async def stop(self, name: str) -> None:
        node = self.nodes.pop(name)
        node.brake.release()
        await node.life.aclose()

    async def kill(self, name: str) -> None:
        """As kill -9: its links break at once, its pool cannot be reached any more; what is left of it in this process
        is then cleared away."""
        incarnation = self.nodes[name].incarnation
        self.network.kill(incarnation)
        await self._servers.pop(incarnation).close()
        await self.stop(name)

    # --- requests --------------------------------------------------------------------------------------------

    async def ask(self, prompt: list[int], max_tokens: int = 8, **sampling: float) -> Answer:
        settings = Sampling(max_tokens=max_tokens, seed=7, **{"temperature": 0.0, **sampling})  # type: ignore[arg-type]
        return await self.caller.ask(prompt, max_tokens, sampling=settings)

    def expected(self, prompt: list[int], max_tokens: int = 8) -> list[int]:
        return fake_oracle(prompt, max_tokens, Sampling(max_tokens=max_tokens, seed=7, temperature=0.0))

    async def asks_rightly(self, prompt: list[int], max_tokens: int = 8) -> Answer:
        answer = await self.ask(prompt, max_tokens)
        assert answer.tokens == self.expected(prompt, max_tokens)
        return answer

    # --- waiting -----------------------------------------------------------------------------------------------

    async def until(self, holds: Predicate, *, within_s: float = 30.0) -> None:
        """Wait for what no event announces, looking each time the loop has done something.

        `within_s` counts the loop's moments: where others keep the machine from us, no time passes.
        """
        for _ in range(round(within_s / _MOMENT_S)):
            if holds():
                return
            await _a_moment()
        raise TimeoutError(f"it never came true in {within_s:g} s")

    async def is_empty(self, *, within_s: float = 30.0) -> None:
        """The leak check: an audit of every process that lives soon finds that nothing is held at all."""
        give_up_s = self.clock.now_s() + within_s
        while left := await self.audit():
            if self.clock.now_s() > give_up_s:
                raise AssertionError("left behind: " + "; ".join(left))
            await _a_moment()

    async def audit(self) -> list[str]:
        """What is amiss in a cluster that should be idle, in words."""
        coordinators = [address for address in self.coordinators if self.network.listens(address)]
        auditor = Auditor(self.network, coordinators, answer_s=TIMES.connect_timeout_s / 2, clock=self.clock)
        try:
            look = await auditor.look()
        except UnavailableError as error:
            return [f"no coordinator: {error.message}"]
        answered = [one.incarnation for one in look.holdings]
        found = [f"{one.process}: {one.count} {one.thing} {one.wrong}" for one in auditor.check(look, idle=True)]
        return found + [
            f"{name} is in no view" for name, node in self.nodes.items() if node.incarnation not in answered
        ]

    # --- plumbing ----------------------------------------------------------------------------------------------

    def _is_routed_to(self, name: str) -> bool:
        views = self.coordinator.state.view().nodes
        return any(view.card.node == name and view.state is not NodeState.STALLED for view in views)

    async def _serve_blocks(
        self, pool: PoolMemory, wanted: str, *, listen_host: str
    ) -> list[tuple[Offer, BlockServer]]:
        server = self._servers[pool.incarnation] = self._transport.serve(pool, listen_host=listen_host)
        return [(await server.start(), server)]

    async def _open_reader(self, owner: NodeAddress, memory: PoolMemory) -> tuple[str, BlockReader]:
        reader = self._transport.reader(owner.offers[0], owner=owner.incarnation, pool=memory)
        await reader.open()
        return self._transport.name, reader


async def _a_moment() -> None:
    moment = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(_MOMENT_S, lambda: moment.done() or moment.set_result(None))
    await moment

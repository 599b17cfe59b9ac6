"""A cluster, its clients, and what is done to it. Names are places; a killed process's place is taken by a new one."""

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

from common.errors import BatonError
from common.messages import Drain, Incarnation, NodeId, NodeState, Role, Route, Routed
from common.rpc.call import LinkTimes
from common.rpc.carrier import Faults
from coordinator.gateway.relay import Relay
from tests.simulation.checks import check_invariants
from tests.simulation.network import SimulatedNetwork
from tests.simulation.processes import CoordinatorProcess, GatewayProcess, NodeProcess, Running, Surroundings
from tests.simulation.requests import Request, session_of
from tests.simulation.transfer import DataPlane
from tests.simulation.virtual_time import VirtualLoop, pause

Tell = Callable[[str], None]
TIMES = LinkTimes(beat_s=0.5, lost_after_s=1.6, connect_timeout_s=1.0, accept_timeout_s=1.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How large the cluster is; pools are small, so that they fill."""

    num_coordinators: int
    num_gateways: int
    num_prefill: int
    num_decode: int
    prefill_blocks: int
    decode_blocks: int
    max_step_tokens: int
    prefix_cache: bool
    policy: str
    num_host_blocks: int
    fixed_ports: bool
    """A process comes back at the address of the one before it."""
    remote_reads: bool
    """Blocks of a frozen owner cannot be read (else they can, as over shared memory)."""


class World(Surroundings):
    def __init__(self, loop: VirtualLoop, rng: random.Random, shape: Shape, seed: int, tell: Tell | None) -> None:
        self._tell = tell
        self.log: list[tuple[float, str]] = []
        self.rng = rng
        self.shape = shape
        network = SimulatedNetwork(loop=loop, times=TIMES, seed=seed)
        super().__init__(loop, network, DataPlane(rng, self._is_blocked))
        self.coordinators = tuple(f"tcp://coordinator-{n}:7070" for n in range(shape.num_coordinators))
        self.operator = network.client(node=NodeId("operator"), incarnation=Incarnation("operator"))
        self.places: dict[str, Running] = {}
        self.dead: list[Running] = []
        self.requests: list[Request] = []
        self.strange: list[str] = []
        self.is_healed = False
        self._acting: list[asyncio.Task[None]] = []
        self._frozen_s: dict[str, float] = {}

    def tell(self, line: str) -> None:
        self.log.append((self.loop.time(), line))
        if self._tell is not None:
            self._tell(f"{self.loop.time():9.4f}  {line}")

    # --- processes ------------------------------------------------------------------------------------------

    def start_all(self) -> None:
        shape = self.shape
        for kind, number in (
            ("coordinator", shape.num_coordinators),
            ("gateway", shape.num_gateways),
            ("prefill", shape.num_prefill),
            ("decode", shape.num_decode),
        ):
            for n in range(number):
                self.start(f"{kind}-{n}")

    def start(self, name: str) -> Running:
        """A new process in that place."""
        assert name not in self.places
        kind, _, number = name.rpartition("-")
        shape = self.shape
        running: Running
        if kind == "coordinator":
            running = CoordinatorProcess(name, self, address=self.coordinators[int(number)])
        elif kind == "gateway":
            running = GatewayProcess(name, self)
        else:
            running = NodeProcess(
                name,
                self,
                role=Role(kind),
                listen=f"tcp://{name}:9000" if shape.fixed_ports else "tcp://node:0",
                num_blocks=shape.prefill_blocks if kind == "prefill" else shape.decode_blocks,
                max_step_tokens=shape.max_step_tokens,
                num_host_blocks=shape.num_host_blocks,
                prefix_cache=shape.prefix_cache,
                policy=shape.policy,
            )
        self.places[name] = running
        self.tell(f"start {name}")
        return running

    @property
    def alive(self) -> list[Running]:
        return list(self.places.values())

    def awake(self, kind: str = "") -> list[Running]:
        return [one for name, one in self.places.items() if name.startswith(kind) and not one.is_frozen]

    @property
    def gateways(self) -> list[GatewayProcess]:
        """Those that can take a request now."""
        return [one for one in self.awake("gateway") if isinstance(one, GatewayProcess) and one.is_serving]

    def kill(self, name: str) -> None:
        running = self.places.pop(name)
        self._frozen_s.pop(name, None)
        self.tell(f"kill -9 {name}")
        running.kill()
        self.dead.append(running)

    async def stop(self, name: str) -> None:
        running = self.places.pop(name)
        self.tell(f"stop {name}")
        await running.stop()
        self.network.forget(running.incarnation)
        self.tell(f"stopped {name}")

    async def drain(self, name: str, timeout_s: float) -> None:
        """Until it is empty, or cannot be reached."""
        node = self.places[name]
        assert isinstance(node, NodeProcess)
        if node.address is None:
            return
        self.tell(f"drain {name} within {timeout_s} s")
        body = Drain(timeout_s)
        try:
            async with self.operator.open(
                node.address, body, incarnation=node.incarnation, timeout_s=timeout_s + 3.0
            ) as call:
                async for progress in call:
                    self.tell(f"{name}: {progress}")
        except BatonError as error:
            self.tell(f"drain of {name} failed: {error.message}")

    def freeze(self, name: str) -> None:
        self.tell(f"freeze {name}")
        self._frozen_s[name] = self.loop.time()
        self.network.freeze(self.places[name].incarnation)

    def thaw(self, name: str) -> None:
        if name not in self._frozen_s:
            return
        self.tell(f"thaw {name}")
        running = self.places[name]
        slept_s = self.loop.time() - self._frozen_s.pop(name)
        for request in self.requests:
            if request.gateway is running:
                request.excused_s += slept_s
        self.network.thaw(running.process)

    async def heal(self) -> None:
        """From now on nothing is done to anybody any more, and every place is taken."""
        self.tell("heal")
        if self._acting:
            await asyncio.wait(self._acting)
        self.is_healed = True
        for name in list(self._frozen_s):
            self.thaw(name)
        self.network.heal_all()
        self.network.set_faults(Faults())
        self.plane.faults = type(self.plane.faults)()
        for name in self.all_places():
            if name not in self.places:
                self.start(name)

    def all_places(self) -> Iterator[str]:
        shape = self.shape
        for kind in ("coordinator", "gateway", "prefill", "decode"):
            for n in range(getattr(shape, f"num_{kind}{'s' if kind in ('coordinator', 'gateway') else ''}")):
                yield f"{kind}-{n}"

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        """Unless the world has been healed by then."""

        def unless_healed() -> None:
            if not self.is_healed:
                act()

        self.loop.call_later(seconds, unless_healed)

    def act(self, work: Coroutine[Any, Any, None]) -> None:
        self._acting.append(self.loop.start(None, work))

    # --- clients --------------------------------------------------------------------------------------------

    def ask(self, request: Request, gateway: GatewayProcess) -> None:
        request.gateway = gateway
        request.session = session = session_of(request)
        self.requests.append(request)
        sampling = request.sampling
        self.tell(
            f"request {request.number} at {gateway.name}: {len(request.prompt)} tokens, {sampling.max_tokens} wanted, "
            f"temperature {sampling.temperature}, until {request.deadline_s:.3f}"
        )
        relay = Relay(
            session,
            request,
            cluster=_Watched(gateway.watch, self, request),  # type: ignore[arg-type]
            client=gateway.client,
            clock=self.clock,
            metrics=gateway.metrics,
        )
        gateway.requests[session.id] = None
        request.task = self.loop.start(gateway.process, relay.run(), f"request {request.number}")
        request.task.add_done_callback(lambda _: gateway.requests.pop(session.id))
        if request.hangs_up_after == 0:
            self.loop.call_later(self.rng.uniform(0.0, 0.05), request.hang_up)

    async def all_ended(self, within_s: float) -> None:
        """Every request of a gateway that lives has ended, or `within_s` are over."""
        tasks = [one.task for one in self.requests if one.task is not None and not one.is_broken]
        if tasks:
            await asyncio.wait(tasks, timeout=within_s)

    async def is_whole(self, within_s: float) -> None:
        """Every coordinator has every node ready, and every gateway sees them; or `within_s` are over."""
        give_up_s = self.loop.time() + within_s
        while self.loop.time() < give_up_s and not self._is_whole():
            await pause(0.1)

    async def reads_end(self, within_s: float) -> None:
        """Stubborn reads take their time."""
        give_up_s = self.loop.time() + within_s
        while self.loop.time() < give_up_s and any(self.plane.reading[one.incarnation] for one in self.alive):
            await pause(0.1)

    def _is_whole(self) -> bool:
        nodes = {one.incarnation for one in self.alive if isinstance(one, NodeProcess)}
        views = [one.coordinator.state.view() for one in self.alive if isinstance(one, CoordinatorProcess)]
        views += [one.watch.view for one in self.gateways if one.watch.coordinator is not None]
        ready = [{node.card.incarnation for node in view.nodes if node.state is NodeState.READY} for view in views]
        num_expected = self.shape.num_coordinators + self.shape.num_gateways
        return len(views) == num_expected and all(found == nodes for found in ready)

    # --- checks ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        for running in self.alive:
            check_invariants(running)
        for request in self.requests:
            if request.session is not None:
                request.session.check_invariants()

    def _is_blocked(self, owner: Incarnation, reader: Incarnation) -> bool:
        if self.network.is_cut_off(owner, reader):
            return True
        process = self.network.process_or_none(owner)
        return self.shape.remote_reads and process is not None and (process.is_frozen or process.is_dead)


class _Watched:
    """A gateway's watch that looks at what the coordinator answers."""

    def __init__(self, watch: Any, world: World, request: Request) -> None:
        self._watch = watch
        self._world = world
        self._request = request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._watch, name)

    async def route(self, body: Route, *rest: Any, **more: Any) -> tuple[Routed, str]:
        routed, digest = await self._watch.route(body, *rest, **more)
        session = self._request.session
        assert session is not None
        names = [address.node for address in (routed.decode, routed.prefill) if address is not None]
        self._world.tell(f"request {self._request.number}, attempt {session.attempt}, goes to {' and '.join(names)}")
        if routed.decode.incarnation in body.exclude:
            self._request.strange.append(f"routed to {routed.decode.node}, which was excluded")
        if routed.prefill is not None and routed.prefill.incarnation in body.exclude:
            self._request.strange.append(f"routed to {routed.prefill.node}, which was excluded")
        return routed, digest

"""One history: a cluster, clients, trouble, all drawn from a seed; then peace, and a look at what is left.

Rules, each checked at the end of every history:

1. Every request ended exactly once, with the oracle's tokens or with an honest error after some of them. Those
   of a killed gateway count as broken.
2. No request outlives its deadline, and none hangs until a deadline that is far away.
3. Once all is healed, every gateway serves a request, right, and nothing is left on any live process: no call,
   sequence, lease, block, reader or read. When all are stopped, no task is left and no message.
4. In a calm history, to which nothing is done, every request finishes at its first attempt and no read finds a
   block reused.
5. Nobody logs an error, and every core keeps its own invariants at every event.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256

from common.rpc.carrier import Faults
from tests.simulation.checks import left_behind
from tests.simulation.edges import LogKeeper, simulated_edges
from tests.simulation.requests import Request, draw_request
from tests.simulation.transfer import ReadFaults
from tests.simulation.trouble import BAD_WEATHER, CALM_LINKS, Trouble
from tests.simulation.virtual_time import DeadlockError, VirtualLoop, pause
from tests.simulation.world import Shape, World

SETTLE_S = 1.2
LIMIT_S = 600.0
MAX_WRONG = 12


@dataclass(slots=True)
class Result:
    seed: int
    wrong: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    log: list[tuple[float, str]] = field(default_factory=list)

    @property
    def digest(self) -> str:
        return sha256("\n".join(f"{at_s!r} {line}" for at_s, line in self.log).encode()).hexdigest()


def run_history(seed: int, *, tell: Callable[[str], None] | None = None) -> Result:
    """`tell`: everything that is logged goes there as well, line by line."""
    result = Result(seed)
    keeper = LogKeeper()
    loop = VirtualLoop(limit_s=LIMIT_S)
    loop.set_exception_handler(lambda _, context: result.wrong.append(f"loop: {_words(context)}"))
    with simulated_edges(seed, keeper):
        if tell is not None:
            keeper.tell = lambda line: tell(f"{loop.time():9.4f}    {line}")
        try:
            loop.run_until_complete(_History(loop, seed, result, tell).run())
        except (AssertionError, DeadlockError) as error:
            result.wrong.append(f"{type(error).__name__}: {error}")
        finally:
            loop.bury()
    result.wrong += [f"logged: {line}" for line in keeper.errors]
    del result.wrong[MAX_WRONG:]
    return result


class _History:
    def __init__(self, loop: VirtualLoop, seed: int, result: Result, tell: Callable[[str], None] | None) -> None:
        self._loop = loop
        self._result = result
        self._rng = rng = random.Random(seed)
        self._calm = rng.random() < 0.15
        self._crowded = rng.random() < 0.45
        shape = draw_shape(rng, crowded=self._crowded)
        self._world = World(loop, random.Random(seed + 1), shape, seed, tell)
        is_bad = not self._calm and rng.random() < 0.25
        self._world.network.set_faults(rng.choice(BAD_WEATHER if is_bad else (Faults(), Faults(), CALM_LINKS)))
        self._world.plane.faults = rng.choice((ReadFaults(), ReadFaults(block_s=0.01, slow=0.3, stubborn=0.5)))
        self._trouble = Trouble(self._world, rng)
        result.log = self._world.log

    async def run(self) -> None:
        world, rng = self._world, self._rng
        world.start_all()
        await pause(0.3 if self._calm else rng.choice((0.05, 0.3)))
        num_requests = rng.randint(5, 9) if self._crowded else rng.randint(2, 6)
        acts = [self._ask] * num_requests + [self._trouble.act] * (0 if self._calm else rng.randint(1, 5))
        rng.shuffle(acts)
        requests_per_s = rng.choice((300.0, 30.0) if self._crowded else (5.0, 40.0))
        trouble_per_s = 15.0 if self._crowded else 8.0
        for act in acts:
            await pause(rng.expovariate(requests_per_s if act == self._ask else trouble_per_s))
            act()
            if act != self._ask:
                world.check()
        if not self._calm:
            await pause(rng.choice((0.1, 0.1, 1.0)))
        await world.heal()
        await world.all_ended(within_s=120.0)
        await world.is_whole(within_s=10.0)
        await self._everybody_serves()
        await world.reads_end(within_s=10.0)
        await pause(SETTLE_S)
        world.check()
        await self._look_for_leaks()
        await self._stop_all()
        self._judge()

    def _ask(self) -> None:
        world = self._world
        if world.gateways:
            grows = self._crowded and self._rng.random() < 0.3
            request = draw_request(self._rng, len(world.requests), self._loop.time, world.tell, grows=grows)
            world.ask(request, self._rng.choice(world.gateways))

    async def _everybody_serves(self) -> None:
        """After all that happened the cluster is as good as new."""
        asked: list[Request] = []
        for gateway in self._world.gateways:
            request = draw_request(self._rng, len(self._world.requests), self._loop.time, self._world.tell)
            request.deadline_s, request.hangs_up_after = self._loop.time() + 100.0, None
            self._world.ask(request, gateway)
            asked.append(request)
        await self._world.all_ended(within_s=120.0)
        for request in asked:
            if not request.finished:
                self._result.wrong.append(f"request {request.number}, asked when all was well, ended {request.ends}")

    async def _look_for_leaks(self) -> None:
        world, wrong = self._world, self._result.wrong
        for running in world.alive:
            if not running.is_alive:
                wrong.append(f"{running.name} is not running: {running.main}")
            if num_reads := world.plane.reading[running.incarnation]:
                wrong.append(f"{running.name} still reads {num_reads} times")
        wrong += [f"left behind at {what}" for what in await left_behind(world, world.alive)]

    async def _stop_all(self) -> None:
        world = self._world
        world.tell("stop all")
        # Clients first, as in a shutdown that nobody notices.
        for running in sorted(world.alive, key=lambda one: one.kind != "gateway"):
            await running.stop()
        await world.operator.close()
        for task in asyncio.all_tasks():
            owner = self._loop.owner_of(task)
            if task is not asyncio.current_task() and (owner is None or not owner.is_dead):
                self._result.wrong.append(f"a task is left: {task}")

    def _judge(self) -> None:
        world, result = self._world, self._result
        if self._calm and world.plane.num_stale:
            result.wrong.append(f"{world.plane.num_stale} reads found reused blocks though nothing was done to anybody")
        for request in world.requests:
            result.wrong += [f"request {request.number}: {what}" for what in request.wrong(calm=self._calm)]
            result.counts[_fate(request)] += 1
            assert request.session is not None
            result.counts["attempts"] += request.session.attempt
            if self._calm and request.session.attempt > 1:
                result.wrong.append(f"request {request.number} took {request.session.attempt} attempts in calm")
        result.counts["requests"] += len(world.requests)
        result.counts["reads"] += world.plane.num_reads
        result.counts["messages"] += world.network.num_arrived


def draw_shape(rng: random.Random, *, crowded: bool) -> Shape:
    """A crowd meets few nodes with the smallest pools: whatever is asked must still fit, alone."""
    return Shape(
        num_coordinators=rng.choice((1, 1, 1, 2)),
        num_gateways=rng.choice((1, 1, 1, 2)),
        num_prefill=rng.choice((1, 1, 2) if crowded else (0, 1, 1, 2, 2, 3)),
        num_decode=rng.choice((1, 2, 2) if crowded else (1, 2, 2, 3)),
        prefill_blocks=rng.choice((16, 20) if crowded else (16, 24, 64)),
        decode_blocks=rng.choice((16, 20) if crowded else (16, 20, 64)),
        max_step_tokens=rng.choice((8, 16, 64)),
        prefix_cache=rng.random() < 0.6,
        policy=rng.choice(("fcfs", "fcfs", "shortest", "deadline", "priority")),
        num_host_blocks=rng.choice((0, 0, 4, 100)),
        fixed_ports=rng.random() < 0.5,
        remote_reads=rng.random() < 0.5,
    )


def _fate(request: Request) -> str:
    if request.is_broken:
        return "broken"
    if request.has_hung_up:
        return "hung up"
    return "finished" if request.finished else "failed"


def _words(context: dict[str, object]) -> str:
    return f"{context.get('message')} {context.get('exception')!r} {context.get('task') or context.get('future') or ''}"

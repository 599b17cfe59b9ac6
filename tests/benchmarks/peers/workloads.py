"""The workloads of a comparison, each for one server and one round."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tests.benchmarks.peers.figures import Figures, of_burst, of_interrupted, of_shared
from tests.benchmarks.peers.goodput import Mix
from tests.benchmarks.peers.objective import Objective
from tests.benchmarks.scenarios import Burst, burst_row, interrupted_row, shared_row
from tests.benchmarks.served import Served
from tests.benchmarks.workloads import Prompts, at_once

Workload = Callable[[Served, int], Awaitable[Figures]]
"""Of a server and a seed: each round draws prompts of its own, the same for all servers."""

GOODPUT = "goodput"
NAMES = ("W1", "W2", "W3L", "W3", "W4", GOODPUT)


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of everything: W1 and W2; seconds between the long prompts of W3L and W3 and how many of them; how many
    requests share a prefix in W4. `narrow`: goodput is known to this factor."""

    rounds: int
    w1: Burst
    w2: Burst
    calm_s: float
    long_every_s: float
    longs: int
    often_every_s: float
    often: int
    sharing: int
    mix: Mix
    narrow: float
    sweep_chunks: tuple[int, ...]


FULL = Scale(
    rounds=3,
    w1=Burst("W1", 32, 256, 64, 1),
    w2=Burst("W2", 1, 128, 128, 1),
    calm_s=5.0,
    long_every_s=5.0,
    longs=4,
    often_every_s=1.5,
    often=8,
    sharing=16,
    mix=Mix(512, 64, 40.0, fewest=12, most=60, objective=Objective()),
    narrow=1.12,
    sweep_chunks=(64, 128, 256, 512),
)
QUICK = Scale(
    rounds=1,
    w1=Burst("W1", 16, 256, 16, 1),
    w2=Burst("W2", 1, 128, 32, 1),
    calm_s=2.0,
    long_every_s=5.0,
    longs=1,
    often_every_s=1.5,
    often=2,
    sharing=4,
    mix=Mix(512, 64, 10.0, fewest=6, most=20, objective=Objective()),
    narrow=1.5,
    sweep_chunks=(128,),
)


def workloads(scale: Scale) -> dict[str, Workload]:
    """All but goodput, by name."""

    def burst(kind: Burst) -> Workload:
        async def run(served: Served, seed: int) -> Figures:
            prompts = Prompts(seed).many(kind.streams, kind.prompt_tokens)
            done = await served.account(at_once(served.client, prompts, kind.max_tokens))
            return of_burst(burst_row(kind, served.name, [done]))

        return run

    def interrupted(every_s: float, longs: int) -> Workload:
        async def run(served: Served, seed: int) -> Figures:
            prompts = Prompts(seed)
            row = await interrupted_row(served, prompts, calm_s=scale.calm_s, every_s=every_s, longs=longs)
            return of_interrupted(row)

        return run

    async def shared(served: Served, seed: int) -> Figures:
        return of_shared(await shared_row(served, Prompts(seed), scale.sharing))

    return {
        "W1": burst(scale.w1),
        "W2": burst(scale.w2),
        "W3L": interrupted(scale.long_every_s, scale.longs),
        "W3": interrupted(scale.often_every_s, scale.often),
        "W4": shared,
    }

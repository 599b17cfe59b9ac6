"""What is done to which process, and when. Pure: a seed gives the same plan every time.

Whoever was stopped or swallowed is let go again; whoever was killed or asked to end is started again by its
launcher. A pause of a node is often longer than `lost_after_s`, so that it is declared lost and comes back.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    KILL = "kill -9"
    RESTART = "restart"
    STOP = "stop"
    CUT = "cut links"
    PARTITION = "partition"


@dataclass(frozen=True, slots=True)
class Fault:
    """`at_s` counts from the start; `for_s` is how long it lasts, 0 for what is over at once."""

    at_s: float
    kind: Kind
    target: str
    for_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind} {self.target}" + (f" for {self.for_s:.1f} s" if self.for_s else "")


_WEIGHTS = {Kind.KILL: 3, Kind.RESTART: 1, Kind.STOP: 3, Kind.CUT: 3, Kind.PARTITION: 2}
_PROXIED = ("prefill", "decode", "coordinator")
MOST_PAUSE_S = 8.0
WARM_UP_S = 2.0
COOL_DOWN_S = 15.0
"""Nothing new happens for so long before the end: what was hurt last comes back under load."""


def plan(seed: int, duration_s: float, targets: Sequence[str], *, every_s: float, rest_s: float) -> Iterator[Fault]:
    """Faults in order of time, about one every `every_s`; no process loses its life twice within `rest_s`.

    Everybody is killed once before anybody is killed again, and so with restarts.
    """
    chance = random.Random(seed)
    reborn: dict[str, float] = {}
    bags: dict[Kind, list[str]] = {Kind.KILL: [], Kind.RESTART: []}
    at_s = WARM_UP_S
    while at_s < duration_s - COOL_DOWN_S:
        [kind] = chance.choices(list(_WEIGHTS), list(_WEIGHTS.values()))
        if kind in bags:
            bag = bags[kind] = bags[kind] or chance.sample(targets, len(targets))
            target = next((one for one in bag if at_s >= reborn.get(one, 0.0)), None)
            if target is not None:
                bag.remove(target)
                reborn[target] = at_s + rest_s
                yield Fault(at_s, kind, target)
        else:
            proxied = [target for target in targets if target.startswith(_PROXIED)]
            target = chance.choice(targets if kind is Kind.STOP else proxied)
            yield Fault(at_s, kind, target, 0.0 if kind is Kind.CUT else chance.uniform(0.3, MOST_PAUSE_S))
        at_s += chance.uniform(0.5, 1.5) * every_s

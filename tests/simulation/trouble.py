"""What is done to a cluster: one event at a time, drawn at random."""

import random
from collections.abc import Callable

from common.messages import Role
from common.rpc.carrier import Faults
from tests.simulation.processes import NodeProcess
from tests.simulation.transfer import ReadFaults
from tests.simulation.virtual_time import pause
from tests.simulation.world import World

CALM_LINKS = Faults(delay_s=0.0005, jitter_s=0.0005)
BAD_WEATHER = (
    Faults(delay_s=0.0005, duplicate=0.2),
    Faults(delay_s=0.0005, reorder=0.02, late_s=0.02),
    Faults(delay_s=0.0005, drop=0.01),
    Faults(delay_s=0.02, jitter_s=0.02),
)
"""On all links, while the history lasts."""


class Trouble:
    """`act` does one thing, if it can; what lasts is ended by a timer of its own or by `World.heal`."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self._world = world
        self._rng = rng
        self._acts: list[tuple[int, Callable[[], None]]] = [
            (5, self._kill),
            (2, self._stop),
            (4, self._drain),
            (4, self._freeze),
            (3, self._cut),
            (3, self._half_cut),
            (6, self._half_open),
            (3, self._partition),
            (5, self._bad_link),
            (5, self._bad_reads),
        ]

    def act(self) -> None:
        weights = [weight for weight, _ in self._acts]
        act = self._rng.choices([act for _, act in self._acts], weights)[0]
        if self._rng.random() < 0.4:
            self._world.plane.ambush = lambda: self._do(act)
        else:
            self._do(act)

    def _do(self, act: Callable[[], None]) -> None:
        if len(self._world.places) > 1 and not self._world.is_healed:
            act()

    # --- processes --------------------------------------------------------------------------------------

    def _victim(self) -> str | None:
        """Nodes more often than the others."""
        awake = [one.name for one in self._world.awake()]
        nodes = [name for name in awake if name.startswith(("prefill", "decode"))]
        names = nodes if nodes and self._rng.random() < 0.75 else awake
        if (reading := self._reading_pair()) is not None and self._rng.random() < 0.5:
            names = [name for name in reading if name in awake] or names
        return self._rng.choice(names) if names else None

    def _kill(self) -> None:
        name = self._victim()
        if name is not None:
            self._world.kill(name)
            self._later(self._rng.choice((0.01, 0.3, 2.5)), lambda: self._start(name))

    def _start(self, name: str) -> None:
        if name not in self._world.places:
            self._world.start(name)

    def _stop(self) -> None:
        name = self._victim()
        if name is None or name.startswith("gateway"):  # an HTTP server waits for its requests first
            return

        async def restart() -> None:
            await self._world.stop(name)
            await pause(0.2)
            self._start(name)

        self._world.act(restart())

    def _drain(self) -> None:
        """As in a rolling restart: the node's work moves or ends, then another process takes its place."""
        nodes = [one for one in self._world.awake() if isinstance(one, NodeProcess) and one.address is not None]
        busy = [one for one in nodes if one.role is Role.DECODE and one.engine.stats().num_running]
        if not nodes:
            return
        node = self._rng.choice(busy if busy and self._rng.random() < 0.8 else nodes)
        name, timeout_s = node.name, self._rng.choice((0.1, 1.0))

        async def restart() -> None:
            await self._world.drain(name, timeout_s)
            if self._world.places.get(name) is node and not node.is_frozen:
                await self._world.stop(name)
                self._start(name)

        self._world.act(restart())

    def _freeze(self) -> None:
        name = self._victim()
        if name is not None:
            self._world.freeze(name)
            process = self._world.places[name]

            def thaw() -> None:
                if self._world.places.get(name) is process:
                    self._world.thaw(name)

            self._later(self._rng.choice((0.05, 0.5, 1.0, 1.7, 2.5)), thaw)

    # --- links ------------------------------------------------------------------------------------------

    def _pair(self) -> tuple[str, str]:
        """Those that move blocks now, or have calls between them, more often than any others."""
        rng, names = self._rng, sorted(self._world.places)
        if (reading := self._reading_pair()) is not None and rng.random() < 0.6:
            return reading
        decodes = [name for name in names if name.startswith("decode")]
        peers = [name for name in names if name.startswith(rng.choice(("gateway", "gateway", "prefill")))]
        if decodes and peers and rng.random() < 0.8:
            return rng.choice(peers), rng.choice(decodes)
        one, other = rng.sample(names, 2)
        return one, other

    def _reading_pair(self) -> tuple[str, str] | None:
        """An owner of blocks and its reader, in the middle of a read."""
        names = {one.incarnation: name for name, one in self._world.places.items()}
        pairs = [
            (names[owner], names[reader])
            for (owner, reader), number in self._world.plane.pairs.items()
            if number and owner in names and reader in names
        ]
        return self._rng.choice(pairs) if pairs else None

    def _cut(self) -> None:
        one, other = self._pair()
        self._world.tell(f"cut {one} - {other}")
        places = self._world.places
        self._world.network.cut(places[one].incarnation, places[other].incarnation)

    def _half_cut(self) -> None:
        """The side that serves notices at once, the one that calls when it next says something."""
        one, other = self._pair()
        self._world.tell(f"half cut {one} - {other}")
        places = self._world.places
        self._world.network.half_cut(places[one].incarnation, places[other].incarnation)

    def _half_open(self) -> None:
        """The side that serves notices at once, the one that calls only that it hears nothing any more."""
        one, other = self._pair()
        self._world.tell(f"half open {one} - {other}")
        network, places = self._world.network, self._world.places
        pair = places[one].incarnation, places[other].incarnation
        network.half_open(*pair)
        self._later(self._rng.choice((0.5, 1.5)), lambda: network.set_faults(CALM_LINKS, *pair))

    def _partition(self) -> None:
        one, other = self._pair()
        self._world.tell(f"partition {one} - {other}")
        network, places = self._world.network, self._world.places
        pair = places[one].incarnation, places[other].incarnation
        network.partition(*pair)
        self._later(self._rng.choice((0.2, 1.0, 1.7, 2.5)), lambda: network.heal(*pair))

    def _bad_link(self) -> None:
        one, other = self._pair()
        rng = self._rng
        kind = rng.choice(("slow", "drop", "duplicate", "reorder"))
        self._world.tell(f"{kind} {one} - {other}")
        faults = {
            "slow": Faults(delay_s=rng.choice((0.02, 0.2)), jitter_s=0.05),
            "drop": Faults(delay_s=0.0005, drop=rng.choice((0.05, 0.3))),
            "duplicate": Faults(delay_s=0.0005, duplicate=rng.choice((0.3, 0.9))),
            "reorder": Faults(delay_s=0.0005, reorder=rng.choice((0.05, 0.3)), late_s=rng.choice((0.02, 0.6))),
        }[kind]
        network, places = self._world.network, self._world.places
        pair = places[one].incarnation, places[other].incarnation
        network.set_faults(faults, *pair)
        self._later(rng.choice((0.5, 2.5)), lambda: network.set_faults(CALM_LINKS, *pair))

    # --- blocks -----------------------------------------------------------------------------------------

    def _bad_reads(self) -> None:
        rng, plane = self._rng, self._world.plane
        kind = rng.choice(("slow", "fail", "stale", "stubborn", "stubborn", "no_connection"))
        self._world.tell(f"reads {kind}")
        plane.faults = ReadFaults(block_s=rng.choice((0.001, 0.02, 0.05)))
        setattr(plane.faults, kind, rng.choice((0.3, 1.0)))
        if kind == "stubborn":
            plane.faults.slow = rng.choice((0.0, 0.5))

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        self._world.later(seconds, act)

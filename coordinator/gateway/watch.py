"""What the gateway knows of the cluster, and how it asks where to send a request.

Coordinators are equal and hold soft state, so any of them will do: one is watched, the others are tried when it
is away. A view outlives the coordinator that sent it, as the nodes do.
"""

import asyncio
import random
from collections.abc import Sequence
from typing import NoReturn

from common import telemetry
from common.clock import Clock
from common.errors import BatonError, DeadlineError, PeerLostError, UnavailableError
from common.messages import GatewayCard, Incarnation, NodeState, NodeView, Role, Route, Routed, View, Watch
from common.rpc.base import Client

log = telemetry.logger(__name__)

FIRST_RETRY_S = 0.1
LAST_RETRY_S = 2.0
ROUTE_TIMEOUT_S = 2.0
VIEW_LAG_S = 1.0


class ClusterWatch:
    """`model` is the one name this gateway serves. `run` keeps the view up to date."""

    def __init__(self, client: Client, coordinators: Sequence[str], *, model: str, clock: Clock) -> None:
        self._client = client
        self._coordinators = tuple(coordinators)
        self._clock = clock
        self._changed = asyncio.Event()
        self._silent: dict[str, None] = {}
        """Coordinators that let the last route go unanswered."""
        self._lost: dict[Incarnation, None] = {}
        """Nodes found dead since the last view."""
        self.num_changes = 0
        """How often a node or the coordinator came, left or changed its state. Loads do not count."""
        self.model = model
        self.card: GatewayCard | None = None
        """What is said of this gateway to whoever is watched, from the next time on."""
        self.view = View()
        self.coordinator: str | None = None
        """The coordinator that is being watched, None while none answers."""

    async def run(self) -> NoReturn:
        """Watch one coordinator after the other until cancelled."""
        retry_s = FIRST_RETRY_S
        while True:
            for coordinator in self._coordinators:
                try:
                    async with self._client.open(coordinator, Watch(self.card)) as call:
                        async for item in call:
                            assert isinstance(item, View)
                            retry_s = FIRST_RETRY_S
                            self.shown(coordinator, item)
                except BatonError as error:
                    log.debug("coordinator away", coordinator=coordinator, error=error.message)
                if self.coordinator is not None:
                    log.warning("coordinator lost", coordinator=coordinator)
                    self.shown(None, self.view)
            # Many gateways that lost one coordinator do not come back in step.
            await asyncio.sleep(retry_s * random.uniform(0.5, 1.0))
            retry_s = min(retry_s * 2, LAST_RETRY_S)

    async def changes_after(self, num_changes: int, *, within_s: float) -> bool:
        """Waits until there have been more than `num_changes`. False if `within_s` were not enough."""
        try:
            async with asyncio.timeout(within_s):
                while self.num_changes <= num_changes:
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def lost(self, incarnation: Incarnation) -> None:
        """A call to this node found it dead. It counts as such until the coordinator says something newer."""
        self._lost[incarnation] = None

    @property
    def decode_nodes(self) -> list[NodeView]:
        """Ready decode nodes of the served model."""
        return [
            node
            for node in self.view.nodes
            if node.card.role is Role.DECODE
            and node.state is NodeState.READY
            and node.card.model == self.model
            and node.card.incarnation not in self._lost
        ]

    @property
    def max_model_len(self) -> int | None:
        """The length that every ready decode node can hold, in tokens; None while there is none."""
        return min((node.card.max_model_len for node in self.decode_nodes), default=None)

    def not_ready(self) -> str | None:
        """Why no request can be served now, or None."""
        if self.coordinator is None:
            return f"no coordinator answers at {', '.join(self._coordinators)}"
        if self.decode_nodes:
            return None
        others = [
            f"{node.card.node} serves {node.card.model}"
            if node.card.model != self.model
            else f"{node.card.node} is lost"
            if node.card.incarnation in self._lost
            else f"{node.card.node} is {node.state}{f' ({node.reason})' if node.reason else ''}"
            for node in self.view.nodes
            if node.card.role is Role.DECODE
        ]
        return f"no decode node is ready for {self.model}" + (f": {'; '.join(others)}" if others else "")

    async def route(self, body: Route) -> tuple[Routed, str]:
        """Where to send a request, and the digest of the model there.

        Raises the coordinator's refusal; UnavailableError if none answers.
        """
        for coordinator in self._nearest_first():
            try:
                routed = await self._ask(coordinator, body)
            except (PeerLostError, DeadlineError) as error:  # gone, or frozen
                log.debug("coordinator away", coordinator=coordinator, error=error.message)
                self._silent[coordinator] = None
                continue
            self._silent.pop(coordinator, None)
            return routed, await self._digest_of(routed.decode.incarnation)
        raise UnavailableError("no coordinator answers", retry_after_s=1.0)

    async def _ask(self, coordinator: str, body: Route) -> Routed:
        async with self._client.open(coordinator, body, timeout_s=ROUTE_TIMEOUT_S) as call:
            async for item in call:
                assert isinstance(item, Routed)
                return item
        raise PeerLostError(f"the coordinator at {coordinator} answered nothing")

    async def _digest_of(self, incarnation: Incarnation) -> str:
        """The view may be a moment behind the coordinator that routed."""
        give_up_s = self._clock.now_s() + VIEW_LAG_S
        while True:
            for node in self.view.nodes:
                if node.card.incarnation == incarnation:
                    return node.card.model_digest
            if not await self.changes_after(self.num_changes, within_s=give_up_s - self._clock.now_s()):
                raise UnavailableError("routed to a node that is not in view", retry_after_s=1.0)

    def _nearest_first(self) -> list[str]:
        """The one that is watched, then the others; those that were silent when last asked after all of them."""
        return sorted(self._coordinators, key=lambda each: (each in self._silent, each != self.coordinator))

    def shown(self, coordinator: str | None, view: View) -> None:
        if coordinator is not None and coordinator != self.coordinator:
            log.info("coordinator found", coordinator=coordinator, nodes=len(view.nodes))
        has_changed = coordinator != self.coordinator or _standing(view) != _standing(self.view)
        self.coordinator = coordinator
        self.view = view
        if coordinator is not None:
            self._silent.pop(coordinator, None)
            self._lost.clear()
        if has_changed:
            self.num_changes += 1
            self._changed.set()
            self._changed = asyncio.Event()


def _standing(view: View) -> list[tuple[Incarnation, NodeState]]:
    return [(node.card.incarnation, node.state) for node in view.nodes]

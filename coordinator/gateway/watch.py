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
PATIENCE_S = 3.0
"""How long a request waits for a coordinator to come back: a restarted one knows all within a second."""
ROUTE_TIMEOUT_S = 2.0
VIEW_LAG_S = 1.0


class ClusterWatch:
    """`model` is the one name this gateway serves. `run` keeps the view up to date."""

    def __init__(self, client: Client, coordinators: Sequence[str], *, model: str, clock: Clock) -> None:
        self._client = client
        self._coordinators = tuple(coordinators)
        self._clock = clock
        self._changed = asyncio.Event()
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
                            self._set(coordinator, item)
                except BatonError as error:
                    log.debug("coordinator away", coordinator=coordinator, error=error.message)
                if self.coordinator is not None:
                    log.warning("coordinator lost", coordinator=coordinator)
                    self._set(None, self.view)
            # Many gateways that lost one coordinator do not come back in step.
            await asyncio.sleep(retry_s * random.uniform(0.5, 1.0))
            retry_s = min(retry_s * 2, LAST_RETRY_S)

    async def changed(self) -> None:
        """The next change of the view or of the coordinator."""
        await self._changed.wait()

    @property
    def decode_nodes(self) -> list[NodeView]:
        """Ready decode nodes of the served model."""
        return [
            node
            for node in self.view.nodes
            if node.card.role is Role.DECODE and node.state is NodeState.READY and node.card.model == self.model
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
            else f"{node.card.node} is {node.state}{f' ({node.reason})' if node.reason else ''}"
            for node in self.view.nodes
            if node.card.role is Role.DECODE
        ]
        return f"no decode node is ready for {self.model}" + (f": {'; '.join(others)}" if others else "")

    async def route(self, body: Route) -> tuple[Routed, str]:
        """Where to send a request, and the digest of the model there. Raises the coordinator's refusal."""
        give_up_s = self._clock.now_s() + PATIENCE_S
        while True:
            for coordinator in self._nearest_first():
                try:
                    return await self._ask(coordinator, body)
                except (PeerLostError, DeadlineError) as error:  # gone, or frozen
                    log.debug("coordinator away", coordinator=coordinator, error=error.message)
            patience_s = give_up_s - self._clock.now_s()
            if patience_s <= 0 or not await self._changes_within(patience_s):
                raise UnavailableError("no coordinator answers", retry_after_s=1.0)

    async def _ask(self, coordinator: str, body: Route) -> tuple[Routed, str]:
        async with self._client.open(coordinator, body, timeout_s=ROUTE_TIMEOUT_S) as call:
            async for item in call:
                assert isinstance(item, Routed)
                return item, await self._digest_of(item.decode.incarnation)
        raise PeerLostError(f"the coordinator at {coordinator} answered nothing")

    async def _digest_of(self, incarnation: Incarnation) -> str:
        """The view may be a moment behind the coordinator that routed."""
        give_up_s = self._clock.now_s() + VIEW_LAG_S
        while True:
            for node in self.view.nodes:
                if node.card.incarnation == incarnation:
                    return node.card.model_digest
            patience_s = give_up_s - self._clock.now_s()
            if patience_s <= 0 or not await self._changes_within(patience_s):
                raise UnavailableError("routed to a node that is not in view", retry_after_s=1.0)

    async def _changes_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self.changed()
        except TimeoutError:
            return False
        return True

    def _nearest_first(self) -> list[str]:
        others = [coordinator for coordinator in self._coordinators if coordinator != self.coordinator]
        return others if self.coordinator is None else [self.coordinator, *others]

    def _set(self, coordinator: str | None, view: View) -> None:
        if coordinator is not None and coordinator != self.coordinator:
            log.info("coordinator found", coordinator=coordinator, nodes=len(view.nodes))
        self.coordinator = coordinator
        self.view = view
        self._changed.set()
        self._changed = asyncio.Event()

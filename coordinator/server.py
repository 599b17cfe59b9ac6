"""The coordinator's shell: calls in, calls out, one clock. Every decision is `core.state.ClusterState`'s."""

import asyncio
import itertools
from typing import assert_never

from common import telemetry
from common.clock import Clock, SystemClock, new_id
from common.config import CoordinatorConfig
from common.messages import Audit, Holdings, Incarnation, NodeId, Register, Report, Route, Watch
from common.rpc.base import IncomingCall, Network, Server
from coordinator.core.events import (
    AnswerRoute,
    AskId,
    ClusterEvent,
    ConnectionId,
    NodeLost,
    NodeRegistered,
    NodeReported,
    PublishView,
    RefuseRoute,
    RouteAsked,
    TellNode,
    Ticked,
    WatchClosed,
    WatcherId,
    WatchOpened,
)
from coordinator.core.policy import PrefillUnavailable
from coordinator.core.record import Patience, Phase
from coordinator.core.state import ClusterState

NAME = NodeId("coordinator")
TICK_S = 0.1

log = telemetry.logger(__name__)


async def serve(config: CoordinatorConfig, network: Network) -> None:
    """Run a coordinator until cancelled. ConfigError if it cannot listen where it should."""
    coordinator = Coordinator(prefill_unavailable=config.prefill_unavailable, home_after_s=config.home_after_s)
    server = await coordinator.listen(config.listen, network)
    log.info("listening", address=server.address)
    try:
        await coordinator.tick_forever()
    finally:
        coordinator.leave()
        await server.close()


class Coordinator:
    """Answers Register, Watch and Route."""

    def __init__(
        self,
        *,
        prefill_unavailable: PrefillUnavailable = "local",
        home_after_s: float = 0.0,
        clock: Clock | None = None,
        patience: Patience | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        self.state = ClusterState(
            now_s=self._clock.now_s(),
            prefill_unavailable=prefill_unavailable,
            home_after_s=home_after_s,
            patience=patience,
        )
        self._is_leaving = False
        self._incarnation = Incarnation(new_id())
        self._server: Server | None = None
        self._ids = itertools.count()
        self._nodes: dict[ConnectionId, IncomingCall] = {}
        self._watchers: dict[WatcherId, IncomingCall] = {}
        self._asks: dict[AskId, asyncio.Future[AnswerRoute | RefuseRoute]] = {}

    async def listen(self, address: str, network: Network) -> Server:
        self._server = await network.serve(
            address,
            {Register: self._register, Watch: self._watch, Route: self._route, Audit: self._audit},
            node=NAME,
            incarnation=self._incarnation,
        )
        return self._server

    async def tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.tick()

    def tick(self) -> None:
        self._handle(Ticked())

    def leave(self) -> None:
        """From now on what becomes of the others is no news: it is we who hang up."""
        self._is_leaving = True

    # --- calls -----------------------------------------------------------------------------------------

    async def _register(self, call: IncomingCall) -> None:
        assert isinstance(call.body, Register)
        connection = ConnectionId(next(self._ids))
        self._nodes[connection] = call
        try:
            self._handle(NodeRegistered(connection, call.body.card))
            async for sent in call:
                if isinstance(sent, Report):
                    self._handle(NodeReported(connection, sent.load, sent.cache))
        finally:
            del self._nodes[connection]
            self._handle(NodeLost(connection))

    async def _watch(self, call: IncomingCall) -> None:
        assert isinstance(call.body, Watch)
        watcher = WatcherId(next(self._ids))
        self._watchers[watcher] = call
        try:
            self._handle(WatchOpened(watcher, call.body.gateway))
            async for _ in call:
                pass  # a watcher only listens
        finally:
            del self._watchers[watcher]
            self._handle(WatchClosed(watcher))

    async def _route(self, call: IncomingCall) -> None:
        assert isinstance(call.body, Route)
        ask = AskId(next(self._ids))
        answer = self._asks[ask] = asyncio.get_running_loop().create_future()
        try:
            self._handle(RouteAsked(ask, call.body))
            match await answer:
                case AnswerRoute(routed=routed):
                    call.send(routed)
                case RefuseRoute(error=error):
                    raise error.exception()
        finally:
            del self._asks[ask]

    async def _audit(self, call: IncomingCall) -> None:
        assert self._server is not None
        incoming = tuple(self._server.held_calls())
        call.send(Holdings(kind="coordinator", node=NAME, incarnation=self._incarnation, incoming=incoming))

    # --- the one way in --------------------------------------------------------------------------------

    def _handle(self, event: ClusterEvent) -> None:
        if self._is_leaving:
            return
        num_moves = self.state.num_moves
        commands = self.state.handle(event, now_s=self._clock.now_s())
        self._log_moves(self.state.num_moves - num_moves)
        for command in commands:
            match command:
                case AnswerRoute() | RefuseRoute():
                    self._asks[command.ask].set_result(command)
                case TellNode(connection=connection, item=item):
                    if connection in self._nodes:
                        self._nodes[connection].send(item)
                case PublishView(watchers=watchers, view=view):
                    for watcher in watchers:
                        self._watchers[watcher].send(view)
                case _:
                    assert_never(command)

    def _log_moves(self, count: int) -> None:
        for move in list(self.state.history)[-count:] if count else []:
            reason = {"reason": move.reason} if move.reason else {}
            write = log.warning if move.phase in (Phase.STALLED, Phase.INCOMPATIBLE) else log.info
            write(f"node {move.phase}", node=move.node, incarnation=move.incarnation[:8], **reason)

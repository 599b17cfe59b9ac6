"""The cluster as the coordinator knows it: events in, commands out. Soft state, told anew by every node.

    (new) ── registers ──> READY <── stops or starts reporting or progressing ──> STALLED
                             ^ ^                                                  ^ ^
                             │ └────── says that it is drained, or not ──> DRAINING │
                             │                                             ^        │
                             └── peers differ or fit ──> INCOMPATIBLE <────┴────────┘
    any of them ── connection lost, or the name taken by a newer process ──> GONE (forgotten)

1. A node is known by the connection that it registered on. What comes from a connection that no node has any
   more is late news and is dropped.
2. A name belongs to the newest process that claims it. The older one is told and never comes back, whatever
   it does: an incarnation that was replaced once stays replaced.
3. The same process on a new connection is the same node; only its connection changes. It has one name: who takes
   another gives up the first.
4. INCOMPATIBLE wins over STALLED wins over DRAINING wins over READY. Only READY nodes are routed to. A draining node
   is one of its model like any other when cards are compared.
5. A node is STALLED while its last report is older than `silence_s` or says that its engine has finished
   nothing for `progress_s`.
6. If no tick came for `pause_s`, it was we who slept: nobody's silence counts for that time.
7. Watchers get a view at once when they come, then at every change, but no more often than every
   `state_gap_s` (somebody came, left or changed state) or `load_gap_s` (loads only).
8. A model that was served within `model_memory_s` is unavailable, not unknown: its nodes may be restarting.
9. Nodes tell which blocks their caches offer, at first the whole, then changes, so that a coordinator that starts
   knows after a few reports where a prefix is warm. It is a hint: a block may be gone when a request gets there.
10. Several coordinators know nothing of each other. Each counts what it routed itself until the node's next report,
   which holds what the others sent as well; what a node cannot take it refuses by itself.
11. A gateway is in view while a Watch of its process is open.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import assert_never

from msgspec.structs import replace

from common.errors import BatonError, InvalidTransition, ModelNotFoundError, UnavailableError
from common.messages import (
    GatewayCard,
    Incarnation,
    NodeCard,
    NodeId,
    NodeLoad,
    NodeState,
    NodeView,
    Registered,
    Route,
    Routed,
    View,
    WireError,
)
from coordinator.core.events import (
    AnswerRoute,
    ClusterCommand,
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
from coordinator.core.membership import misfits, model_mismatch, reference
from coordinator.core.policy import RETRY_AFTER_S, Candidate, PrefillUnavailable, choose
from coordinator.core.record import MOVES, NodeRecord, Patience, Phase, block_names

_KEPT_MOVES = 1000
_KEPT_REPLACED = 1000


@dataclass(frozen=True, slots=True)
class Move:
    """One entry of the cluster's history."""

    now_s: float
    node: NodeId
    incarnation: Incarnation
    phase: Phase
    reason: str


class ClusterState:
    """`history` holds the latest moves, `num_moves` counts them all."""

    def __init__(
        self,
        *,
        now_s: float,
        prefill_unavailable: PrefillUnavailable = "local",
        home_after_s: float = 0.0,
        patience: Patience | None = None,
    ) -> None:
        self._prefill_unavailable: PrefillUnavailable = prefill_unavailable
        self._home_after_s = home_after_s
        self._patience = patience or Patience()
        self._nodes: dict[NodeId, NodeRecord] = {}  # in order of registration
        self._connections: dict[ConnectionId, NodeId] = {}
        self._replaced: dict[Incarnation, None] = {}
        self._standards: dict[str, NodeCard] = {}  # model -> what its nodes were last compared with
        self._models_s: dict[str, float] = {}  # model -> when a node of it was last there
        self._watchers: dict[WatcherId, GatewayCard | None] = {}
        self._ticked_s = now_s
        self._published_s = now_s
        self._unpublished: float | None = None  # the gap that the oldest unpublished change must keep
        self.history: deque[Move] = deque(maxlen=_KEPT_MOVES)
        self.num_moves = 0

    def handle(self, event: ClusterEvent, *, now_s: float) -> list[ClusterCommand]:
        commands: list[ClusterCommand] = []
        match event:
            case NodeRegistered():
                commands += self._register(event, now_s)
            case NodeReported():
                self._report(event, now_s)
            case NodeLost():
                commands += self._lose(event, now_s)
            case WatchOpened(watcher, gateway):
                self._watchers[watcher] = gateway
                commands.append(PublishView((watcher,), self.view()))
                if gateway is not None:
                    self._changed(self._patience.state_gap_s)
            case WatchClosed(watcher):
                if self._watchers.pop(watcher, None) is not None:
                    self._changed(self._patience.state_gap_s)
            case RouteAsked():
                commands.append(self._route(event, now_s))
            case Ticked():
                self._tick(now_s)
            case _:
                assert_never(event)
        return commands + self._publish(now_s)

    def view(self) -> View:
        """Every known node and gateway, by name."""
        nodes = sorted(self._nodes.values(), key=lambda node: node.card.node)
        gateways = {card.incarnation: card for card in self._watchers.values() if card is not None}
        return View(
            tuple(NodeView(node.card, NodeState(node.phase), node.reason, node.load) for node in nodes),
            tuple(sorted(gateways.values(), key=lambda card: (card.node, card.incarnation))),
        )

    # --- events ----------------------------------------------------------------------------------------

    def _register(self, event: NodeRegistered, now_s: float) -> list[ClusterCommand]:
        card, connection = event.card, event.connection
        if card.incarnation in self._replaced:
            return [TellNode(connection, Registered(_taken(card)))]
        commands: list[ClusterCommand] = []
        for other in [one for one in self._nodes.values() if one.card.incarnation == card.incarnation]:
            if other.card.node != card.node:
                commands += self._leave(other, f"calls itself {card.node} now", now_s)
        old = self._nodes.get(card.node)
        if old is not None and old.card.incarnation == card.incarnation:
            del self._connections[old.connection]
            old.connection = connection
            self._connections[connection] = card.node
            return [TellNode(connection, Registered(old.misfit))]
        if old is not None:
            commands.append(TellNode(old.connection, Registered(_taken(old.card))))
            self._replaced[old.card.incarnation] = None
            if len(self._replaced) > _KEPT_REPLACED:
                del self._replaced[next(iter(self._replaced))]
            self._forget(old, "replaced by a newer process", now_s)
        node = NodeRecord(
            card=card, connection=connection, reported_s=now_s, load=NodeLoad(free_blocks=card.num_blocks)
        )
        self._nodes[card.node] = node
        self._connections[connection] = card.node
        standard = self._standards.get(card.model)
        if old is not None or standard is None or model_mismatch(card, standard) is not None:
            commands += self._compare(card.model, now_s, newcomer=node)
        # Else it is one more of what most nodes are: nothing changes for the others.
        self._record(node, now_s)
        return [*commands, TellNode(connection, Registered(node.misfit))]

    def _report(self, event: NodeReported, now_s: float) -> None:
        node = self._node_of(event.connection)
        if node is None:
            return
        if not _same_load(event.load, node.load):
            self._changed(self._patience.load_gap_s)
        node.report(event.load, event.cache, now_s=now_s, settle_s=self._patience.settle_s)
        self._review(node, now_s)

    def _lose(self, event: NodeLost, now_s: float) -> list[ClusterCommand]:
        node = self._node_of(event.connection)
        return [] if node is None else self._leave(node, "connection lost", now_s)

    def _leave(self, node: NodeRecord, reason: str, now_s: float) -> list[ClusterCommand]:
        self._forget(node, reason, now_s)
        # Without a misfit, and without one misfit less, the nodes that are left stand as they stood.
        if not node.misfit and any(peer.misfit for peer in self._peers(node.card.model)):
            return self._compare(node.card.model, now_s)
        return []

    def _route(self, event: RouteAsked, now_s: float) -> AnswerRoute | RefuseRoute:
        route = event.route
        try:
            self._check_model(route.model, now_s)
            prefix = block_names(route.prefix)
            nodes = [node.candidate(prefix) for node in self._peers(route.model)]
            routed = choose(
                route, nodes, prefill_unavailable=self._prefill_unavailable, home_after_s=self._home_after_s
            )
        except BatonError as error:
            return RefuseRoute(event.ask, WireError.of(error))
        self._book(route, routed, nodes, now_s)
        return AnswerRoute(event.ask, routed)

    def _book(self, route: Route, routed: Routed, nodes: Sequence[Candidate], now_s: float) -> None:
        computes = routed.prefill or routed.decode
        for node in nodes:
            if node.card.incarnation in (computes.incarnation, routed.decode.incarnation):
                uncached = node.uncached_tokens(route.num_tokens)
                computed = uncached if node.card.incarnation == computes.incarnation else 0
                self._nodes[node.card.node].book(route.num_tokens, uncached=uncached, computed=computed, now_s=now_s)

    def _tick(self, now_s: float) -> None:
        slept_s = now_s - self._ticked_s
        self._ticked_s = now_s
        for node in self._nodes.values():
            if slept_s > self._patience.pause_s:
                node.reported_s = min(node.reported_s + slept_s, now_s)
            self._review(node, now_s)

    # --- what follows from them ------------------------------------------------------------------------

    def _node_of(self, connection: ConnectionId) -> NodeRecord | None:
        name = self._connections.get(connection)
        return None if name is None else self._nodes[name]

    def _check_model(self, model: str, now_s: float) -> None:
        served = dict.fromkeys(node.card.model for node in self._nodes.values())
        if model in served:
            return
        gone_s = self._models_s.get(model)
        if not served or (gone_s is not None and now_s - gone_s <= self._patience.model_memory_s):
            raise UnavailableError(f"no node serves {model} now", retry_after_s=RETRY_AFTER_S)
        raise ModelNotFoundError(f"there is no model {model!r}; there is {', '.join(sorted(served))}")

    def _peers(self, model: str) -> list[NodeRecord]:
        return [node for node in self._nodes.values() if node.card.model == model]

    def _compare(self, model: str, now_s: float, *, newcomer: NodeRecord | None = None) -> list[ClusterCommand]:
        """Hold the nodes of one model name against each other again; tell those that come to fit or cease to.

        The newcomer has no phase to leave and has still to be told anything.
        """
        nodes = self._peers(model)
        cards = [node.card for node in nodes]
        self._standards[model] = reference(cards)
        reasons = misfits(cards)
        commands: list[ClusterCommand] = []
        for node in nodes:
            misfit = reasons.get(node.card.node, "")
            if node is newcomer:
                node.misfit = node.reason = misfit
                node.phase = Phase.INCOMPATIBLE if misfit else Phase.READY
            elif misfit != node.misfit:
                node.misfit = misfit
                commands.append(TellNode(node.connection, Registered(misfit)))
                self._review(node, now_s)
        return commands

    def _review(self, node: NodeRecord, now_s: float) -> None:
        """Bring a node's phase in line with what is known of it."""
        phase, reason = node.standing(now_s, self._patience)
        if phase is not node.phase:
            self._move(node, phase, reason, now_s)
        elif reason != node.reason:
            node.reason = reason
            self._changed(self._patience.state_gap_s)

    def _forget(self, node: NodeRecord, reason: str, now_s: float) -> None:
        self._move(node, Phase.GONE, reason, now_s)
        del self._nodes[node.card.node]
        del self._connections[node.connection]
        self._models_s[node.card.model] = now_s
        if not self._peers(node.card.model):
            self._standards.pop(node.card.model, None)

    def _move(self, node: NodeRecord, phase: Phase, reason: str, now_s: float) -> None:
        if phase not in MOVES[node.phase]:
            moves = [move for move in self.history if move.incarnation == node.card.incarnation]
            raise InvalidTransition(f"node {node.card.node} {node.phase} -> {phase}; history {moves}")
        node.phase, node.reason = phase, reason
        self._record(node, now_s)

    def _record(self, node: NodeRecord, now_s: float) -> None:
        self.history.append(Move(now_s, node.card.node, node.card.incarnation, node.phase, node.reason))
        self.num_moves += 1
        self._changed(self._patience.state_gap_s)

    def _changed(self, gap_s: float) -> None:
        self._unpublished = gap_s if self._unpublished is None else min(gap_s, self._unpublished)

    def _publish(self, now_s: float) -> list[ClusterCommand]:
        if self._unpublished is None or now_s - self._published_s < self._unpublished:
            return []
        self._unpublished = None
        self._published_s = now_s
        return [PublishView(tuple(self._watchers), self.view())] if self._watchers else []

    # --- for tests -------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        broken = list(self._invariants_broken())
        assert not broken, broken

    def _invariants_broken(self) -> Iterator[str]:
        if {name: node.connection for name, node in self._nodes.items()} != {
            name: connection for connection, name in self._connections.items()
        }:
            yield "nodes and connections disagree"
        for name, node in self._nodes.items():
            if node.card.node != name:
                yield f"{node.card.node} is listed as {name}"
            if node.phase is Phase.GONE:
                yield f"{name} is gone and still listed"
            if node.card.incarnation in self._replaced:
                yield f"{name} was replaced and is still listed"
            if (node.phase is Phase.INCOMPATIBLE) != bool(node.misfit):
                yield f"{name} is {node.phase} with misfit {node.misfit!r}"
            standard = self._standards[node.card.model]
            if (model_mismatch(node.card, standard) is not None) != bool(node.misfit):
                yield f"{name} against {standard.node} has misfit {node.misfit!r}"
            if (node.phase is Phase.READY) == bool(node.reason):
                yield f"{name} is {node.phase} with reason {node.reason!r}"


def _taken(card: NodeCard) -> str:
    return f"another process has taken the name {card.node}; give each node its own name"


def _same_load(left: NodeLoad, right: NodeLoad) -> bool:
    """Progress apart: its age changes with every report and says nothing to watchers while it is small."""
    return replace(left, progress_age_s=0.0) == replace(right, progress_age_s=0.0)

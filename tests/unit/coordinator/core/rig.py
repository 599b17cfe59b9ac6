"""A ClusterState to feed, shared by its tests."""

from common.messages import (
    CacheNews,
    Incarnation,
    NodeCard,
    NodeLoad,
    NodeState,
    Route,
    View,
)
from coordinator.core.events import (
    AnswerRoute,
    AskId,
    ClusterCommand,
    ClusterEvent,
    ConnectionId,
    NodeLost,
    NodeRegistered,
    NodeReported,
    PublishView,
    RouteAsked,
    Ticked,
    WatcherId,
    WatchOpened,
)
from coordinator.core.policy import PrefillUnavailable
from coordinator.core.record import Patience
from coordinator.core.state import ClusterState

PATIENCE = Patience(
    silence_s=3, progress_s=5, pause_s=2, state_gap_s=0.125, load_gap_s=1, model_memory_s=100, settle_s=0.25
)


class Cluster:
    """A ClusterState with a clock, its invariants checked after every event."""

    def __init__(self, prefill_unavailable: PrefillUnavailable = "local", *, home_after_s: float = 0.0) -> None:
        self.now_s = 100.0
        self.state = ClusterState(
            now_s=self.now_s,
            prefill_unavailable=prefill_unavailable,
            home_after_s=home_after_s,
            patience=PATIENCE,
        )

    def feed(self, event: ClusterEvent, *, after_s: float = 0.0) -> list[ClusterCommand]:
        self.now_s += after_s
        commands = self.state.handle(event, now_s=self.now_s)
        self.state.check_invariants()
        return commands

    def register(self, connection: int, card: NodeCard) -> list[ClusterCommand]:
        return self.feed(NodeRegistered(ConnectionId(connection), card))

    def report(
        self, connection: int, load: NodeLoad | None = None, cache: CacheNews | None = None, *, after_s: float = 0.0
    ) -> list[ClusterCommand]:
        report = NodeReported(ConnectionId(connection), load or NodeLoad(free_blocks=100), cache)
        return self.feed(report, after_s=after_s)

    def lose(self, connection: int) -> list[ClusterCommand]:
        return self.feed(NodeLost(ConnectionId(connection)))

    def route(self, model: str = "tiny", num_tokens: int = 10, exclude: tuple[str, ...] = ()) -> ClusterCommand:
        names = tuple(Incarnation(name) for name in exclude)
        [command] = self.feed(RouteAsked(AskId(7), Route(model, num_tokens, names)))
        return command

    def prefill_of_route(self, num_tokens: int, prefix: bytes) -> str:
        [answer] = self.feed(RouteAsked(AskId(7), Route("tiny", num_tokens, prefix=prefix)))
        assert isinstance(answer, AnswerRoute)
        assert answer.routed.prefill is not None
        return answer.routed.prefill.node

    def decode_of_route(self) -> str:
        answer = self.route()
        assert isinstance(answer, AnswerRoute)
        return answer.routed.decode.node

    def tick(self, after_s: float) -> list[ClusterCommand]:
        return self.feed(Ticked(), after_s=after_s)

    def states(self) -> dict[str, tuple[NodeState, str]]:
        return {node.card.node: (node.state, node.reason) for node in self.state.view().nodes}


def watch(cluster: Cluster, watcher: int = 50) -> View:
    [command] = cluster.feed(WatchOpened(WatcherId(watcher)))
    assert isinstance(command, PublishView)
    assert command.watchers == (watcher,)
    return command.view


def published(commands: list[ClusterCommand]) -> list[View]:
    return [command.view for command in commands if isinstance(command, PublishView)]

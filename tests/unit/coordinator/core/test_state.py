from collections.abc import Iterator

import pytest

from common.errors import ErrorCode, InvalidTransition
from common.messages import Incarnation, NodeCard, NodeId, NodeLoad, NodeState, Registered, Route, View
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
    RefuseRoute,
    RouteAsked,
    TellNode,
    Ticked,
    WatchClosed,
    WatcherId,
    WatchOpened,
)
from coordinator.core.membership import misfits
from coordinator.core.policy import PrefillUnavailable
from coordinator.core.state import ClusterState, Patience, Phase
from tests.unit.coordinator.core.cards import OTHER_LAYOUT, make_card

PATIENCE = Patience(
    silence_s=3, progress_s=5, pause_s=2, state_gap_s=0.125, load_gap_s=1, model_memory_s=100, settle_s=0.25
)


class Cluster:
    """A ClusterState with a clock, its invariants checked after every event."""

    def __init__(self, prefill_unavailable: PrefillUnavailable = "local") -> None:
        self.now_s = 100.0
        self.state = ClusterState(now_s=self.now_s, prefill_unavailable=prefill_unavailable, patience=PATIENCE)

    def feed(self, event: ClusterEvent, *, after_s: float = 0.0) -> list[ClusterCommand]:
        self.now_s += after_s
        commands = self.state.handle(event, now_s=self.now_s)
        self.state.check_invariants()
        return commands

    def register(self, connection: int, card: NodeCard) -> list[ClusterCommand]:
        return self.feed(NodeRegistered(ConnectionId(connection), card))

    def report(self, connection: int, load: NodeLoad | None = None, *, after_s: float = 0.0) -> list[ClusterCommand]:
        return self.feed(NodeReported(ConnectionId(connection), load or NodeLoad(free_blocks=100)), after_s=after_s)

    def lose(self, connection: int) -> list[ClusterCommand]:
        return self.feed(NodeLost(ConnectionId(connection)))

    def route(self, model: str = "tiny", num_tokens: int = 10, exclude: tuple[str, ...] = ()) -> ClusterCommand:
        names = tuple(Incarnation(name) for name in exclude)
        [command] = self.feed(RouteAsked(AskId(7), Route(model, num_tokens, names)))
        return command

    def decode_of_route(self) -> str:
        answer = self.route()
        assert isinstance(answer, AnswerRoute)
        return answer.routed.decode.node

    def tick(self, after_s: float) -> list[ClusterCommand]:
        return self.feed(Ticked(), after_s=after_s)

    def states(self) -> dict[str, tuple[NodeState, str]]:
        return {node.card.node: (node.state, node.reason) for node in self.state.view().nodes}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    for connection in range(10):
        cluster.lose(connection)
    assert cluster.state.view() == View()


def watch(cluster: Cluster, watcher: int = 50) -> View:
    [command] = cluster.feed(WatchOpened(WatcherId(watcher)))
    assert isinstance(command, PublishView)
    assert command.watchers == (watcher,)
    return command.view


def published(commands: list[ClusterCommand]) -> list[View]:
    return [command.view for command in commands if isinstance(command, PublishView)]


# --- registering -----------------------------------------------------------------------------------------


def test_a_node_that_registers_is_told_that_it_fits_and_is_ready(cluster: Cluster) -> None:
    assert cluster.register(1, make_card("decode-0")) == [TellNode(ConnectionId(1), Registered())]
    assert cluster.states() == {"decode-0": (NodeState.READY, "")}


def test_a_fresh_node_counts_as_empty_before_its_first_report(cluster: Cluster) -> None:
    cluster.register(1, make_card("decode-0", num_blocks=77))
    assert cluster.state.view().nodes[0].load == NodeLoad(free_blocks=77)


def test_a_node_that_does_not_fit_is_told_listed_and_never_routed_to(cluster: Cluster) -> None:
    cluster.register(1, make_card("decode-0"))
    reason = "does not fit decode-0: block_size 32 here, 16 there"
    assert cluster.register(2, make_card("prefill-0", layout=OTHER_LAYOUT)) == [
        TellNode(ConnectionId(2), Registered(reason))
    ]
    assert cluster.states()["prefill-0"] == (NodeState.INCOMPATIBLE, reason)
    answer = cluster.route()
    assert isinstance(answer, AnswerRoute)
    assert (answer.routed.prefill, answer.routed.why) == (None, "no-prefill-node")


def test_a_node_that_comes_to_fit_is_told(cluster: Cluster) -> None:
    cluster.register(1, make_card("decode-0"))
    cluster.register(2, make_card("decode-1", layout=OTHER_LAYOUT))
    assert cluster.lose(1) == [TellNode(ConnectionId(2), Registered())]
    assert cluster.states() == {"decode-1": (NodeState.READY, "")}


def test_a_thousand_equal_nodes_are_not_compared_a_million_times(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[int] = []

    def count(cards: list[NodeCard]) -> dict[NodeId, str]:
        compared.append(len(cards))
        return misfits(cards)

    monkeypatch.setattr("coordinator.core.state.misfits", count)
    for number in range(10):
        cluster.register(number, make_card(f"decode-{number}"))
    for number in range(10):
        cluster.lose(number)
    assert compared == [1]


def test_nodes_of_another_model_are_another_matter(cluster: Cluster) -> None:
    cluster.register(1, make_card("decode-0"))
    cluster.register(2, make_card("decode-1", model="large", model_digest="e" * 32, layout=OTHER_LAYOUT))
    assert {state for state, _ in cluster.states().values()} == {NodeState.READY}


# --- names and incarnations --------------------------------------------------------------------------------


def test_the_newest_process_takes_the_name_and_the_older_one_is_told(cluster: Cluster) -> None:
    cluster.register(1, make_card("decode-0", incarnation="old"))
    told, welcomed = cluster.register(2, make_card("decode-0", incarnation="new"))
    assert isinstance(told, TellNode)
    assert told.connection == 1
    assert "another process has taken the name decode-0" in told.item.reason
    assert welcomed == TellNode(ConnectionId(2), Registered())
    answer = cluster.route()
    assert isinstance(answer, AnswerRoute)
    assert answer.routed.decode.incarnation == "new"


def test_late_news_of_a_replaced_process_changes_nothing(cluster: Cluster) -> None:
    cluster.register(1, make_card("decode-0", incarnation="old"))
    cluster.register(2, make_card("decode-0", incarnation="new"))
    before = cluster.state.view()
    cluster.report(1, NodeLoad(num_running=99))
    assert cluster.lose(1) == []
    assert cluster.state.view() == before


def test_a_replaced_process_never_comes_back(cluster: Cluster) -> None:
    cluster.register(1, make_card("decode-0", incarnation="old"))
    cluster.register(2, make_card("decode-0", incarnation="new"))
    [told] = cluster.register(3, make_card("decode-0", incarnation="old"))
    assert isinstance(told, TellNode)
    assert told.connection == 3
    assert told.item.reason
    assert cluster.state.view().nodes[0].card.incarnation == "new"


def test_the_same_process_on_a_new_connection_is_the_same_node(cluster: Cluster) -> None:
    cluster.register(1, make_card("decode-0"))
    cluster.report(1, NodeLoad(num_running=3))
    assert cluster.register(2, make_card("decode-0")) == [TellNode(ConnectionId(2), Registered())]
    cluster.lose(1)  # the old link's end is noticed late
    assert cluster.state.view().nodes[0].load.num_running == 3
    cluster.report(2, NodeLoad(num_running=4))
    assert cluster.state.view().nodes[0].load.num_running == 4


# --- stalls ------------------------------------------------------------------------------------------------


def test_a_node_that_stops_reporting_is_stalled_until_it_reports(cluster: Cluster) -> None:
    cluster.register(1, make_card("decode-0"))
    cluster.tick(1.5)
    cluster.tick(1.5)
    assert cluster.states()["decode-0"] == (NodeState.READY, "")
    cluster.tick(0.1)
    assert cluster.states()["decode-0"] == (NodeState.STALLED, "no report for over 3 s")
    refusal = cluster.route()
    assert isinstance(refusal, RefuseRoute)
    assert (refusal.error.code, refusal.error.retry_after_s) == (ErrorCode.UNAVAILABLE, 1.0)
    cluster.report(1)
    assert cluster.decode_of_route() == "decode-0"


def test_a_node_whose_engine_finishes_nothing_is_stalled_until_it_does(cluster: Cluster) -> None:
    cluster.register(1, make_card("decode-0"))
    cluster.report(1, NodeLoad(progress_age_s=5.0))
    assert cluster.states()["decode-0"] == (NodeState.READY, "")
    cluster.report(1, NodeLoad(progress_age_s=5.1))
    assert cluster.states()["decode-0"] == (NodeState.STALLED, "no progress for over 5 s")
    cluster.report(1, NodeLoad(progress_age_s=0.0))
    assert cluster.states()["decode-0"] == (NodeState.READY, "")


def test_after_a_pause_of_our_own_nobody_is_declared_stalled(cluster: Cluster) -> None:
    cluster.register(1, make_card("decode-0"))
    cluster.tick(1.5)
    cluster.tick(60)
    assert cluster.states()["decode-0"] == (NodeState.READY, "")
    cluster.tick(1.5)  # 3.0 s of silence that count
    assert cluster.states()["decode-0"] == (NodeState.READY, "")
    cluster.tick(0.1)
    assert cluster.states()["decode-0"][0] == NodeState.STALLED


def test_a_misfit_that_is_silent_too_is_a_misfit_first(cluster: Cluster) -> None:
    cluster.register(1, make_card("decode-0"))
    cluster.register(2, make_card("decode-1", layout=OTHER_LAYOUT))
    for _ in range(4):
        cluster.tick(1)
        cluster.report(1)
    assert cluster.states()["decode-1"][0] == NodeState.INCOMPATIBLE
    cluster.lose(1)
    assert cluster.states()["decode-1"] == (NodeState.STALLED, "no report for over 3 s")


# --- routing -----------------------------------------------------------------------------------------------


def test_a_burst_spreads_before_any_report_comes(cluster: Cluster) -> None:
    for number in range(3):
        cluster.register(number, make_card(f"decode-{number}"))
    assert [cluster.decode_of_route() for _ in range(6)] == ["decode-0", "decode-1", "decode-2"] * 2


def test_a_report_takes_the_place_of_what_was_routed_before_it(cluster: Cluster) -> None:
    cluster.register(0, make_card("decode-0"))
    cluster.register(1, make_card("decode-1"))
    assert cluster.decode_of_route() == "decode-0"
    cluster.report(0, after_s=1)  # says: nothing runs here any more
    assert cluster.decode_of_route() == "decode-0"


def test_a_request_that_a_report_cannot_know_yet_still_counts(cluster: Cluster) -> None:
    cluster.register(0, make_card("decode-0"))
    cluster.register(1, make_card("decode-1"))
    assert cluster.decode_of_route() == "decode-0"
    cluster.report(0, after_s=0.1)
    assert cluster.decode_of_route() == "decode-1"


def test_an_unknown_model_is_refused_with_the_names_of_those_that_are(cluster: Cluster) -> None:
    cluster.register(1, make_card("decode-0"))
    cluster.register(2, make_card("decode-1", model="large"))
    refusal = cluster.route(model="huge")
    assert isinstance(refusal, RefuseRoute)
    assert refusal.error.code is ErrorCode.MODEL_NOT_FOUND
    assert refusal.error.message == "there is no model 'huge'; there is large, tiny"


def test_an_empty_cluster_asks_for_patience(cluster: Cluster) -> None:
    refusal = cluster.route()
    assert isinstance(refusal, RefuseRoute)
    assert (refusal.error.code, refusal.error.retry_after_s) == (ErrorCode.UNAVAILABLE, 1.0)


def test_a_model_whose_nodes_just_died_is_unavailable_and_later_unknown(cluster: Cluster) -> None:
    cluster.register(1, make_card("decode-0"))
    cluster.register(2, make_card("decode-1", model="large"))
    cluster.lose(1)
    refusal = cluster.route()
    assert isinstance(refusal, RefuseRoute)
    assert refusal.error.code is ErrorCode.UNAVAILABLE
    cluster.now_s += 101
    refusal = cluster.route()
    assert isinstance(refusal, RefuseRoute)
    assert refusal.error.code is ErrorCode.MODEL_NOT_FOUND


def test_the_policy_without_prefill_nodes_is_the_clusters() -> None:
    cluster = Cluster(prefill_unavailable="fail")
    cluster.register(1, make_card("decode-0"))
    refusal = cluster.route()
    assert isinstance(refusal, RefuseRoute)
    assert refusal.error.code is ErrorCode.UNAVAILABLE


# --- views -------------------------------------------------------------------------------------------------


def test_a_watcher_gets_a_view_at_once(cluster: Cluster) -> None:
    cluster.register(2, make_card("prefill-0"))
    cluster.register(1, make_card("decode-0"))
    assert [node.card.node for node in watch(cluster).nodes] == ["decode-0", "prefill-0"]


def test_a_change_of_state_is_published_at_once(cluster: Cluster) -> None:
    watch(cluster)
    cluster.now_s += 1
    [view] = published(cluster.register(1, make_card("decode-0")))
    assert view == cluster.state.view()
    cluster.now_s += 1
    assert published(cluster.lose(1)) == [View()]


def test_many_nodes_that_come_at_once_make_two_views(cluster: Cluster) -> None:
    watch(cluster)
    cluster.now_s += 1
    views = [view for n in range(5) for view in published(cluster.register(n, make_card(f"decode-{n}")))]
    assert [len(view.nodes) for view in views] == [1]
    [view] = published(cluster.tick(0.125))
    assert len(view.nodes) == 5


def test_changes_of_load_are_published_once_in_a_while(cluster: Cluster) -> None:
    watch(cluster)
    cluster.register(1, make_card("decode-0"))
    cluster.tick(1)
    views = [view for n in range(30) for view in published(cluster.report(1, NodeLoad(num_running=n), after_s=0.125))]
    assert [view.nodes[0].load.num_running for view in views] == [7, 15, 23]


def test_a_load_that_stays_the_same_is_not_published(cluster: Cluster) -> None:
    watch(cluster)
    cluster.register(1, make_card("decode-0"))
    cluster.tick(1)
    cluster.report(1, NodeLoad(num_running=1))
    cluster.tick(1)
    for _ in range(5):
        assert published(cluster.report(1, NodeLoad(num_running=1, progress_age_s=0.3), after_s=0.5)) == []
        assert published(cluster.tick(0.5)) == []


def test_the_last_load_of_a_burst_is_published_by_a_tick(cluster: Cluster) -> None:
    watch(cluster)
    cluster.register(1, make_card("decode-0"))
    cluster.tick(1)
    assert published(cluster.report(1, NodeLoad(num_running=5), after_s=0.1)) == []
    assert published(cluster.tick(0.5)) == []
    [view] = published(cluster.tick(0.5))
    assert view.nodes[0].load.num_running == 5


def test_a_watcher_that_left_gets_nothing(cluster: Cluster) -> None:
    watch(cluster, 50)
    watch(cluster, 51)
    cluster.feed(WatchClosed(WatcherId(50)))
    cluster.now_s += 1
    commands = cluster.register(1, make_card("decode-0"))
    assert [command.watchers for command in commands if isinstance(command, PublishView)] == [(51,)]


# --- history -----------------------------------------------------------------------------------------------


def test_the_history_tells_what_became_of_a_node(cluster: Cluster) -> None:
    cluster.register(1, make_card("decode-0"))
    cluster.report(1, NodeLoad(progress_age_s=9))
    cluster.lose(1)
    assert [(move.phase, move.reason) for move in cluster.state.history] == [
        (Phase.READY, ""),
        (Phase.STALLED, "no progress for over 5 s"),
        (Phase.GONE, "connection lost"),
    ]
    assert cluster.state.num_moves == 3


def test_a_forbidden_move_raises_with_the_nodes_history(cluster: Cluster) -> None:
    cluster.register(1, make_card("decode-0"))
    node = cluster.state._nodes[make_card("decode-0").node]
    cluster.lose(1)
    with pytest.raises(InvalidTransition, match=r"decode-0 gone -> ready; history .*connection lost"):
        cluster.state._move(node, Phase.READY, "", cluster.now_s)


def test_broken_invariants_are_found() -> None:
    cluster = Cluster()
    cluster.register(1, make_card("decode-0"))
    node = cluster.state._nodes[make_card("decode-0").node]
    node.reason = "but why"
    node.card = make_card("decode-9")
    with pytest.raises(AssertionError, match=r"decode-9 is listed as decode-0.*ready with reason 'but why'"):
        cluster.state.check_invariants()

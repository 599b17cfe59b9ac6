import pytest

from common.errors import ErrorCode, InvalidTransition
from common.messages import (
    NodeCard,
    NodeId,
    NodeLoad,
    NodeState,
    Registered,
)
from coordinator.core.events import (
    AnswerRoute,
    ConnectionId,
    RefuseRoute,
    TellNode,
)
from coordinator.core.membership import misfits
from coordinator.core.record import Phase
from tests.unit.coordinator.core.cards import OTHER_LAYOUT, make_card
from tests.unit.coordinator.core.rig import Cluster

# --- registering -----------------------------------------------------------------------------------------------


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


# --- names and incarnations ------------------------------------------------------------------------------------


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


def test_a_process_that_takes_another_name_gives_up_the_first(cluster: Cluster) -> None:
    cluster.register(1, make_card("decode-0", incarnation="a"))
    cluster.register(2, make_card("decode-1", incarnation="a"))
    assert cluster.states() == {"decode-1": (NodeState.READY, "")}
    cluster.register(3, make_card("decode-1", incarnation="b"))
    assert cluster.states() == {"decode-1": (NodeState.READY, "")}
    assert cluster.register(1, make_card("decode-0", incarnation="a")) != [TellNode(ConnectionId(1), Registered())]
    assert list(cluster.states()) == ["decode-1"]


def test_the_same_process_on_a_new_connection_is_the_same_node(cluster: Cluster) -> None:
    cluster.register(1, make_card("decode-0"))
    cluster.report(1, NodeLoad(num_running=3))
    assert cluster.register(2, make_card("decode-0")) == [TellNode(ConnectionId(2), Registered())]
    cluster.lose(1)  # the old link's end is noticed late
    assert cluster.state.view().nodes[0].load.num_running == 3
    cluster.report(2, NodeLoad(num_running=4))
    assert cluster.state.view().nodes[0].load.num_running == 4


# --- stalls ----------------------------------------------------------------------------------------------------


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


# --- draining --------------------------------------------------------------------------------------------------


def test_a_draining_node_is_listed_with_the_reason_and_never_routed_to(cluster: Cluster) -> None:
    cluster.register(1, make_card("decode-0"))
    cluster.register(2, make_card("decode-1"))
    cluster.report(1, NodeLoad(free_blocks=100, is_draining=True))
    assert cluster.states()["decode-0"] == (NodeState.DRAINING, "takes no new requests")
    assert [cluster.decode_of_route() for _ in range(3)] == ["decode-1"] * 3
    cluster.report(1)
    assert cluster.states()["decode-0"] == (NodeState.READY, "")
    assert cluster.decode_of_route() == "decode-0"


def test_a_draining_node_that_falls_silent_is_stalled_first(cluster: Cluster) -> None:
    cluster.register(1, make_card("decode-0"))
    cluster.report(1, NodeLoad(is_draining=True))
    for _ in range(4):
        cluster.tick(1)
    assert cluster.states()["decode-0"] == (NodeState.STALLED, "no report for over 3 s")
    cluster.report(1, NodeLoad(is_draining=True))
    assert cluster.states()["decode-0"][0] is NodeState.DRAINING


def test_a_draining_misfit_is_a_misfit_first(cluster: Cluster) -> None:
    cluster.register(1, make_card("decode-0"))
    cluster.register(2, make_card("decode-1", layout=OTHER_LAYOUT))
    cluster.report(2, NodeLoad(is_draining=True))
    assert cluster.states()["decode-1"][0] is NodeState.INCOMPATIBLE
    cluster.lose(1)
    assert cluster.states()["decode-1"][0] is NodeState.DRAINING


def test_a_cluster_whose_only_decode_node_drains_asks_for_patience(cluster: Cluster) -> None:
    cluster.register(1, make_card("decode-0"))
    cluster.report(1, NodeLoad(is_draining=True))
    refusal = cluster.route()
    assert isinstance(refusal, RefuseRoute)
    assert refusal.error.code is ErrorCode.UNAVAILABLE
    assert "1 draining" in refusal.error.message


# --- history ---------------------------------------------------------------------------------------------------


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

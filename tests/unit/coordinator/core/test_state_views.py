"""What watchers are shown, and when."""

from common.messages import (
    GatewayCard,
    Incarnation,
    NodeId,
    NodeLoad,
    View,
)
from coordinator.core.events import (
    PublishView,
    WatchClosed,
    WatcherId,
    WatchOpened,
)
from tests.unit.coordinator.core.cards import make_card
from tests.unit.coordinator.core.rig import Cluster, published, watch


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


def gateway_card(number: int = 0) -> GatewayCard:
    name = f"gateway-{number}"
    return GatewayCard(NodeId(name), Incarnation(f"{name}/1"), f"tcp://{name}", f"http://{name}")


def test_a_gateway_is_in_view_while_it_watches(cluster: Cluster) -> None:
    watch(cluster)
    cluster.now_s += 1
    own, others = published(cluster.feed(WatchOpened(WatcherId(60), gateway_card(1))))
    assert own == others == View(gateways=(gateway_card(1),))
    cluster.now_s += 1
    [view] = published(cluster.feed(WatchOpened(WatcherId(61), gateway_card(0))))[1:]
    assert view.gateways == (gateway_card(0), gateway_card(1))
    cluster.now_s += 1
    assert published(cluster.feed(WatchClosed(WatcherId(60)))) == [View(gateways=(gateway_card(0),))]
    cluster.feed(WatchClosed(WatcherId(61)))


def test_a_gateway_that_watches_twice_is_one(cluster: Cluster) -> None:
    for watcher in (60, 61):
        cluster.feed(WatchOpened(WatcherId(watcher), gateway_card()))
    assert cluster.state.view().gateways == (gateway_card(),)
    cluster.feed(WatchClosed(WatcherId(60)))
    assert cluster.state.view().gateways == (gateway_card(),)
    cluster.feed(WatchClosed(WatcherId(61)))

"""What the state tells the policy: loads, what it routed itself, caches, speeds."""

import pytest

from common.errors import ErrorCode
from common.messages import (
    CacheNews,
    NodeId,
    NodeLoad,
    Route,
)
from coordinator.core.events import (
    AnswerRoute,
    AskId,
    ClusterCommand,
    RefuseRoute,
    RouteAsked,
)
from tests.unit.coordinator.core.cards import make_card
from tests.unit.coordinator.core.rig import Cluster

# --- routing ---------------------------------------------------------------------------------------------------


def test_a_burst_spreads_before_any_report_comes(cluster: Cluster) -> None:
    for number in range(3):
        cluster.register(number, make_card(f"decode-{number}"))
    assert [cluster.decode_of_route() for _ in range(6)] == ["decode-0", "decode-1", "decode-2"] * 2


def test_a_burst_spreads_by_requests_and_not_by_room(cluster: Cluster) -> None:
    cluster.register(0, make_card("decode-0", num_blocks=1000))
    cluster.register(1, make_card("decode-1", num_blocks=100))
    assert [cluster.decode_of_route() for _ in range(4)] == ["decode-0", "decode-1"] * 2


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
    assert refusal.error.code is ErrorCode.NO_PREFILL


# --- cached prefixes -------------------------------------------------------------------------------------------


PREFIX = b"".join(f"block{number:03}".encode() for number in range(30))


@pytest.fixture
def warmed(cluster: Cluster) -> Cluster:
    """Two prefill nodes, of which the second has the first 30 blocks of a prompt of 500 tokens."""
    cluster.register(1, make_card("decode-0"))
    cluster.register(2, make_card("prefill-0"))
    cluster.register(3, make_card("prefill-1"))
    cluster.report(3, cache=CacheNews(added=PREFIX, whole=True))
    return cluster


def test_a_prefix_goes_where_it_is_warm(warmed: Cluster) -> None:
    assert warmed.prefill_of_route(500, PREFIX) == "prefill-1"
    warmed.report(3, after_s=1)
    assert warmed.prefill_of_route(500, b"") == "prefill-0"


def test_a_prefix_counts_up_to_its_first_missing_block(warmed: Cluster) -> None:
    warmed.report(3, NodeLoad(free_blocks=100, num_waiting_tokens=100), CacheNews(dropped=PREFIX[8:16]))
    assert warmed.prefill_of_route(500, PREFIX) == "prefill-0", "one warm block does not outweigh 100 waiting tokens"


def test_news_of_a_cache_add_up_until_the_whole_is_told_again(warmed: Cluster) -> None:
    warmed.report(2, cache=CacheNews(added=PREFIX[:120], whole=True))
    warmed.report(2, cache=CacheNews(added=PREFIX[120:]))
    warmed.report(3, cache=CacheNews(whole=True))
    assert warmed.prefill_of_route(500, PREFIX) == "prefill-0"
    warmed.report(2, cache=CacheNews(added=PREFIX[:80], whole=True), after_s=1)
    warmed.report(3, cache=CacheNews(added=PREFIX[:160]))
    assert warmed.prefill_of_route(500, PREFIX) == "prefill-1"


def test_only_what_is_to_be_computed_counts_as_waiting_after_a_route(warmed: Cluster) -> None:
    """500 tokens, 480 of them cached: 24 such requests wait as long as one that nobody has."""
    chosen = [warmed.prefill_of_route(500, PREFIX) for _ in range(24)]
    assert chosen == ["prefill-1"] * 24
    assert warmed.prefill_of_route(500, PREFIX) == "prefill-0"


def test_names_cut_short_on_the_wire_name_nothing(warmed: Cluster) -> None:
    warmed.report(3, cache=CacheNews(added=PREFIX[:12], whole=True))
    assert warmed.state._nodes[NodeId("prefill-1")].cached == {PREFIX[:8]}
    assert warmed.prefill_of_route(500, PREFIX[:12]) == "prefill-1"


# --- the first token's time ------------------------------------------------------------------------------------


def ask_soon(cluster: Cluster, within_s: float) -> ClusterCommand:
    [command] = cluster.feed(RouteAsked(AskId(7), Route("tiny", 100, first_token_s=within_s)))
    return command


def test_who_waits_for_whom_is_predicted_by_the_speed_that_a_node_reports(cluster: Cluster) -> None:
    cluster.register(1, make_card("decode-0"))
    cluster.register(2, make_card("prefill-0"))
    cluster.report(2, NodeLoad(free_blocks=100, prompt_tokens_per_s=50.0))
    assert isinstance(ask_soon(cluster, 2.0), AnswerRoute)
    refusal = ask_soon(cluster, 2.0)  # behind the first
    assert isinstance(refusal, RefuseRoute)
    assert (refusal.error.code, refusal.error.retry_after_s) == (ErrorCode.OVERLOADED, 2.0)
    assert isinstance(ask_soon(cluster, 4.0), AnswerRoute)


# --- computed at home ------------------------------------------------------------------------------------------


def burst(cluster: Cluster, count: int, num_tokens: int) -> list[str]:
    """Where each prompt is computed: the first letter of the node."""
    computed = []
    for _ in range(count):
        answer = cluster.route(num_tokens=num_tokens)
        assert isinstance(answer, AnswerRoute)
        computed.append("d" if answer.routed.prefill is None else "p")
    return computed


@pytest.mark.parametrize(
    ("prefill_speed", "decode_speed", "fewest", "most"),
    [(1000.0, 1000.0, 7, 10), (1000.0, 0.0, 7, 10), (1000.0, 250.0, 1, 4), (250.0, 1000.0, 18, 22)],
)
def test_a_burst_is_split_by_speed_before_any_report_comes(
    prefill_speed: float, decode_speed: float, fewest: int, most: int
) -> None:
    cluster = Cluster(home_after_s=2.0)
    for connection, name, speed in ((1, "decode-0", decode_speed), (2, "prefill-0", prefill_speed)):
        cluster.register(connection, make_card(name, num_blocks=1000))
        cluster.report(connection, NodeLoad(free_blocks=1000, prompt_tokens_per_s=speed))
    computed = burst(cluster, 32, 256)
    queue_s = 2.0 * prefill_speed / 256
    assert computed[: int(queue_s) + 1] == ["p"] * (int(queue_s) + 1), "no queue is worth it yet"
    assert fewest <= computed.count("d") <= most


def test_a_burst_behind_prefill_stays_there_where_nothing_is_computed_at_home() -> None:
    cluster = Cluster(home_after_s=0.0)
    for connection, name in ((1, "decode-0"), (2, "prefill-0")):
        cluster.register(connection, make_card(name, num_blocks=1000))
        cluster.report(connection, NodeLoad(free_blocks=1000, prompt_tokens_per_s=1000.0))
    assert burst(cluster, 32, 256) == ["p"] * 32

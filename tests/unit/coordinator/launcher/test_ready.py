import pytest

from common.errors import ConfigError
from common.messages import Incarnation, KVLayout, NodeCard, NodeId, NodeState, NodeView, Role, View
from coordinator.launcher.ready import ready_nodes

PIDS = {"prefill-0": 10, "decode-0": 11}


def node(name: str, pid: int, state: NodeState = NodeState.READY, reason: str = "") -> NodeView:
    card = NodeCard(
        node=NodeId(name),
        incarnation=Incarnation(f"{pid:032x}"),
        role=Role.DECODE,
        address="tcp://127.0.0.1:1",
        model="m",
        model_digest="d",
        layout=KVLayout(block_size=16, dtype="float32", itemsize=4, layers=()),
        max_model_len=1,
        num_blocks=1,
        pid=pid,
    )
    return NodeView(card=card, state=state, reason=reason)


def ready(*nodes: NodeView) -> list[str]:
    return ready_nodes(View(nodes=nodes), list(PIDS), PIDS)


def test_nodes_that_are_listed_as_ready_are() -> None:
    assert ready(node("decode-0", 11)) == ["decode-0"]
    assert ready(node("decode-0", 11), node("prefill-0", 10)) == ["prefill-0", "decode-0"]


def test_a_dead_process_that_is_still_listed_does_not_count() -> None:
    assert ready(node("decode-0", 9), node("prefill-0", 10)) == ["prefill-0"]
    assert ready(node("decode-0", 9), node("decode-0", 11)) == ["decode-0"]


def test_a_stalled_node_is_not_ready() -> None:
    assert ready(node("decode-0", 11, NodeState.STALLED)) == []


def test_nodes_of_others_do_not_matter() -> None:
    assert ready(node("decode-7", 11)) == []


def test_waiting_for_a_node_that_does_not_fit_ends_with_its_reason() -> None:
    with pytest.raises(ConfigError, match="decode-0 does not fit the cluster: block sizes differ"):
        ready(node("decode-0", 11, NodeState.INCOMPATIBLE, "block sizes differ"))

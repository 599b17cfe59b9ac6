"""The cluster as the page shows it: one JSON object."""

from common.messages import NodeView, Role
from coordinator.gateway.watch import ClusterWatch


def cluster_overview(cluster: ClusterWatch, *, num_in_flight: int) -> dict[str, object]:
    reason = cluster.not_ready()
    return {
        "model": cluster.model,
        "ready": reason is None,
        "reason": reason or "",
        "coordinator": cluster.coordinator,
        "requests_in_flight": num_in_flight,
        "tokens_per_s": sum(node.load.tokens_per_s for node in cluster.view.nodes if node.card.role is Role.DECODE),
        "nodes": [_node(node) for node in cluster.view.nodes],
    }


def _node(node: NodeView) -> dict[str, object]:
    card, load = node.card, node.load
    return {
        "node": card.node,
        "role": card.role,
        "state": node.state,
        "reason": node.reason,
        "model": card.model,
        "address": card.address,
        "running": load.num_running,
        "waiting": load.num_waiting,
        "waiting_tokens": load.num_waiting_tokens,
        "calls": load.num_calls,
        "blocks": card.num_blocks,
        "free_blocks": load.free_blocks,
        "leased_blocks": load.leased_blocks,
        "tokens_per_s": load.tokens_per_s,
        "progress_age_s": load.progress_age_s,
    }

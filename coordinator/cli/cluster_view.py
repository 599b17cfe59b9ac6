"""A coordinator's view for people and for programs. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from msgspec.structs import asdict

from common.messages import NodeState, NodeView, Role, View
from coordinator.cli.table import BOLD, DIM, columns, paint
from coordinator.core.membership import common_transports, pair_mismatch

_MAX_PAIRS_SHOWN = 16
_STATE_COLOURS = {
    NodeState.READY: "\x1b[32m",
    NodeState.DRAINING: "\x1b[36m",
    NodeState.STALLED: "\x1b[33m",
    NodeState.INCOMPATIBLE: "\x1b[31m",
}


@dataclass(frozen=True, slots=True)
class Pair:
    """A prefill and a decode node of one model. `reason` says why they cannot work together now, if so."""

    prefill: str
    decode: str
    transports: tuple[str, ...]
    reason: str


def pairs_of(view: View) -> Iterator[Pair]:
    for prefill in view.nodes:
        for decode in view.nodes:
            if (prefill.card.role, decode.card.role) != (Role.PREFILL, Role.DECODE):
                continue
            if prefill.card.model == decode.card.model:
                reason = pair_mismatch(prefill.card, decode.card) or _not_ready(prefill) or _not_ready(decode)
                transports = common_transports(prefill.card, decode.card)
                yield Pair(prefill.card.node, decode.card.node, transports, reason)


def as_document(view: View) -> dict[str, Any]:
    return {
        "nodes": [
            {
                "node": node.card.node,
                "role": node.card.role,
                "state": node.state,
                "reason": node.reason,
                "model": node.card.model,
                "model_digest": node.card.model_digest,
                "quantization": node.card.quantization,
                "address": node.card.address,
                "incarnation": node.card.incarnation,
                "pid": node.card.pid,
                "version": node.card.version,
                "max_model_len": node.card.max_model_len,
                "num_blocks": node.card.num_blocks,
                "block_size": node.card.layout.block_size,
                "block_bytes": node.card.layout.block_bytes,
                "dtype": node.card.layout.dtype,
                "transports": [offer.transport for offer in node.card.offers],
                "load": asdict(node.load),
            }
            for node in view.nodes
        ],
        "pairs": [
            {
                "prefill": pair.prefill,
                "decode": pair.decode,
                "works": not pair.reason,
                "transports": pair.transports,
                "reason": pair.reason,
            }
            for pair in pairs_of(view)
        ],
    }


def as_text(view: View, *, colours: bool) -> str:
    """Plain words in columns; `colours` adds ANSI colours and nothing else."""
    if not view.nodes:
        return "No node has registered yet."
    lines = _nodes(view, colours)
    lines.append("")
    lines += _pairs(view)
    return "\n".join(lines)


def _nodes(view: View, colours: bool) -> list[str]:
    heads = ("NODE", "ROLE", "STATE", "MODEL", "RUNNING", "WAITING", "FREE BLOCKS", "TOKENS/S", "PID")
    rows = [
        (
            node.card.node,
            node.card.role,
            node.state,
            node.card.model,
            str(node.load.num_running),
            str(node.load.num_waiting),
            f"{node.load.free_blocks}/{node.card.num_blocks}",
            f"{node.load.tokens_per_s:.1f}",
            str(node.card.pid) if node.card.pid else "",
        )
        for node in view.nodes
    ]
    heading, *body = columns([heads, *rows], right_from=4)
    lines = [paint(heading, BOLD, colours)]
    for node, line in zip(view.nodes, body, strict=True):
        # The state's word stands apart from all else in its line: a node may be called anything.
        start = heading.index("STATE")
        end = start + len(node.state)
        lines.append(line[:start] + paint(line[start:end], _STATE_COLOURS[node.state], colours) + line[end:])
        if node.reason:
            lines.append(paint(f"  {node.reason}", DIM, colours))
    return lines


def _pairs(view: View) -> list[str]:
    pairs = list(pairs_of(view))
    if not pairs:
        missing = [role for role in Role if all(node.card.role is not role for node in view.nodes)]
        if Role.DECODE in missing:
            return ["No decode node: nothing can be served."]
        if missing:
            return ["No prefill node: decode nodes compute prompts themselves."]
        return ["No pairs: prefill and decode nodes serve different models."]
    num_working = sum(not pair.reason for pair in pairs)
    shown = [pair for pair in pairs if pair.reason or len(pairs) <= _MAX_PAIRS_SHOWN]
    lines = [f"{num_working} of {len(pairs)} pairs work together"]
    rows = [
        (f"  {pair.prefill} -> {pair.decode}", pair.reason or f"over {', '.join(pair.transports)}") for pair in shown
    ]
    return lines + columns(rows, right_from=2)


def _not_ready(node: NodeView) -> str:
    return "" if node.state is NodeState.READY else f"{node.card.node} is {node.state}"

"""Nodes to route between."""

from dataclasses import replace
from typing import Any

import msgspec

from common.messages import Incarnation, KVLayout, LayerKV, NodeCard, NodeId, NodeLoad, NodeState, Offer, Role
from coordinator.core.policy import Candidate

LAYOUT = KVLayout(block_size=16, dtype="float32", itemsize=4, layers=(LayerKV(3, 64, 64),) * 2)
OTHER_LAYOUT = msgspec.structs.replace(LAYOUT, block_size=32)


def offers(*transports: str) -> tuple[Offer, ...]:
    return tuple(Offer(transport, f"{transport}://somewhere") for transport in transports)


def make_card(name: str, role: Role | None = None, *, incarnation: str = "", **fields: Any) -> NodeCard:
    """`name` begins with the role unless one is given; the incarnation is the name unless one is given."""
    card = NodeCard(
        node=NodeId(name),
        incarnation=Incarnation(incarnation or f"{name}/1"),
        role=role or Role(name.partition("-")[0]),
        address=f"tcp://{name}",
        model="tiny",
        model_digest="d" * 32,
        layout=LAYOUT,
        max_model_len=1024,
        num_blocks=100,
        offers=offers("shm", "tcp"),
        host="here",
    )
    return msgspec.structs.replace(card, **fields)


def make_candidate(name: str, *, state: NodeState = NodeState.READY, **fields: Any) -> Candidate:
    """Fields of the load, of the candidate and of the card may be mixed."""
    own = {key: fields.pop(key) for key in list(fields) if key in Candidate.__dataclass_fields__}
    load = {key: fields.pop(key) for key in list(fields) if key in NodeLoad.__struct_fields__}
    candidate = Candidate(card=make_card(name, **fields), state=state, load=NodeLoad(**{"free_blocks": 100, **load}))
    return replace(candidate, **own)

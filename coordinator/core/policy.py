"""Which pair of nodes serves a request. Deterministic: the same nodes and loads give the same answer.

1. Only ready nodes that have not failed this request already are considered.
2. Decode: a node with room for the prompt before one without, then the fewest requests, then the most free
   blocks, then the name. Prefill: likewise by tokens that wait to be computed.
3. What was routed to a node since its last report counts as if reported, so a burst spreads.
4. The least loaded decode node that has a prefill partner wins over a less loaded one that has none. If
   none has one, the policy says whether the prompt is computed at the decode node or the request refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from common.errors import ContextLengthError, UnavailableError
from common.messages import NodeAddress, NodeCard, NodeLoad, NodeState, Role, Route, Routed
from coordinator.core.membership import longest_prompt, longest_shared_prompt, pair_mismatch

RETRY_AFTER_S = 1.0

PrefillUnavailable = Literal["local", "wait", "fail"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A node as routing sees it. The routed counts are what it was given since its last report."""

    card: NodeCard
    state: NodeState
    load: NodeLoad
    num_routed: int = 0
    routed_tokens: int = 0
    routed_blocks: int = 0

    @property
    def num_requests(self) -> int:
        # A request that waits for its prompt's blocks is a call, but not the scheduler's yet.
        return max(self.load.num_running + self.load.num_waiting, self.load.num_calls) + self.num_routed

    @property
    def free_blocks(self) -> int:
        return self.load.free_blocks - self.routed_blocks


def blocks_for(card: NodeCard, num_tokens: int) -> int:
    return -(-num_tokens // card.layout.block_size)


def choose(route: Route, nodes: Sequence[Candidate], *, prefill_unavailable: PrefillUnavailable) -> Routed:
    """Where the request goes; `nodes` are all that serve its model, whatever their state.

    UnavailableError if nobody can serve it now, ContextLengthError if nobody ever can.
    """
    usable = [node for node in nodes if _usable(node, route)]
    decodes = _by_load(usable, Role.DECODE, route)
    prefills = _by_load(usable, Role.PREFILL, route)
    if not decodes:
        raise _no_decode(route, nodes)
    for decode in decodes:
        for prefill in prefills:
            if _fits_pair(prefill.card, decode.card, route.num_tokens):
                return Routed(_address(decode), _address(prefill), why="least-loaded")
    if prefill_unavailable == "local":
        return Routed(_address(decodes[0]), why="no-prefill-fits" if prefills else "no-prefill-node")
    raise _no_prefill(route, nodes)


def _usable(node: Candidate, route: Route) -> bool:
    return (
        node.state is NodeState.READY
        and node.card.incarnation not in route.exclude
        and route.num_tokens <= longest_prompt(node.card)
    )


def _fits_pair(prefill: NodeCard, decode: NodeCard, num_tokens: int) -> bool:
    return num_tokens <= longest_shared_prompt(prefill, decode) and pair_mismatch(prefill, decode) is None


def _by_load(nodes: Sequence[Candidate], role: Role, route: Route) -> list[Candidate]:
    def load(node: Candidate) -> tuple[object, ...]:
        full = node.free_blocks < blocks_for(node.card, route.num_tokens + 1)
        if role is Role.PREFILL:
            waiting_tokens = node.load.num_waiting_tokens + node.routed_tokens
            return (full, waiting_tokens, node.num_requests, node.card.node)
        return (full, node.num_requests, -node.free_blocks, node.card.node)

    return sorted((node for node in nodes if node.card.role is role), key=load)


def _no_decode(route: Route, nodes: Sequence[Candidate]) -> ContextLengthError | UnavailableError:
    decodes = [node for node in nodes if node.card.role is Role.DECODE and node.state is not NodeState.INCOMPATIBLE]
    longest = max((longest_prompt(node.card) for node in decodes), default=None)
    if longest is not None and route.num_tokens > longest:
        return _too_long(route, longest)
    return _unavailable(route, Role.DECODE, nodes)


def _no_prefill(route: Route, nodes: Sequence[Candidate]) -> ContextLengthError | UnavailableError:
    by_role = {role: [node.card for node in nodes if node.card.role is role] for role in Role}
    longest = max(
        (
            longest_shared_prompt(prefill, decode)
            for prefill in by_role[Role.PREFILL]
            for decode in by_role[Role.DECODE]
            if pair_mismatch(prefill, decode) is None
        ),
        default=None,
    )
    if longest is not None and route.num_tokens > longest:
        return _too_long(route, longest)
    return _unavailable(route, Role.PREFILL, nodes)


def _too_long(route: Route, longest: int) -> ContextLengthError:
    return ContextLengthError(f"the prompt has {route.num_tokens} tokens; {route.model} takes at most {longest} here")


def _unavailable(route: Route, role: Role, nodes: Sequence[Candidate]) -> UnavailableError:
    """Says what became of the nodes there are: the operator reads it in the gateway's log, the client in a 503."""
    tally: dict[str, int] = {}
    for node in nodes:
        if node.card.role is role:
            word = "tried already" if node.card.incarnation in route.exclude else str(node.state)
            tally[word] = tally.get(word, 0) + 1
    found = ", ".join(f"{count} {word}" for word, count in tally.items()) or "none registered"
    return UnavailableError(f"no {role} node can take {route.model} now ({found})", retry_after_s=RETRY_AFTER_S)


def _address(node: Candidate) -> NodeAddress:
    card = node.card
    return NodeAddress(card.node, card.incarnation, card.address, card.offers)

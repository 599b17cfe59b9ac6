"""Which pair of nodes serves a request. Deterministic: the same nodes and loads give the same answer.

1. Only ready nodes that have not failed this request already are considered.
2. Prefill: a node with room for the prompt before one without, then the fewest tokens until this prompt is computed:
   those that wait there and those of the prompt that are not in its cache. So a warm node wins until what waits there
   outweighs what its cache spares. Then the fewest requests, then the name.
3. Decode: a node with room before one without, then the fewest requests, where a prompt of which nothing is cached
   counts as `2 + a quarter of the fewest` requests more: blocks that need not be pulled are worth that much of
   a queue and no more, so a warm node is never overrun. Then the most free blocks, then the name.
4. What was routed to a node since its last report counts as if reported, so a burst spreads.
5. A prompt of which the decode node lacks no more than two blocks is computed there, whatever the policy: a hop takes
   longer. Else the least loaded decode node that has a prefill partner wins over a less loaded one that has none. If
   none has one, the policy says whether the prompt is computed at the decode node (`local`), the request refused
   until a partner comes (`wait`), or refused (`fail`).
6. With `first_token_s` only nodes are considered that can have the prompt computed by then, at the speed that they
   report; a node whose speed is unknown may try. A request that only late nodes could serve is refused with
   the time that they are late. Priority changes nothing: what waits is not reported by class, and an estimate that
   takes all of it only errs on the side of refusing who would be served first.
7. Where prefill is the bottleneck prompts are computed at home: under the policy `local`, and if what waits at the
   prefill node that is first by rule 2 takes it longer than `home_after_s`, on the decode node with room that would
   have the prompt computed first, if even 2.5 times the time that this takes is no later than the prefill node. The
   margin is for the streams that begin to decode there meanwhile and slow it. A decode node reports the speed that it
   has beside its streams without slowing them beyond its target; one that has computed no prompt yet is taken to be
   as fast as the prefill node. So an idle prefill node gets every prompt, and a burst is split.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from common.errors import ContextLengthError, NoPrefillError, OverloadedError, UnavailableError
from common.messages import NodeAddress, NodeCard, NodeLoad, NodeState, Role, Route, Routed
from coordinator.core.membership import longest_prompt, longest_shared_prompt, pair_mismatch

RETRY_AFTER_S = 1.0

_HOME_BLOCKS = 2
_WARMTH_REQUESTS = 2.0
_WARMTH_SHARE = 0.25
_HOME_MARGIN = 2.5

PrefillUnavailable = Literal["local", "wait", "fail"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A node as routing sees it. The routed counts are what it was given since its last report.

    `num_cached_blocks` are the leading full blocks of this request's prompt that its cache offers.
    """

    card: NodeCard
    state: NodeState
    load: NodeLoad
    num_routed: int = 0
    routed_tokens: int = 0
    routed_blocks: int = 0
    num_cached_blocks: int = 0

    @property
    def num_requests(self) -> int:
        # A request that waits for its prompt's blocks is a call, but not the scheduler's yet.
        return max(self.load.num_running + self.load.num_waiting, self.load.num_calls) + self.num_routed

    @property
    def free_blocks(self) -> int:
        return self.load.free_blocks - self.routed_blocks

    def is_full(self, num_tokens: int) -> bool:
        return self.free_blocks < blocks_for(self.card, num_tokens + 1)

    def uncached_tokens(self, num_tokens: int) -> int:
        """Of a prompt, those that are to be computed here: never none, the last one's logits draw the next token."""
        block_size = self.card.layout.block_size
        return num_tokens - min(self.num_cached_blocks, max(0, num_tokens - 1) // block_size) * block_size

    @property
    def waiting_tokens(self) -> int:
        return self.load.num_waiting_tokens + self.routed_tokens

    def tokens_until_computed(self, num_tokens: int) -> int:
        return self.waiting_tokens + self.uncached_tokens(num_tokens)

    def late_s(self, route: Route) -> float:
        """By how much the first token would miss its time; 0 if it would not, or nobody knows."""
        if route.first_token_s is None or not self.load.prompt_tokens_per_s:
            return 0.0
        first_token_s = self.tokens_until_computed(route.num_tokens) / self.load.prompt_tokens_per_s
        return max(0.0, first_token_s - route.first_token_s)

    def holds_nearly_all(self, num_tokens: int) -> bool:
        uncached = self.uncached_tokens(num_tokens)
        return uncached < num_tokens and uncached <= _HOME_BLOCKS * self.card.layout.block_size


def blocks_for(card: NodeCard, num_tokens: int) -> int:
    return -(-num_tokens // card.layout.block_size)


def choose(
    route: Route, nodes: Sequence[Candidate], *, prefill_unavailable: PrefillUnavailable, home_after_s: float = 0.0
) -> Routed:
    """Where the request goes; `nodes` are all that serve its model, whatever their state.

    UnavailableError if nobody can serve it now, NoPrefillError if the policy forbids who could, OverloadedError if
    nobody can in time, ContextLengthError if nobody ever can.
    """
    usable = [node for node in nodes if _usable(node, route)]
    decodes = _decodes_by_rank(usable, route.num_tokens)
    prefills = _prefills_by_rank(usable, route.num_tokens)
    if not decodes:
        raise _no_decode(route, nodes)
    punctual = [prefill for prefill in prefills if not prefill.late_s(route)]
    may_stay = prefill_unavailable == "local" and home_after_s > 0.0
    sooner = _sooner_at_home(route, decodes, prefills, home_after_s) if may_stay else None
    for decode in decodes:
        if decode.holds_nearly_all(route.num_tokens) and not decode.late_s(route):
            return Routed(_address(decode), why="cached-at-home")
        if sooner is not None:
            return Routed(_address(sooner), why="home-faster")
        for prefill in punctual:
            if _fits_pair(prefill.card, decode.card, route.num_tokens):
                why = "cached-prefix" if prefill.num_cached_blocks else "least-loaded"
                return Routed(_address(decode), _address(prefill), why=why)
    if len(punctual) < len(prefills) and (late := _partner(decodes, prefills, route.num_tokens)):
        raise _too_late(route, late)
    if prefill_unavailable != "local":
        raise _no_prefill(route, nodes, prefill_unavailable)
    for decode in decodes:
        if not decode.late_s(route):
            return Routed(_address(decode), why="no-prefill-fits" if prefills else "no-prefill-node")
    raise _too_late(route, min(decodes, key=lambda decode: decode.late_s(route)))


def _usable(node: Candidate, route: Route) -> bool:
    return (
        node.state is NodeState.READY
        and node.card.incarnation not in route.exclude
        and route.num_tokens <= longest_prompt(node.card)
    )


def _fits_pair(prefill: NodeCard, decode: NodeCard, num_tokens: int) -> bool:
    return num_tokens <= longest_shared_prompt(prefill, decode) and pair_mismatch(prefill, decode) is None


def _partner(decodes: Sequence[Candidate], prefills: Sequence[Candidate], num_tokens: int) -> Candidate | None:
    """The first prefill node that could serve this prompt with any of the decode nodes."""
    for prefill in prefills:
        if any(_fits_pair(prefill.card, decode.card, num_tokens) for decode in decodes):
            return prefill
    return None


def _sooner_at_home(
    route: Route, decodes: Sequence[Candidate], prefills: Sequence[Candidate], home_after_s: float
) -> Candidate | None:
    """Rule 7. `decodes` and `prefills` by rank."""
    num_tokens = route.num_tokens
    prefill = _partner(decodes, prefills, num_tokens)
    homes = [node for node in decodes if not node.is_full(num_tokens) and not node.late_s(route)]
    if prefill is None or not homes:
        return None
    speed = prefill.load.prompt_tokens_per_s
    if not prefill.waiting_tokens > home_after_s * speed > 0.0:
        return None

    def computed_s(node: Candidate) -> float:
        return node.tokens_until_computed(num_tokens) / (node.load.prompt_tokens_per_s or speed)

    home = min(homes, key=computed_s)
    return home if _HOME_MARGIN * computed_s(home) <= computed_s(prefill) else None


def _prefills_by_rank(nodes: Sequence[Candidate], num_tokens: int) -> list[Candidate]:
    """Rule 2."""

    def rank(node: Candidate) -> tuple[object, ...]:
        return (node.is_full(num_tokens), node.tokens_until_computed(num_tokens), node.num_requests, node.card.node)

    return sorted((node for node in nodes if node.card.role is Role.PREFILL), key=rank)


def _decodes_by_rank(nodes: Sequence[Candidate], num_tokens: int) -> list[Candidate]:
    """Rule 3."""
    decodes = [node for node in nodes if node.card.role is Role.DECODE]
    fewest = min((node.num_requests for node in decodes if not node.is_full(num_tokens)), default=0)
    warmth = _WARMTH_REQUESTS + _WARMTH_SHARE * fewest

    def rank(node: Candidate) -> tuple[object, ...]:
        uncached_share = node.uncached_tokens(num_tokens) / max(1, num_tokens)
        cost = node.num_requests + warmth * uncached_share
        return (node.is_full(num_tokens), cost, uncached_share, -node.free_blocks, node.card.node)

    return sorted(decodes, key=rank)


def _too_late(route: Route, node: Candidate) -> OverloadedError:
    assert route.first_token_s is not None
    late_s = node.late_s(route)
    return OverloadedError(
        f"the first token would come in {route.first_token_s + late_s:.1f} s at the earliest, "
        f"wanted within {route.first_token_s:g} s",
        retry_after_s=max(RETRY_AFTER_S, late_s),
    )


def _no_decode(route: Route, nodes: Sequence[Candidate]) -> ContextLengthError | UnavailableError:
    decodes = [node for node in nodes if node.card.role is Role.DECODE and node.state is not NodeState.INCOMPATIBLE]
    longest = max((longest_prompt(node.card) for node in decodes), default=None)
    if longest is not None and route.num_tokens > longest:
        return _too_long(route, longest)
    return _unavailable(route, Role.DECODE, nodes)


def _no_prefill(
    route: Route, nodes: Sequence[Candidate], policy: PrefillUnavailable
) -> ContextLengthError | UnavailableError:
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
    error = _unavailable(route, Role.PREFILL, nodes)
    return NoPrefillError(error.message, retry_after_s=error.retry_after_s) if policy == "fail" else error


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

"""One node as the coordinator knows it: its phase, its last report, its cache, what was routed to it since."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from common.messages import CACHE_NAME_BYTES, CacheNews, NodeCard, NodeLoad, NodeState
from coordinator.core.events import ConnectionId
from coordinator.core.policy import Candidate, blocks_for


class Phase(StrEnum):
    READY = "ready"
    DRAINING = "draining"
    STALLED = "stalled"
    INCOMPATIBLE = "incompatible"
    GONE = "gone"


_PRESENT = (Phase.READY, Phase.DRAINING, Phase.STALLED, Phase.INCOMPATIBLE)

MOVES: dict[Phase, tuple[Phase, ...]] = {
    **{phase: (*(other for other in _PRESENT if other is not phase), Phase.GONE) for phase in _PRESENT},
    Phase.GONE: (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long what is waited for; the numbers of the rules of `state.py`."""

    silence_s: float = 3.0
    progress_s: float = 10.0
    pause_s: float = 1.0
    state_gap_s: float = 0.05
    load_gap_s: float = 0.5
    model_memory_s: float = 600.0
    settle_s: float = 0.25
    """A request routed this shortly before a report may not be in it yet."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one routed request brings to a node: tokens to compute and blocks to hold them."""

    routed_s: float
    tokens: int
    blocks: int


@dataclass(slots=True, kw_only=True)
class NodeRecord:
    card: NodeCard
    connection: ConnectionId
    reported_s: float
    load: NodeLoad
    phase: Phase = Phase.READY
    reason: str = ""
    misfit: str = ""
    shares: deque[Share] = field(default_factory=deque)  # routed since the last report
    cached: set[bytes] = field(default_factory=set)  # names of blocks, for look-ups only: its order decides nothing

    def report(self, load: NodeLoad, cache: CacheNews | None, *, now_s: float, settle_s: float) -> None:
        self.load = load
        self.reported_s = now_s
        if cache is not None:
            self._see_cache(cache)
        while self.shares and self.shares[0].routed_s <= now_s - settle_s:
            self.shares.popleft()

    def _see_cache(self, news: CacheNews) -> None:
        if news.whole:
            self.cached.clear()
        self.cached.difference_update(block_names(news.dropped))
        self.cached.update(block_names(news.added))

    def standing(self, now_s: float, patience: Patience) -> tuple[Phase, str]:
        """The phase that follows from what is known, and the reason if it is not READY."""
        if self.misfit:
            return Phase.INCOMPATIBLE, self.misfit
        if now_s - self.reported_s > patience.silence_s:
            return Phase.STALLED, f"no report for over {patience.silence_s:g} s"
        if self.load.progress_age_s > patience.progress_s:
            return Phase.STALLED, f"no progress for over {patience.progress_s:g} s"
        if self.load.is_draining:
            return Phase.DRAINING, "takes no new requests"
        return Phase.READY, ""

    def candidate(self, prefix: Sequence[bytes] = ()) -> Candidate:
        """As routing sees it, for a prompt whose full blocks have these names."""
        return Candidate(
            card=self.card,
            state=NodeState(self.phase),
            load=self.load,
            num_routed=len(self.shares),
            routed_tokens=sum(share.tokens for share in self.shares),
            routed_blocks=sum(share.blocks for share in self.shares),
            num_cached_blocks=next((n for n, name in enumerate(prefix) if name not in self.cached), len(prefix)),
        )

    def book(self, num_tokens: int, *, uncached: int, computed: int, now_s: float) -> None:
        """A request of `num_tokens` was routed here: `uncached` of them need blocks, `computed` are computed here."""
        cached_blocks = (num_tokens - uncached) // self.card.layout.block_size
        self.shares.append(Share(now_s, computed, blocks_for(self.card, num_tokens + 1) - cached_blocks))


def block_names(joined: bytes) -> list[bytes]:
    """Names as they travel, strung together, one by one. A last one that is cut short names nothing."""
    ends = range(CACHE_NAME_BYTES, len(joined) + 1, CACHE_NAME_BYTES)
    return [joined[end - CACHE_NAME_BYTES : end] for end in ends]

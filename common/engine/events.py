"""What is said between a node's shell (event loop) and its engine thread, over two queues.

A *lease* is a set of blocks that a call owns while the scheduler does not: reserved and waiting for its
prompt's bytes (decode), or computed and held for its reader (prefill). Leases and requests share ids:
`Admit` turns a lease into a scheduled request, a request with `keep_blocks` turns into a lease at its end.
"""

from dataclasses import dataclass
from math import inf

import msgspec

from common.engine.request import NOBODY, EngineRequest, Progress
from common.messages import BlockHash, BlockId, BlockRef, HeldSequence, Origin, RequestId

# --- shell to engine ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reserve:
    """Lease blocks for these tokens, cached prefix first; queues until they fit. Answer: Reserved.

    `num_forks` requests will share them: a block for each is left beside running requests.
    """

    request: RequestId
    tokens: list[int]
    origin: Origin = NOBODY
    deadline_s: float = inf
    """On the engine's clock."""
    num_forks: int = 0


@dataclass(frozen=True, slots=True)
class Admit:
    """Schedule a request. If a lease of its id exists, the lease's blocks become its block table.

    `request.num_computed` says how many of its tokens already have their KV in those blocks. `forks` share what is
    computed of its first `num_shared` tokens as soon as it draws a token; until then they live and end with it.
    """

    request: EngineRequest
    forks: tuple[EngineRequest, ...] = ()
    num_shared: int = 0


@dataclass(frozen=True, slots=True)
class Release:
    """End whatever this id has: queued reservation, lease, waiting or running request. Idempotent."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class Probe:
    """Wake an idle engine so that it shows it lives: `EngineStats.last_progress_s` moves. No other answer."""


@dataclass(frozen=True, slots=True)
class Count:
    """Say what is held. Each is answered by one Counted, in order, by a broken engine too."""


@dataclass(frozen=True, slots=True)
class Announce:
    """Name the blocks of a running request that are full by now. Answer: Announced, with none if it does not run."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class PullTook:
    """A reader had the last `num_tokens` of a prompt so long after they were computed. No answer."""

    num_tokens: int
    seconds: float


Command = Reserve | Admit | Release | Probe | Count | Announce | PullTook

# --- engine to shell ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reserved:
    """The lease exists. The first `num_cached` tokens (whole blocks) are already there."""

    request: RequestId
    blocks: tuple[BlockId, ...]
    num_cached: int


@dataclass(frozen=True, slots=True)
class Stepped:
    """One engine step, everything it did."""

    progress: tuple[Progress, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """This request alone ended with an error inside the engine; all it held is free."""

    request: RequestId
    message: str


@dataclass(frozen=True, slots=True)
class Counted:
    """All that the engine holds at one moment. It knows nothing of calls: no sequence names its owner here.

    `used_blocks` have a reference, `owned_blocks` lie in the block table of a sequence.
    """

    sequences: tuple[HeldSequence, ...]
    num_blocks: int
    used_blocks: int
    owned_blocks: int
    host_blocks: int = 0
    """Contents in the host tier; nobody owns them."""


@dataclass(frozen=True, slots=True)
class Announced:
    """The request's leading blocks whose KV is complete. They are its own still: it may give them up at any time."""

    request: RequestId
    refs: tuple[BlockRef, ...]


@dataclass(frozen=True, slots=True)
class Starved:
    """No running request can grow while leases hold the rest of the pool: give a reservation back.

    Said once, and again if it still holds after a lease was released.
    """


@dataclass(frozen=True, slots=True)
class CacheChanged:
    """Contents that the pool came to offer to later prompts (True) or ceased to (False), in order."""

    changes: list[tuple[BlockHash, bool]]


Event = Reserved | Counted | Stepped | Failed | Starved | CacheChanged | Announced

# --- read by the shell at any time --------------------------------------------------------------------


class EngineStats(msgspec.Struct, frozen=True):
    """The engine as its thread last left it. Counts from `num_steps` on only grow.

    `num_waiting` are requests and reservations without a place, `num_waiting_tokens` what is still to be computed
    for all that are scheduled. `free_blocks` includes evictable ones. `tokens_per_s` are tokens computed per
    second of recent step time, prompt and output alike; `prompt_tokens_per_s` is what it could make of prompts beside
    what decodes now, 0 while that is not known. `last_progress_s` is the clock's time at the end of the
    last good step or at the last idle moment. `num_taken` are the requests and reservations taken in from the shell,
    `num_taken_tokens` what was to be computed for them.
    """

    num_waiting: int = 0
    num_running: int = 0
    num_waiting_tokens: int = 0
    free_blocks: int = 0
    leased_blocks: int = 0
    tokens_per_s: float = 0.0
    prompt_tokens_per_s: float = 0.0
    last_progress_s: float = 0.0
    num_steps: int = 0
    num_preemptions: int = 0
    num_generated_tokens: int = 0
    num_computed_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_failed: int = 0
    num_blocks_out: int = 0
    """Copied to the host tier."""
    num_blocks_in: int = 0
    """Copied back from it: each is a hit, counted in `num_cached_tokens` too."""
    num_taken: int = 0
    num_taken_tokens: int = 0

"""What is said between a node's shell (event loop) and its engine thread, over two queues.

A *lease* is a set of blocks that a call owns while the scheduler does not: reserved and waiting for its
prompt's bytes (decode), or computed and held for its reader (prefill). Leases and requests share ids:
`Admit` turns a lease into a scheduled request, a request with `keep_blocks` turns into a lease at its end.
"""

from dataclasses import dataclass

from common.engine.request import EngineRequest, Progress
from common.messages import BlockId, RequestId

# --- shell to engine ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reserve:
    """Lease blocks for these tokens, cached prefix first; queues until they fit. Answer: Reserved."""

    request: RequestId
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Admit:
    """Schedule a request. If a lease of its id exists, the lease's blocks become its block table.

    `request.num_computed` says how many of its tokens already have their KV in those blocks.
    """

    request: EngineRequest


@dataclass(frozen=True, slots=True)
class Release:
    """End whatever this id has: queued reservation, lease, waiting or running request. Idempotent."""

    request: RequestId


Command = Reserve | Admit | Release

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
class Starved:
    """A running request cannot grow while leases hold the rest of the pool: give a reservation back."""


Event = Reserved | Stepped | Failed | Starved

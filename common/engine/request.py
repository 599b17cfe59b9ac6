"""One request as the engine sees it, and the rules that end it. Plain data, no phases.

Only computed against total tokens: a fresh prompt has 0 computed, a decode request arrives with its
prompt computed by another node, a pre-empted one has lost its computed tokens.

What is made for each request in each step is a msgspec struct: frozen, at a tenth of a dataclass's price.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

import msgspec

from common.engine.policy import Ticket
from common.messages import BlockHash, BlockId, BlockRef, FinishReason, Origin, RequestId, Sampling

NOBODY = Origin()
"""Where there are no API keys, everybody."""


class Status(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class EngineRequest:
    """`tokens` is prompt plus output and grows; `blocks` is the block table, in order.

    `stop_after_first` ends the request after one new token whatever its limits (the prefill role).
    `keep_blocks`: at its natural end the block table passes to a lease of the same id instead of being freed.
    """

    id: RequestId
    tokens: list[int]
    num_prompt_tokens: int
    sampling: Sampling
    stop_after_first: bool = False
    keep_blocks: bool = False
    origin: Origin = NOBODY
    deadline_s: float = inf
    """On the engine's clock."""
    blocks: list[BlockId] = field(default_factory=list)
    hashes: list[BlockHash] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int = 0
    num_preemptions: int = 0
    num_announced: int = 0
    """With `keep_blocks`: blocks named to the reader so far."""
    pull_left_s: float = 0.0
    """With `keep_blocks`: what the reader still needs for those, by estimate."""
    turn: int = 0
    """Place in the one order in which requests and reservations first got blocks; set by the scheduler."""
    ticket: Ticket = field(default_factory=Ticket)
    """Its place among its tenant's; set by the scheduler."""
    status: Status = Status.WAITING

    @property
    def is_waiting(self) -> bool:
        return self.status is Status.WAITING

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    def next_chunk(self, most: int, block_size: int) -> "Chunk":
        """What comes next, at most `most` tokens; it ends with a block where it cannot reach the end."""
        start, total = self.num_computed, len(self.tokens)
        end = start + most
        if end >= total:
            return Chunk(self, start, total - start, True)
        aligned = end - end % block_size
        return Chunk(self, start, (aligned if aligned > start else end) - start, False)

    def finish_reason(self, max_model_len: int) -> FinishReason | None:
        """What the newest token ends, applied to every token alike, the hand-over token included."""
        if self.tokens[-1] in self.sampling.stop_token_ids:
            return FinishReason.STOP
        if self.num_output_tokens >= self.sampling.max_tokens or len(self.tokens) >= max_model_len:
            return FinishReason.LENGTH
        return None


class Chunk(msgspec.Struct, frozen=True):
    """One request's share of a step: tokens `start .. start + num_tokens`; `samples` if they reach the end."""

    request: EngineRequest
    start: int
    num_tokens: int
    samples: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    chunks: tuple[Chunk, ...]

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)


class Progress(msgspec.Struct, frozen=True):
    """What a step did for one request: tokens computed so far, and the new token if it drew one."""

    request: RequestId
    num_computed: int
    token: int | None = None
    finish: FinishReason | None = None
    num_cached: int = 0
    stopped: bool = False
    """True when the request has left the scheduler (finished, or `stop_after_first`)."""
    first_ready: int = 0
    ready: tuple[BlockRef, ...] = ()
    """With `keep_blocks`: blocks whose KV is complete since the last progress, from block index `first_ready`
    on. The first time that includes the cached prefix, the last time a block that is only partly filled."""

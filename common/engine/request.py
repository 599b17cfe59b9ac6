"""One request as the engine sees it, and the rules that end it. Plain data, no phases.

Only computed against total tokens: a fresh prompt has 0 computed, a decode request arrives with its
prompt computed by another node, a pre-empted one has lost its computed tokens.

What is made for each request in each step is a msgspec struct: frozen, at a tenth of a dataclass's price.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

import msgspec
from msgspec import structs

from common.engine.policy import Ticket
from common.kv_cache.block_pool import BlockPool
from common.messages import BlockHash, BlockId, BlockRef, Drawn, FinishReason, Origin, RequestId, Sampling

NOBODY = Origin()
"""Where there are no API keys, everybody."""
_MASK = (1 << 64) - 1


class Status(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class EngineRequest:
    """`tokens` is prompt plus output and grows; `blocks` is the block table, in order.

    `stop_after_first` ends the request after one new token whatever its limits (the prefill role).
    `keep_blocks`: at its natural end the block table passes to a lease of the same id instead of being freed.
    `also` are further draws from the logits of its first new token, for a request that ends with that one.
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
    also: tuple[Sampling, ...] = ()
    blocks: list[BlockId] = field(default_factory=list)
    copy_of: BlockId | None = None
    """A block whose beginning is computed and shared (a reference is held): it is copied into the table's next place
    before anything is written there. See `forks`."""
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

    @property
    def held_blocks(self) -> list[BlockId]:
        """All that it has a reference on."""
        return self.blocks if self.copy_of is None else [*self.blocks, self.copy_of]

    def take_blocks(self) -> list[BlockId]:
        """All of them, for the caller to free."""
        held, self.blocks, self.copy_of = self.held_blocks, [], None
        return held

    def announce(self, num_blocks: int, pool: BlockPool) -> tuple[int, tuple[BlockRef, ...]]:
        """With `keep_blocks`: where those of its first `num_blocks` begin that the reader does not know, and them."""
        first, self.num_announced = self.num_announced, num_blocks
        return first, tuple(map(pool.ref, self.blocks[first:num_blocks]))

    def next_chunk(self, most: int, block_size: int) -> "Chunk":
        """What comes next, at most `most` tokens; it ends with a block where it cannot reach the end."""
        start, total = self.num_computed, len(self.tokens)
        end = start + most
        if end >= total:
            return Chunk(self, start, total - start, 1 + len(self.also))
        aligned = end - end % block_size
        return Chunk(self, start, (aligned if aligned > start else end) - start, 0)

    def finish_reason(self, token: int, max_model_len: int) -> FinishReason | None:
        """What the newest token, `token`, ends; applied to every token alike, the hand-over token included."""
        if token in self.sampling.stop_token_ids:
            return FinishReason.STOP
        if self.num_output_tokens >= self.sampling.max_tokens or len(self.tokens) >= max_model_len:
            return FinishReason.LENGTH
        return None


class Chunk(msgspec.Struct, frozen=True):
    """One request's share of a step: tokens `start .. start + num_tokens`.

    `samples` is how many tokens are drawn after the last of them: 0 if they do not reach the end.
    """

    request: EngineRequest
    start: int
    num_tokens: int
    samples: int


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
    others: tuple[Drawn, ...] = ()
    """What was drawn for `also`."""
    logprob: float | None = None
    """Of `token`, with `Sampling.scored`; set by the loop, and so are those of `others`."""

    def scored(self, logprobs: Sequence[float]) -> "Progress":
        """With the log-probabilities of its token and of the others."""
        first, *rest = logprobs
        others = tuple(structs.replace(one, logprob=score) for one, score in zip(self.others, rest, strict=True))
        return structs.replace(self, logprob=first, others=others)


def sampling_of(sampling: Sampling, choice: int) -> Sampling:
    """How one of several answers to a prompt is drawn: choice 0 as if it were alone, each other by noise of its own."""
    return structs.replace(sampling, seed=choice_seed(sampling.seed, choice)) if choice else sampling


def choice_seed(seed: int, choice: int) -> int:
    """A fixed function of both, the seed itself for choice 0; splitmix64's finaliser (Steele, Lea, Flood 2014)."""
    if choice == 0:
        return seed
    word = (seed + choice * 0x9E3779B97F4A7C15) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)

"""How much room sequences take, and which of them a pool can serve. Pure."""

from dataclasses import dataclass

from common.engine.leases import Lease
from common.engine.request import EngineRequest
from common.errors import ContextLengthError, RequestError


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one pool and model; `admit_whole` as in the scheduler's rule 4."""

    num_blocks: int
    block_size: int
    max_model_len: int
    admit_whole: bool

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def fits_alone(self, num_tokens_max: int) -> bool:
        """Whether a request that may reach so many tokens can finish here; the last one drawn needs no block."""
        return self.blocks_for(num_tokens_max - 1) <= self.num_blocks

    def is_whole(self, request: EngineRequest) -> bool:
        """Whether it gets at once all the blocks it can ever need."""
        return self.admit_whole or request.keep_blocks

    def longest(self, request: EngineRequest) -> int:
        """Tokens the request can reach, all it was given and at least one more included."""
        limit = min(request.num_prompt_tokens + request.sampling.max_tokens, self.max_model_len)
        return len(request.tokens) + 1 if request.stop_after_first else max(limit, len(request.tokens) + 1)

    def check_reservation(self, num_tokens: int) -> None:
        """ContextLengthError if the pool is too small for it."""
        if not num_tokens or not self.fits_alone(num_tokens + 1):
            raise ContextLengthError(f"no pool of {self.num_blocks} blocks can hold {num_tokens} tokens")

    def check(self, request: EngineRequest, lease: Lease | None) -> None:
        """RequestError if it is not whole or could never finish."""
        num_tokens, longest = len(request.tokens), self.longest(request)
        if not 0 <= request.num_computed < num_tokens:
            raise RequestError(f"{request.num_computed} of {num_tokens} tokens computed: none left to run")
        if num_tokens >= self.max_model_len or not self.fits_alone(longest):
            raise ContextLengthError(
                f"{num_tokens} tokens that may become {longest} exceed {self.num_blocks} blocks of "
                f"{self.block_size} or a context of {self.max_model_len}"
            )
        if lease is not None and self.blocks_for(request.num_computed) > len(lease.blocks):
            raise RequestError(f"{request.num_computed} tokens computed in {len(lease.blocks)} blocks")
        if lease is not None and request.keep_blocks:
            raise RequestError("a request that keeps its blocks gets them whole (rule 4), it brings none")

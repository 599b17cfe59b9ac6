"""What a node can take on: the checks that both roles make before anything is held."""

import math
from dataclasses import dataclass

from common.errors import ContextLengthError, IncompatibleError, OverloadedError, RequestError
from common.messages import Priority, Sampling

_SHARES = {Priority.HIGH: 1.0, Priority.NORMAL: 0.9, Priority.LOW: 0.5}
"""Of the queue's bounds: what a class may fill. The rest is kept free for higher ones."""
MAX_RETRY_AFTER_S = 60.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Fixed for one incarnation. `num_blocks * block_size` tokens is all that can ever be in the pool."""

    model_digest: str
    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int

    def check(
        self,
        *,
        model_digest: str,
        tokens: list[int],
        num_prompt_tokens: int,
        sampling: Sampling,
        stops_after_first: bool = False,
    ) -> None:
        """Raise the RequestError (or IncompatibleError) that names what is wrong with a request.

        The longest sequence that a request can become here must fit the pool alone, so that every admitted
        request is able to finish. On a prefill node that is the prompt (`stops_after_first`).
        """
        if model_digest != self.model_digest:
            raise IncompatibleError(f"the call is for model {model_digest}, this node serves {self.model_digest}")
        if not tokens or not 0 < num_prompt_tokens <= len(tokens):
            raise RequestError("the prompt must hold at least one token")
        if sampling.max_tokens < 1 or sampling.top_k < 0 or not (sampling.temperature >= 0 and 0 < sampling.top_p <= 1):
            raise RequestError("sampling needs max_tokens >= 1, temperature >= 0, top_k >= 0 and 0 < top_p <= 1")
        if len(tokens) - num_prompt_tokens >= sampling.max_tokens:
            raise RequestError("every token that was asked for is already delivered")
        if len(tokens) >= self.max_model_len:
            raise ContextLengthError(
                f"the prompt has {len(tokens)} tokens; this model takes at most {self.max_model_len - 1} "
                f"(context of {self.max_model_len}, one left for the answer)"
            )
        if min(tokens) < 0 or max(tokens) >= self.vocab_size:
            wrong = next(token for token in tokens if not 0 <= token < self.vocab_size)
            raise RequestError(f"token id {wrong} is outside the vocabulary of {self.vocab_size}")
        longest = len(tokens) + 1
        if not stops_after_first:
            longest = min(num_prompt_tokens + sampling.max_tokens, self.max_model_len)
        # The last token drawn never has its KV computed.
        if longest - 1 > self.num_blocks * self.block_size:
            raise ContextLengthError(
                f"prompt and answer may reach {longest} tokens, the KV cache of this node holds "
                f"{self.num_blocks * self.block_size}; ask for fewer tokens"
            )


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """How many requests, and how many tokens still to be computed, may wait."""

    max_waiting: int
    max_waiting_tokens: int

    def check(self, priority: Priority, *, num_waiting: int, num_waiting_tokens: int, tokens_per_s: float) -> None:
        """OverloadedError if no more of this class may join so many that wait.

        It says when to try again: when what waits now is computed at the present speed.
        """
        share = _SHARES[priority]
        if num_waiting >= math.ceil(share * self.max_waiting):
            what = f"{num_waiting} requests are waiting"
        elif num_waiting_tokens >= math.ceil(share * self.max_waiting_tokens):
            what = f"{num_waiting_tokens} tokens are waiting to be computed"
        else:
            return
        wait_s = num_waiting_tokens / tokens_per_s if tokens_per_s > 0 else 0.0
        raise OverloadedError(
            f"{what}, no more of priority {priority} are taken", retry_after_s=min(max(1.0, wait_s), MAX_RETRY_AFTER_S)
        )

from math import nan

import pytest

from common.engine.limits import Limits
from common.errors import RequestError
from common.messages import Sampling

LIMITS = Limits(model_digest="m", max_model_len=64, vocab_size=10, num_blocks=4, block_size=16)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=0, seed=1),
        Sampling(max_tokens=1, seed=1, temperature=-1.0),
        Sampling(max_tokens=1, seed=1, temperature=nan),
        Sampling(max_tokens=1, seed=1, top_p=0.0),
        Sampling(max_tokens=1, seed=1, top_p=nan),
        Sampling(max_tokens=1, seed=1, top_k=-1),
    ],
)
def test_sampling_that_cannot_draw_is_refused(sampling: Sampling) -> None:
    with pytest.raises(RequestError, match="sampling needs"):
        LIMITS.check(model_digest="m", tokens=[1], num_prompt_tokens=1, sampling=sampling)

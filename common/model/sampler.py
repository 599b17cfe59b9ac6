"""From logits to tokens. A draw depends on its own logits, seed and position: not on the batch, not on history.

Greedy at temperature 0. Otherwise Gumbel-max (Gumbel 1954; Maddison et al., "A* Sampling", 2014): the token
with the largest `logit / temperature + noise` is a sample of the softmax. Noise comes from Philox4x32-10
(Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), a function of (seed, position, token
id) and nothing else, so filtering before or after makes no difference and last-bit differences between logits
hardly ever change the draw.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from common.messages import Sampling

Floats = npt.NDArray[np.float64]
Words = npt.NDArray[np.uint64]

_MASK = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

_NOISE_SPAN = 19.5  # uniforms lie in [2^-24, 1 - 2^-24]: noise in [-2.82, 16.64]


def sample(logits: npt.NDArray[np.float32], rows: Sequence[tuple[Sampling, int]]) -> list[int]:
    """One token for each row of `logits` [rows, vocab]; `rows` holds its settings and the position it fills."""
    best = logits.argmax(axis=1).tolist()  # ties: the lowest id
    return [
        greedy if sampling.temperature == 0 else draw(row, greedy, sampling, position)
        for greedy, row, (sampling, position) in zip(best, logits, rows, strict=True)
    ]


def draw(logits: npt.NDArray[np.float32], best: int, sampling: Sampling, position: int) -> int:
    """Sample one row [vocab], `best` being its argmax."""
    # Noise spans 19.5 at most, so a token further below the best can never win: most of a vocabulary is
    # out before any of it costs an exponential.
    top = float(logits[best])
    tokens = np.flatnonzero(logits >= top - _NOISE_SPAN * sampling.temperature)
    scores = (logits[tokens].astype(np.float64) - top) / sampling.temperature
    keep = _filtered(logits, scores, sampling)
    tokens, scores = tokens[keep], scores[keep]
    return int(tokens[np.argmax(scores + gumbel(sampling.seed, position, tokens))])


def _filtered(logits: npt.NDArray[np.float32], scores: Floats, sampling: Sampling) -> npt.NDArray[np.bool_]:
    """Which candidates top_k and then top_p leave; tokens tied with the last one kept are kept.

    `scores` are the candidates' (logit - best) / temperature; the masses are of the whole vocabulary.
    """
    keep = np.ones(scores.shape, np.bool_)
    everything = logits
    if 0 < sampling.top_k < logits.shape[0]:
        smallest = np.partition(logits, logits.shape[0] - sampling.top_k)[logits.shape[0] - sampling.top_k]
        top = float(logits.max())
        keep &= scores >= (float(smallest) - top) / sampling.temperature
        everything = logits[logits >= smallest]
    if sampling.top_p < 1:
        relative = (everything.astype(np.float64) - float(everything.max())) / sampling.temperature
        wanted = sampling.top_p * float(np.exp(relative).sum())
        ordered = np.sort(scores[keep])[::-1]
        needed = int(np.searchsorted(np.cumsum(np.exp(ordered)), wanted))  # tokens before the one that reaches it
        keep &= scores >= ordered[min(needed, ordered.shape[0] - 1)]
    return keep


def gumbel(seed: int, position: int, tokens: npt.NDArray[np.int64]) -> Floats:
    """The noise of these token ids at this position: standard Gumbel, finite."""
    return -np.log(-np.log(uniforms(seed, position, tokens)))


def uniforms(seed: int, position: int, tokens: npt.NDArray[np.int64]) -> Floats:
    """Numbers strictly inside (0, 1): the middles of 2^23 equal intervals, exact in single precision too."""
    word = philox(
        counter=(tokens.astype(np.uint64), np.uint64(position & 0xFFFFFFFF), np.uint64(position >> 32), np.uint64(0)),
        key=(seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF),
    )[0]
    return ((word >> np.uint64(9)).astype(np.float64) + 0.5) * 2.0**-23


def philox(
    counter: tuple[Words | np.uint64, Words | np.uint64, Words | np.uint64, Words | np.uint64], key: tuple[int, int]
) -> tuple[Words, Words, Words, Words]:
    """Philox4x32-10: four 32-bit words for each 128-bit counter and 64-bit key, held in 64-bit integers."""
    c0, c1, c2, c3 = np.broadcast_arrays(*counter)
    for round_number in range(_ROUNDS):
        k0, k1 = (np.uint64((part + weyl * round_number) & 0xFFFFFFFF) for part, weyl in zip(key, _WEYL, strict=True))
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]  # 32 x 32 bits: exact in 64
        c0, c1, c2, c3 = (
            (product1 >> _WORD) ^ c1 ^ k0,
            product1 & _MASK,
            (product0 >> _WORD) ^ c3 ^ k1,
            product0 & _MASK,
        )
    return c0, c1, c2, c3

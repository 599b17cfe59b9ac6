"""From logits to tokens. A draw depends on its own logits, seed and position: not on the batch, not on history.

Greedy at temperature 0. Otherwise Gumbel-max (Gumbel 1954; Maddison et al., "A* Sampling", 2014): the token
with the largest `logit / temperature + noise` is a sample of the softmax. Noise comes from Philox
(`philox.uniforms`), a function of seed, position and token id and nothing else, so filtering before or after
makes no difference and last-bit differences between logits hardly ever change the draw.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from common.messages import Sampling
from common.model.philox import uniforms, uniforms_below

Floats = npt.NDArray[np.float64]
Logits = npt.NDArray[np.float32]

_NOISE_SPAN = 19.5  # uniforms lie in [2^-24, 1 - 2^-24], so noise in [-2.82, 16.64]
_COLDEST = 1e-20  # in single precision what is below would overflow
_DENSE_SHARE = 16  # above 1/16 of the vocabulary it is cheaper to draw noise for all of it


def sample(logits: Logits, rows: Sequence[tuple[Sampling, int]]) -> list[int]:
    """One token for each row of `logits` [rows, vocab]; `rows` holds its settings and the position it fills."""
    out: list[int] = logits.argmax(axis=1).tolist()  # ties: the lowest id
    sparse: list[tuple[int, npt.NDArray[np.int64], Floats]] = []
    for index, (sampling, position) in enumerate(rows):
        if sampling.temperature == 0:
            continue
        tokens, scores = candidates(logits[index], out[index], sampling)
        if tokens.shape[0] * _DENSE_SHARE > logits.shape[1]:
            noise = gumbel(uniforms_below(logits.shape[1], sampling.seed, position)[tokens])
            out[index] = int(tokens[np.argmax(scores + noise)])
        else:
            sparse.append((index, tokens, scores))
    if sparse:
        # One pass for all such rows: a pass over the few dozen candidates of one is mostly overhead
        sizes = [tokens.shape[0] for _, tokens, _ in sparse]
        keys = [(rows[index][0].seed, rows[index][1]) for index, _, _ in sparse]
        noise = gumbel(uniforms(np.concatenate([tokens for _, tokens, _ in sparse]), keys, sizes))
        for (index, tokens, scores), end in zip(sparse, np.cumsum(sizes).tolist(), strict=True):
            out[index] = int(tokens[np.argmax(scores + noise[end - tokens.shape[0] : end])])
    return out


def gumbel(numbers: Floats) -> Floats:
    """Uniform numbers to standard Gumbel noise."""
    noise: Floats = -np.log(-np.log(numbers))
    return noise


def candidates(logits: Logits, best: int, sampling: Sampling) -> tuple[npt.NDArray[np.int64], Floats]:
    """The tokens of one row [vocab] that pass the filters and can win, and their (logit - best) / temperature.

    Temperature first, then top_k, then top_p over what that leaves; tokens tied with the last one kept are kept.
    """
    # Noise spans 19.5 at most, so a token further below the best can never win
    top = logits[best]
    tokens = np.flatnonzero(logits >= top - np.float32(_NOISE_SPAN * sampling.temperature))
    row = logits[tokens]
    keep = np.ones(row.shape, np.bool_)
    everything = logits  # what top_p counts the mass of: hopeless tokens too
    if 0 < sampling.top_k < logits.shape[0]:
        smallest = _kth_largest(row if row.shape[0] >= sampling.top_k else logits, sampling.top_k)
        keep = row >= smallest
        if sampling.top_p < 1:
            everything = logits[logits >= smallest]
    if sampling.top_p < 1:
        wanted = sampling.top_p * float(_weights(everything, top, sampling.temperature).sum(dtype=np.float64))
        ordered = np.sort(row[keep])[::-1]
        masses = np.cumsum(_weights(ordered, top, sampling.temperature), dtype=np.float64)
        keep &= row >= ordered[min(int(np.searchsorted(masses, wanted)), ordered.shape[0] - 1)]
    return tokens[keep], (row[keep].astype(np.float64) - float(top)) / sampling.temperature


def _kth_largest(values: Logits, k: int) -> np.float32:
    smallest: np.float32 = np.partition(values, values.shape[0] - k)[values.shape[0] - k]
    return smallest


def _weights(logits: Logits, top: np.float32, temperature: float) -> Logits:
    """Softmax weights relative to the best token's."""
    weights: Logits = np.exp(np.maximum((logits - top) / np.float32(max(temperature, _COLDEST)), np.float32(-100)))
    return weights

"""Random numbers as a function: of a seed, a position in the sequence and a token id.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): the seed is the key; the
counter holds token id / 4 and the position; a token takes the word of its id mod 4. So any subset of the
vocabulary can be drawn for, in any order, on any node.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from common import telemetry
from common.errors import ConfigError
from common.native.build import SOURCES, library

log = telemetry.logger(__name__)

Words = npt.NDArray[np.uint64]
"""32-bit words, held in 64 bits so that products are exact."""

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_SOURCE = SOURCES / "philox.cpp"


def uniforms(
    tokens: npt.NDArray[np.int64], keys: Sequence[tuple[int, int]], sizes: Sequence[int]
) -> npt.NDArray[np.float64]:
    """Numbers for `tokens`: the first sizes[0] under keys[0] = (seed, position), and so on. See `_to_unit`."""
    columns = np.array([_split(seed) + _split(position) for seed, position in keys], np.uint64)
    key0, key1, low, high = np.repeat(columns, sizes, axis=0).T
    ids = tokens.astype(np.uint64)
    words = philox((ids >> np.uint64(2), low, high, np.zeros_like(ids)), (key0, key1))
    return _to_unit(np.choose(tokens & 3, words))


def uniforms_below(num_tokens: int, seed: int, position: int) -> npt.NDArray[np.float64]:
    """Numbers for token ids 0 .. num_tokens under one seed and position, at a quarter of the work or much less."""
    words = _native_words if kernel() else _words
    return _to_unit(words(-(-num_tokens // 4), seed, position).reshape(-1)[:num_tokens])


def _words(num_counters: int, seed: int, position: int) -> npt.NDArray[np.integer]:
    counters = np.arange(num_counters, dtype=np.uint64)
    low, high = (np.full_like(counters, part) for part in _split(position))
    key0, key1 = (np.full(1, part, np.uint64) for part in _split(seed))
    return np.stack(philox((counters, low, high, np.zeros_like(counters)), (key0, key1)), axis=1)


def _native_words(num_counters: int, seed: int, position: int) -> npt.NDArray[np.integer]:
    native = kernel()
    assert native is not None
    out = np.empty((num_counters, 4), np.uint32)
    native(*_split(seed), *_split(position), num_counters, out.ctypes.data)
    return out


@functools.cache
def kernel() -> Callable[..., None] | None:
    """The compiled loop, or None where there is no compiler; compiles at the first call (a second, once)."""
    try:
        function = ctypes.CDLL(str(library(_SOURCE))).baton_philox
    except (ConfigError, OSError) as error:
        log.info("draws without a compiled kernel", reason=str(error).splitlines()[0])
        return None
    function.argtypes = (*[ctypes.c_uint32] * 4, ctypes.c_int64, ctypes.c_void_p)
    function.restype = None
    return cast("Callable[..., None]", function)


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, Words, Words, Words]:
    """Four words for each counter of four words under a key of two."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = (product1 >> _HALF) ^ c1 ^ k0, product1 & _LOW
        c2, c3 = (product0 >> _HALF) ^ c3 ^ k1, product0 & _LOW
        k0, k1 = (k0 + np.uint64(_WEYL[0])) & _LOW, (k1 + np.uint64(_WEYL[1])) & _LOW
    return c0, c1, c2, c3


def _split(number: int) -> tuple[int, int]:
    """The low 64 bits of any integer as two words, low one first."""
    return number & 0xFFFFFFFF, (number >> 32) & 0xFFFFFFFF


def _to_unit(words: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
    """Strictly inside (0, 1): the middles of 2^23 equal intervals, exact in single precision too."""
    numbers: npt.NDArray[np.float64] = ((words >> 9).astype(np.float64) + 0.5) * 2.0**-23
    return numbers

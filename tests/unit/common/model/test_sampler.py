"""Draws: known Philox answers, the right distribution, and nothing but logits, seed and position counting."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.messages import Sampling
from common.model import sampler
from common.model.philox import kernel, philox, uniforms, uniforms_below
from common.model.sampler import sample

VOCAB_SIZE = 1000
_random = np.random.default_rng(3)
LOGITS = _random.normal(0, 3, VOCAB_SIZE).astype(np.float32)


def settings_of(**changes: float) -> Sampling:
    return Sampling(max_tokens=1, **{"seed": 5, "temperature": 1.0, **changes})  # type: ignore[arg-type]


def drawn(logits: np.ndarray, position: int, **changes: float) -> int:
    return sample(logits[None], [(settings_of(**changes), position)])[0]


def draws(logits: np.ndarray, count: int, **changes: float) -> list[int]:
    """One draw at each of the positions 0 .. count."""
    return sample(np.tile(logits, (count, 1)), [(settings_of(**changes), i) for i in range(count)])


def gumbel(seed: int, position: int, tokens: np.ndarray) -> np.ndarray:
    return sampler.gumbel(uniforms(tokens, [(seed, position)], [len(tokens)]))


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # the known answers that come with Random123, the authors' own library
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, int, int, int]
) -> None:
    c0, c1, c2, c3, k0, k1 = (np.array([word], np.uint64) for word in (*counter, *key))
    words = philox((c0, c1, c2, c3), (k0, k1))
    assert tuple(int(word[0]) for word in words) == expected


def test_uniforms_lie_strictly_inside_and_are_exact_in_single_precision() -> None:
    numbers = uniforms_below(1 << 19, 1, 2)
    assert 0 < numbers.min() < 2e-5
    assert 1 > numbers.max() > 1 - 2e-5
    assert np.array_equal(numbers.astype(np.float32).astype(np.float64), numbers)
    assert (1 << 23) * float(np.float32(1 - 2.0**-24)) < 1 << 23  # the largest there can be is not rounded to 1


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.integers(1, 99))
def test_the_compiled_kernel_gives_the_same_numbers(seed: int, position: int, count: int) -> None:
    if kernel() is None:
        pytest.skip("no C++ compiler: the Philox kernel cannot be built")
    plain = uniforms(np.arange(count), [(seed, position)], [count])
    assert np.array_equal(uniforms_below(count, seed, position), plain)


def test_a_tokens_number_is_the_same_however_it_is_asked_for() -> None:
    dense = uniforms_below(1001, 2**63 + 5, 2**33 + 1)
    tokens = np.array([1000, 3, 4, 999, 0])
    both = uniforms(np.concatenate([tokens, tokens]), [(2**63 + 5, 2**33 + 1), (5, 1)], [5, 5])
    assert np.array_equal(both[:5], dense[tokens])
    assert not np.isin(both[5:], both[:5]).any()


def test_noise_is_standard_gumbel() -> None:
    noise = gumbel(9, 4, np.arange(200_000))
    assert abs(noise.mean() - np.euler_gamma) < 0.01
    assert abs(noise.std() - np.pi / np.sqrt(6)) < 0.01


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.integers(0, 2**40))
def test_another_seed_or_position_gives_other_noise(seed: int, position: int, other: int) -> None:
    tokens = np.arange(8)
    noise = gumbel(seed, position, tokens)
    assert (other == position) == np.array_equal(noise, gumbel(seed, other, tokens))
    assert not np.array_equal(noise, gumbel(seed ^ (1 << 40), position, tokens))
    assert np.array_equal(noise[3:5], gumbel(seed, position, tokens[3:5]))  # a token's noise is its own


@pytest.mark.parametrize(("vocab_size", "count"), [(17, 2000), (500, 20_000)], ids=["dense", "sparse"])
@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_draws_follow_the_softmax(temperature: float, vocab_size: int, count: int) -> None:
    """A chi-square test with 16 degrees of freedom; chance passes its bound once in 10^5."""
    logits = np.full(vocab_size, -np.inf, np.float32)
    logits[:17] = np.linspace(-2, 3, 17)
    weights = np.exp(logits[:17] / temperature)
    expected = weights / weights.sum() * count
    counts = np.bincount(draws(logits, count, temperature=temperature), minlength=17)
    cells = expected > 5
    assert ((counts - expected) ** 2 / expected)[cells].sum() < 16 + 4.5 * np.sqrt(2 * 16) + 6


def test_greedy_takes_the_best_and_the_lowest_id_of_a_tie() -> None:
    logits = np.array([[1, 7, 7, 0], [3, 2, 1, 0]], np.float32)
    assert sample(logits, [(settings_of(temperature=0), 4), (settings_of(temperature=0), 9)]) == [1, 0]


def filtered_plainly(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """The same filters, written out over the whole vocabulary."""
    scaled = logits.astype(np.float64) / sampling.temperature
    order = np.argsort(-scaled, kind="stable")
    kept = order[: sampling.top_k] if sampling.top_k else order
    kept = np.flatnonzero(scaled >= scaled[kept].min())
    weights = np.exp(scaled[kept] - scaled.max())
    by_weight = np.sort(weights)[::-1]
    needed = min(int((np.cumsum(by_weight) / by_weight.sum() < sampling.top_p).sum()), len(kept) - 1)
    return kept[weights >= by_weight[needed]]


@settings(max_examples=200)
@given(
    st.integers(0, 2**32),
    st.sampled_from([0.1, 0.7, 1.0, 3.0]),
    st.sampled_from([0, 1, 2, 50, 999, 1000, 5000]),
    st.sampled_from([0.01, 0.5, 0.9, 0.999, 1.0]),
)
def test_a_draw_is_the_best_of_noise_and_logit_over_the_filtered_tokens(
    seed: int, temperature: float, top_k: int, top_p: float
) -> None:
    sampling = Sampling(max_tokens=1, seed=seed, temperature=temperature, top_k=top_k, top_p=top_p)
    kept = filtered_plainly(LOGITS, sampling)
    scores = LOGITS[kept].astype(np.float64) / temperature + gumbel(seed, 3, kept)
    assert sample(LOGITS[None], [(sampling, 3)]) == [kept[np.argmax(scores)]]


def test_filters_leave_only_the_tokens_they_name() -> None:
    order = np.argsort(-LOGITS)
    assert set(draws(LOGITS, 300, top_k=3, temperature=5.0)) == set(order[:3].tolist())
    assert set(draws(LOGITS, 50, top_p=1e-9, temperature=5.0)) == {int(order[0])}


def test_a_draw_does_not_depend_on_the_batch() -> None:
    rows = _random.normal(0, 3, (6, VOCAB_SIZE)).astype(np.float32)
    asked = [
        (Sampling(max_tokens=1, seed=i, temperature=t, top_p=p, top_k=k), 10 * i)
        for i, (t, p, k) in enumerate([(0, 1, 0), (1, 0.9, 0), (1, 1, 5), (0.2, 1, 0), (2, 0.5, 50), (1, 1, 0)])
    ]
    together = sample(rows, asked)
    assert [sample(rows[i : i + 1], asked[i : i + 1])[0] for i in range(6)] == together
    assert sample(rows[::-1], asked[::-1]) == together[::-1]


def test_last_bits_hardly_ever_change_a_draw() -> None:
    noisy = LOGITS + _random.normal(0, 1e-5, VOCAB_SIZE).astype(np.float32)
    assert sum(a != b for a, b in zip(draws(LOGITS, 500), draws(noisy, 500), strict=True)) <= 1


def test_a_seed_of_any_size_is_taken() -> None:
    assert drawn(LOGITS, 1, seed=-1) == drawn(LOGITS, 1, seed=2**64 - 1)


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e4])
def test_extreme_temperatures_draw_a_token(temperature: float) -> None:
    token = drawn(LOGITS, 2, temperature=temperature)
    assert 0 <= token < VOCAB_SIZE
    if temperature < 1:
        assert token == LOGITS.argmax()

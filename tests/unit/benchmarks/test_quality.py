"""The measure of quality says the same of an engine as of transformers, and sees what quantisation does."""

from pathlib import Path

import numpy as np
import pytest

from tests.benchmarks.quality import ANSWER_TOKENS, Engine, Next, Simulated, Task, load_engine
from tests.tiny_models import save_model

_random = np.random.default_rng(3)
PASSAGES = [_random.integers(3, 256, length).tolist() for length in (40, 17, 64)]
PROMPTS = [_random.integers(3, 256, length).tolist() for length in (5, 20, 16)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return load_engine(folder, "none")


@pytest.fixture(scope="module")
def task(folder: Path, engine: Engine) -> Task:
    return Task(PASSAGES, engine.answers(PROMPTS), Next.of(Simulated(folder, "none"), PASSAGES))


def test_an_engine_in_fp32_agrees_with_transformers_everywhere(task: Task, engine: Engine) -> None:
    assert [len(dialogue) - len(prompt) for dialogue, prompt in zip(task.dialogues, PROMPTS, strict=True)] == (
        [ANSWER_TOKENS] * 3
    )
    row = task.row(engine, "engine", "none", "fp32")
    assert (row.agreement, row.answer_agreement, row.equal_tokens, row.whole_answers) == (1.0, 1.0, ANSWER_TOKENS, 3)


def test_perplexity_is_that_of_the_true_next_tokens(task: Task, folder: Path) -> None:
    likelihoods = []
    for _, _, logits in Simulated(folder, "none").pieces(PASSAGES[:1]):
        shares = np.exp(logits.astype(np.float64)) / np.exp(logits.astype(np.float64)).sum(-1, keepdims=True)
        likelihoods += [np.log(shares[place, token]) for place, token in enumerate(PASSAGES[0][1:])]
    found = Next.of(Simulated(folder, "none"), PASSAGES[:1])
    assert np.allclose(found.log_likelihoods[0][:-1], likelihoods)
    assert np.isnan(found.log_likelihoods[0][-1])


def test_fewer_bits_and_rounded_activations_are_seen(task: Task, folder: Path) -> None:
    plain = task.row(Simulated(folder, "none"), "", "", "")
    rounded = task.row(Simulated(folder, "none", lambda name: True), "", "", "")
    coarse = task.row(Simulated(folder, "int4"), "", "", "")
    assert plain.agreement == plain.answer_agreement == 1
    assert coarse.agreement < rounded.agreement < 1
    assert coarse.equal_tokens < rounded.equal_tokens

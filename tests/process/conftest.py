"""Real processes on free ports with a tiny model made once a run."""

import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from tests.process.cluster import SMALL, BatonUp
from tests.process.questions import LENGTHS, Question, questions


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama of half a megabyte, a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    program = Path(__file__).with_name("tiny_model.py")
    subprocess.run([sys.executable, str(program), str(folder)], check=True, capture_output=True, timeout=60)
    return folder


@pytest.fixture(scope="session")
def tiny_questions(tiny_model: Path) -> list[Question]:
    """Two of each length."""
    return questions(tiny_model, LENGTHS * 2, num_tokens=24)


@pytest.fixture(scope="session")
def short_questions(tiny_model: Path) -> list[Question]:
    """Short prompts with long answers: admitted together, they outgrow a small pool."""
    return questions(tiny_model, (1, 15, 16, 17, 31, 32, 33, 48) * 4, num_tokens=80)


@pytest.fixture
def baton_up(tiny_model: Path, tmp_path: Path) -> Callable[..., BatonUp]:
    """`baton_up("--prefill", "0")`: a cluster of the tiny model with small pools and more flags, not yet started."""

    def make(*flags: str, prefix: tuple[str, ...] = ()) -> BatonUp:
        return BatonUp("--model", str(tiny_model), *SMALL, *flags, log_dir=tmp_path / "logs", prefix=prefix)

    return make


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def standing_pair(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[BatonUp]:
    """One prefill and one decode node, shared by tests that leave a cluster as they found it.

    Such tests run in the session's loop: `pytest.mark.asyncio(loop_scope="session")`.
    """
    async with BatonUp("--model", str(tiny_model), *SMALL, log_dir=tmp_path_factory.mktemp("pair")) as up:
        yield up


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def standing_pairs(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[BatonUp]:
    """The same with two prefill and two decode nodes, and a gateway that takes its time to end."""
    flags = (*SMALL, "--prefill", "2", "--decode", "2")
    up = BatonUp("--model", str(tiny_model), *flags, log_dir=tmp_path_factory.mktemp("pairs"))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("BATON_GATEWAY_DRAIN_S", "60")
        await up.start()
    async with up:
        yield up


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def standing_demo(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[BatonUp]:
    """What `baton up` without any flag starts: the demo model on one prefill and one decode node."""
    async with BatonUp(log_dir=tmp_path_factory.mktemp("demo")) as up:
        yield up

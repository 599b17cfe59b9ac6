"""Real processes on free ports with a tiny model made once a run."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.process.cluster import BatonUp

_SMALL = ("--kv-cache-memory", "16MiB", "--threads", "1")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama of half a megabyte, a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    program = Path(__file__).with_name("tiny_model.py")
    subprocess.run([sys.executable, str(program), str(folder)], check=True, capture_output=True, timeout=60)
    return folder


@pytest.fixture
def baton_up(tiny_model: Path, tmp_path: Path) -> Callable[..., BatonUp]:
    """`baton_up("--prefill", "0")`: a cluster of the tiny model with small pools and more flags, not yet started."""

    def make(*flags: str, prefix: tuple[str, ...] = ()) -> BatonUp:
        return BatonUp("--model", str(tiny_model), *_SMALL, *flags, log_dir=tmp_path / "logs", prefix=prefix)

    return make

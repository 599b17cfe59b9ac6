"""Models on our kernels alone answer as transformers does, from a packed file, without its modules."""

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from common.config import EngineConfig, ModelConfig
from common.errors import ConfigError
from common.messages import Incarnation
from common.model import packed_file
from common.model.packing import Prepared
from common.model.prepare import prepare
from common.model.prepared import UnpreparedError, open_prepared, read_prepared
from common.model.program import unavailable
from common.model.program_runner import ProgramRunner, program_runner
from common.model.quantization import Quantization
from common.model.recipe import LOWERED
from common.model.store import no_progress
from common.native.build import cache_dir
from tests.contract.model_oracle import (
    FAST_FAMILIES,
    SEEDS,
    assert_choices_share_blocks_and_are_right,
    assert_rows_keep_their_bits,
    oracle,
    serve,
    whole_plan,
)
from tests.tiny_models import save_model

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=unavailable() or "")

FAMILIES = [pytest.param(name, marks=() if name in FAST_FAMILIES else pytest.mark.slow) for name in sorted(LOWERED)]
WHOLE_POOL = 4 << 20
"""Bytes: more blocks than all prompts need together."""
BOTH = ("float32", "bfloat16")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda family: save_model(family, tmp_path_factory.mktemp(family), seed=SEEDS.get(family, 0)))


Make = Callable[..., ProgramRunner]


@pytest.fixture(scope="module")
def make_runner(folder_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Make:
    scratch = tmp_path_factory.mktemp("prepared")

    @cache
    def file_of(family: str, dtype: str, quantization: Quantization) -> Path:
        path = scratch / f"{family}-{dtype}-{quantization}"
        prepare(folder_of(family), path, dtype=dtype, quantization=quantization)
        return path

    def make(
        family: str,
        *,
        dtype: str = "float32",
        quantization: Quantization = "none",
        pool_bytes: int = WHOLE_POOL,
        host_bytes: int = 0,
        num_threads: int = 1,
        kv_cache_dtype: str = "auto",
    ) -> ProgramRunner:
        opened = read_prepared(file_of(family, dtype, quantization), digest="d", quantization=quantization)
        model = ModelConfig(model="tiny", dtype=dtype, kv_cache_dtype=kv_cache_dtype)  # type: ignore[arg-type]
        engine = EngineConfig(kv_cache_memory=pool_bytes, kv_host_memory=host_bytes)
        runner, memory = program_runner(opened, model, engine, Incarnation("0" * 32), num_threads=num_threads)
        memory.blocks.view(np.uint16)[:] = 0x7FC0  # NaN in both types: whoever reads what nobody wrote shows it
        return runner

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_equal_those_of_transformers(family: str, make_runner: Make, folder_of: Callable[[str], Path]) -> None:
    runner = make_runner(family)
    answers = serve(runner, num_blocks=WHOLE_POOL // runner.layout.block_bytes)
    assert answers == [answer.tokens for answer in oracle(folder_of(family))]


def test_answers_are_the_same_from_blocks_that_were_in_host_memory(
    make_runner: Make, folder_of: Callable[[str], Path]
) -> None:
    block_bytes = make_runner("qwen3").layout.block_bytes
    runner = make_runner("qwen3", pool_bytes=16 * block_bytes, host_bytes=64 * block_bytes)
    assert serve(runner, num_blocks=16) == [answer.tokens for answer in oracle(folder_of("qwen3"))]


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_have_the_same_bits_alone_batched_and_chunked(
    family: str, dtype: str, quantization: Quantization, make_runner: Make
) -> None:
    assert_rows_keep_their_bits(make_runner(family, dtype=dtype, quantization=quantization))


def test_keys_and_values_may_be_of_another_type_than_the_weights(make_runner: Make) -> None:
    whole, half = make_runner("qwen3"), make_runner("qwen3", kv_cache_dtype="bfloat16")
    assert (half.layout.dtype, 2 * half.layout.block_bytes) == ("bfloat16", whole.layout.block_bytes)
    assert_rows_keep_their_bits(half)
    difference = np.abs(half.logits(whole_plan()) - whole.logits(whole_plan())).max()
    assert 0 < difference < 0.2


def test_several_answers_share_blocks(make_runner: Make) -> None:
    assert_choices_share_blocks_and_are_right(make_runner("llama"))


def test_threads_change_no_bit(make_runner: Make) -> None:
    one, three = make_runner("qwen3"), make_runner("qwen3", num_threads=3)
    assert np.array_equal(one.logits(whole_plan()), three.logits(whole_plan()))


def test_time_spent_is_counted_by_operation_when_asked_for(make_runner: Make) -> None:
    runner = make_runner("llama")
    runner.logits(whole_plan())
    assert not runner.program.spent_ns.any()
    runner.program.timed = True
    runner.logits(whole_plan())
    assert (runner.program.spent_ns[:6] > 0).all()


def test_a_node_imports_neither_torch_nor_transformers_for_a_prepared_model(
    folder_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = folder_of("qwen2"), ModelConfig(model="tiny", executor="native")
    (tmp_path / "kernels").symlink_to(cache_dir())
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))
    open_prepared(folder, model, progress=no_progress)
    script = (
        "import sys; import prefill_node.node, decode_node.node\n"
        "from common.config import EngineConfig, ModelConfig\n"
        "from common.model.runner import load_runner\n"
        f"runner, _ = load_runner(ModelConfig(model={str(folder)!r}, executor='native'), EngineConfig(), '0' * 32)\n"
        "assert runner.vocab_size == 256\n"
        "print(sorted({'torch', 'transformers', 'numba'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=50)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


def test_what_is_not_lowered_is_left_to_transformers(tmp_path: Path) -> None:
    folder = save_model("mixtral", tmp_path / "mixtral")
    for model, why in (
        (ModelConfig(model="tiny"), "the architecture is mixtral"),
        (ModelConfig(model="tiny", device="cuda"), "the device is cuda"),
        (ModelConfig(model="tiny", attention="reference"), "attention = reference"),
    ):
        with pytest.raises(UnpreparedError, match=why):
            open_prepared(folder, model, progress=no_progress)


def test_a_model_that_computes_otherwise_than_its_architecture_is_refused(tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path / "llama", hidden_act="relu")
    prepare(folder, tmp_path / "packed", dtype="float32", quantization="none")
    with pytest.raises(UnpreparedError, match="its activation is relu"):
        read_prepared(tmp_path / "packed", digest="", quantization="none")


def test_a_packed_file_that_is_not_whole_says_so(tmp_path: Path) -> None:
    path = tmp_path / "packed"
    packed_file.write(path, Prepared(refused="no"), {"x": np.arange(5000, dtype=np.float32)})
    assert packed_file.read(path, Prepared)[1]["x"].tolist() == list(range(5000))
    whole = path.read_bytes()
    for broken in (whole[:-4096], whole[:40], b"no" + whole[2:], b""):
        path.write_bytes(broken)
        with pytest.raises(ConfigError, match=r"packed .*(delete it|start again)"):
            packed_file.read(path, Prepared)

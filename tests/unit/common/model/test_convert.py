"""A GGUF file becomes a folder: fp32 weights, and beside them those that the file's own format says exactly."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import ConfigError
from common.model import fetch, store
from common.model.kept_weights import load_quantised, save_quantised
from common.model.quantize import dequantise, quantise
from tests.tiny_gguf import LAYERS, write_gguf

pytestmark = pytest.mark.timeout(300)  # a conversion imports all of transformers in a process of its own

KEPT_BITS = {
    "self_attn.q_proj": 4,
    "self_attn.k_proj": 4,
    "self_attn.v_proj": 8,
    "self_attn.o_proj": 8,
    "mlp.gate_proj": 8,
    "mlp.down_proj": 4,
}


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    fetch.convert(write_gguf(folder / "tiny.gguf"), folder / "model", lambda *_: None)
    return folder / "model"


def test_every_weight_in_a_plain_format_is_kept_and_is_the_fp32_one_to_the_bit(converted: Path) -> None:
    """Those of queries and keys, whose rows the file has in another order, included."""
    kept, weights = load_quantised(converted), load_file(converted / "model.safetensors")
    expected = {
        f"model.layers.{layer}.{name}.weight": bits for layer in range(LAYERS) for name, bits in KEPT_BITS.items()
    }
    assert {name: kept[name].bits for name in kept} == {**expected, "model.embed_tokens.weight": 8}
    for name in kept:
        assert torch.equal(dequantise(kept[name]), weights[name]), name
    assert {"lm_head.weight", "model.layers.0.mlp.up_proj.weight"} <= set(weights)


def test_the_folder_is_one_model_whose_weights_count_once(converted: Path) -> None:
    assert store.resolve(str(converted)) == converted
    assert store.weight_files(converted) == [converted / "model.safetensors"]
    assert (converted / store.KEPT_WEIGHTS).stat().st_mode & 0o777 == 0o644


def test_kept_weights_come_back_as_they_were_saved(tmp_path: Path) -> None:
    weight = torch.randn(6, 96)
    save_quantised(tmp_path, {"a": quantise(weight, 4), "b": quantise(weight, 8)})
    kept = load_quantised(tmp_path)
    assert list(kept) == ["a", "b"]
    for name, bits in (("a", 4), ("b", 8)):
        expected = quantise(weight, 4 if bits == 4 else 8)
        assert torch.equal(kept[name].values, expected.values)
        assert torch.equal(kept[name].scales, expected.scales)
        assert torch.equal(kept[name].minimums, expected.minimums)
        assert kept[name].bits == bits


def test_a_folder_without_kept_weights_has_none(tmp_path: Path) -> None:
    save_quantised(tmp_path, {})
    assert list(tmp_path.iterdir()) == []
    assert len(load_quantised(tmp_path)) == 0


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(1)}, tmp_path / store.KEPT_WEIGHTS)
    with pytest.raises(ConfigError, match="another format"):
        load_quantised(tmp_path)

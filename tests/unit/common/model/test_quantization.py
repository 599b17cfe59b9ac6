"""What `--quantization` means for a model: which weights, how many bits, and that its digest is another."""

from pathlib import Path
from typing import Any

import pytest
import torch

from common.model import loader
from common.model.kept_weights import save_quantised
from common.model.quantised_weights import linear_weights, quantised_weights
from common.model.quantization import Quantization, quantised_digest, resolve_quantization
from common.model.quantize import dequantise, quantise
from common.model.store import model_digest
from tests.tiny_models import save_model

Q = "model.layers.0.self_attn.q_proj.weight"


def load(folder: Path, quantization: Quantization = "none", **options: Any) -> loader.LoadedModel:
    return loader.load(folder, dtype=torch.float32, block_size=16, quantization=quantization, **options)


def bits_of(module: Any, folder: Path, quantization: Quantization) -> dict[str, int]:
    return {name: weight.bits for name, weight in quantised_weights(module, folder, quantization)}


def keep(folder: Path, part: str) -> list[str]:
    """Keep 4 bits of the layers whose name holds `part`; the folder's fp32 weights become what they stand for."""
    loaded = load(folder)
    kept = {name: quantise(weight, 4) for name, weight in linear_weights(loaded.module).items() if part in name}
    for name, weight in kept.items():
        loaded.module.get_parameter(name).data = dequantise(weight)
    loaded.module.save_pretrained(folder)
    save_quantised(folder, kept)
    return list(kept)


def test_auto_keeps_the_checkpoint_s_width_where_there_is_one(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    assert resolve_quantization("auto", tmp_path) == "none"
    keep(tmp_path, "mlp")
    assert resolve_quantization("auto", tmp_path) == "checkpoint"
    assert resolve_quantization("none", tmp_path) == "none"
    assert resolve_quantization("int4", tmp_path) == "int4"


def test_every_linear_layer_is_quantised_and_a_head_has_8_bits_at_least(tmp_path: Path) -> None:
    module = load(save_model("llama", tmp_path)).module
    assert len(linear_weights(module)) == 3 * 7 + 1
    assert set(bits_of(module, tmp_path, "int8").values()) == {8}
    bits = bits_of(module, tmp_path, "int4")
    assert bits.pop("lm_head.weight") == 8
    assert set(bits.values()) == {4}
    assert bits_of(module, tmp_path, "none") == {}


def test_a_tied_head_comes_under_the_embedding_s_name(tmp_path: Path) -> None:
    module = load(save_model("llama", tmp_path, tie_word_embeddings=True)).module
    bits = bits_of(module, tmp_path, "int4")
    assert bits["model.embed_tokens.weight"] == 8
    assert "lm_head.weight" not in bits


def test_gates_of_experts_stay_as_they_are(tmp_path: Path) -> None:
    module = load(save_model("qwen2_moe", tmp_path)).module
    assert not [name for name in linear_weights(module) if name.endswith(("gate.weight", "expert_gate.weight"))]


@pytest.mark.parametrize(("part", "num_others"), [("mlp", 4 * 3 + 1), ("self_attn", 0)])
def test_what_a_mostly_quantised_checkpoint_stores_otherwise_gets_8_bits(
    part: str, num_others: int, tmp_path: Path
) -> None:
    """Half of the weights of these layers and more are in `mlp`."""
    kept = keep(save_model("llama", tmp_path, vocab_size=64), part)
    bits = bits_of(load(tmp_path).module, tmp_path, "checkpoint")
    assert {name for name, num_bits in bits.items() if num_bits == 4} == set(kept)
    assert sum(num_bits == 8 for num_bits in bits.values()) == num_others


def test_a_loaded_model_computes_with_what_the_quantised_weights_stand_for(tmp_path: Path) -> None:
    plain, rounded = load(save_model("llama", tmp_path)), load(tmp_path, "int4")
    expected = quantise(plain.module.get_parameter(Q), 4)
    assert torch.equal(rounded.module.get_parameter(Q), dequantise(expected))
    assert not torch.equal(rounded.module.get_parameter(Q), plain.module.get_parameter(Q))
    embedding = "model.embed_tokens.weight"  # not tied: no linear layer
    assert torch.equal(rounded.module.get_parameter(embedding), plain.module.get_parameter(embedding))


def test_a_checkpoint_that_keeps_all_weights_loads_as_its_fp32_twin(tmp_path: Path) -> None:
    keep(save_model("llama", tmp_path), "")
    plain, kept = load(tmp_path), load(tmp_path, "checkpoint")
    for name, weight in plain.module.named_parameters():
        assert torch.equal(weight, kept.module.get_parameter(name))
    assert kept.quantization == "checkpoint (weights only)"


def test_each_quantization_has_a_digest_of_its_own(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    every: tuple[Quantization, ...] = ("none", "int8", "int4", "checkpoint")
    digests = {load(tmp_path, quantization).digest for quantization in every}
    assert len(digests) == 4
    assert {len(digest) for digest in digests} == {32}
    assert quantised_digest("d" * 32, "none") == "d" * 32


@pytest.mark.parametrize("quantization", ["int8", "int4", "checkpoint"])
def test_a_model_whose_activations_are_not_rounded_is_another_than_the_one_our_kernels_run(
    quantization: Quantization, tmp_path: Path
) -> None:
    loaded = load(save_model("llama", tmp_path), quantization)
    assert loaded.quantization == f"{quantization} (weights only)"
    assert loaded.digest != quantised_digest(model_digest(tmp_path), quantization)


def test_what_is_not_quantised_is_the_same_model_whoever_runs_it(tmp_path: Path) -> None:
    loaded = load(save_model("llama", tmp_path))
    assert (loaded.quantization, loaded.digest) == ("none", model_digest(tmp_path))

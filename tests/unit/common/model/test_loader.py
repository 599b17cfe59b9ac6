"""Weights mapped or converted, what the dry run finds, lengths and rotary scalings."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from common.errors import ConfigError
from common.messages import LayerKV
from common.model import loader
from common.model.loader import LoadedModel
from tests.tiny_models import MAX_LEN, save_model

LONGROPE: dict[str, Any] = {
    "original_max_position_embeddings": 32,
    "max_position_embeddings": 128,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [2.0 + 0.5 * i for i in range(8)],
    },
}


def load(folder: Path, **options: Any) -> LoadedModel:
    return loader.load(folder, **{"dtype": torch.float32, "block_size": 16, "quantization": "none", **options})


def mapped_from(tensor: torch.Tensor, path: Path) -> bool:
    """Whether the tensor's memory is the mapped file (so that processes share its pages)."""
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < end:
            return line.endswith(str(path))
    return False


def test_weights_in_the_served_type_are_mapped_and_the_rest_is_computed(tmp_path: Path) -> None:
    loaded = load(save_model("llama", tmp_path))
    parameters = dict(loaded.module.named_parameters())
    assert parameters
    assert all(mapped_from(tensor, tmp_path / "model.safetensors") for tensor in parameters.values())
    assert not any(tensor.is_meta for tensor in loaded.module.buffers())


def test_tied_weights_stay_one_tensor(tmp_path: Path) -> None:
    loaded = load(save_model("llama", tmp_path, tie_word_embeddings=True))
    assert loaded.module.lm_head.weight is loaded.module.model.embed_tokens.weight
    assert mapped_from(loaded.module.lm_head.weight, tmp_path / "model.safetensors")


def test_weights_of_another_type_are_converted(tmp_path: Path) -> None:
    loaded = load(save_model("llama", tmp_path, dtype=torch.bfloat16))
    assert {tensor.dtype for tensor in loaded.module.parameters()} == {torch.float32}
    assert loaded.layout.dtype == "float32"


def test_bfloat16_is_served_mapped_and_halves_the_block(tmp_path: Path) -> None:
    loaded = load(save_model("llama", tmp_path, dtype=torch.bfloat16), dtype=torch.bfloat16)
    assert mapped_from(loaded.module.lm_head.weight, tmp_path / "model.safetensors")
    assert (loaded.layout.dtype, loaded.layout.itemsize) == ("bfloat16", 2)


def test_a_checkpoint_in_shards_is_mapped(tmp_path: Path) -> None:
    loaded = load(save_model("llama", tmp_path / "whole"))
    sharded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    sharded.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    again = load(tmp_path / "shards")
    assert mapped_from(again.module.lm_head.weight, next((tmp_path / "shards").glob("*00001-of*"))) or mapped_from(
        again.module.model.embed_tokens.weight, next((tmp_path / "shards").glob("*00001-of*"))
    )
    expected, found = loaded.module.state_dict(), again.module.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_checkpoint_that_lacks_tensors_is_refused(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor.clone() for name, tensor in tensors.items() if "layers.1" not in name}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"no fitting weights for model\.layers\.1"):
        load(tmp_path)


def test_the_dry_run_finds_heads_offsets_and_windows(tmp_path: Path) -> None:
    loaded = load(save_model("gemma2", tmp_path))
    first, second, third = loaded.layers
    assert (first.num_heads, first.num_kv_heads, first.k_head_dim, first.v_head_dim) == (4, 2, 16, 16)
    assert [layer.window for layer in loaded.layers] == [20, None, 20]
    assert {layer.softcap for layer in loaded.layers} == {10.0}
    assert (first.k_offset, first.v_offset, second.k_offset, third.k_offset) == (0, 512, 1024, 2048)
    assert loaded.layout.layers == (LayerKV(2, 16, 16),) * 3
    assert loaded.layout.block_elements == 3 * 1024
    assert (loaded.max_model_len, loaded.vocab_size) == (MAX_LEN, 256)


def test_keys_may_be_wider_than_values_and_heads_may_have_sinks(tmp_path: Path) -> None:
    latent = load(save_model("deepseek_v3", tmp_path / "latent"))
    assert latent.layout.layers[0] == LayerKV(4, 24, 16)
    sinks = load(save_model("gpt_oss", tmp_path / "sinks")).layers[0].sinks
    assert sinks is not None
    assert sinks.shape == (4,)


def test_a_length_beyond_the_models_own_is_refused(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    assert load(tmp_path, max_model_len=100).max_model_len == 100
    with pytest.raises(ConfigError, match=f"513 is more than the {MAX_LEN}"):
        load(tmp_path, max_model_len=513)


def test_longrope_stays_within_its_original_length_unless_asked(tmp_path: Path) -> None:
    assert load(save_model("phi3", tmp_path, **LONGROPE)).max_model_len == 32


@pytest.mark.parametrize("asked", [0, 128])
def test_longrope_frequencies_do_not_depend_on_the_batch(asked: int, tmp_path: Path) -> None:
    loaded = load(save_model("phi3", tmp_path, **LONGROPE), max_model_len=asked)
    rotary = loaded.module.model.rotary_emb
    longest = loaded.max_model_len
    together = rotary(torch.zeros(1), torch.arange(longest)[None])
    for position in (0, 7, 31, longest - 1):
        alone = rotary(torch.zeros(1), torch.tensor([[position]]))
        assert all(torch.equal(a[0, 0], t[0, position]) for a, t in zip(alone, together, strict=True))
    original: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    theirs = original.model.rotary_emb(torch.zeros(1), torch.arange(longest)[None])
    assert all(torch.equal(a, b) for a, b in zip(together, theirs, strict=True))


def test_dynamic_scaling_stays_within_its_original_length(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    assert load(save_model("llama", tmp_path, rope_parameters=rope)).max_model_len == MAX_LEN


def test_a_folder_whose_architecture_is_unknown_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(ConfigError, match="cannot read"):
        load(tmp_path)

"""Small random-weight models of real architectures, saved as folders that the loader takes."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB_SIZE = 256
MAX_LEN = 512

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_LEN,
    "initializer_range": 0.25,  # wide, so that the best logit stands out
    "tie_word_embeddings": False,  # tied random embeddings answer with the last token again and again
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SLIDING = {"sliding_window": 20}
_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], **_SLIDING}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": _SLIDING,
    "gemma2": {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 10.0, **_ALTERNATING},
    "gemma3_text": {"query_pre_attn_scalar": 16, **_ALTERNATING},
    "phi3": _SLIDING,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"shared_expert_intermediate_size": 48, **_EXPERTS},  # a gate of one output
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, **_ALTERNATING},  # sinks
    "deepseek_v3": {  # keys wider than values
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": MAX_LEN},
    "stablelm": {},  # does not forward extra arguments to its attention
}


def save_model(family: str, folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **extra: Any) -> Path:
    """A model of `family` (a transformers model type) with weights drawn from `seed`, as `save_pretrained` has it."""
    config = AutoConfig.for_model(family, **{**_COMMON, **CONFIGS.get(family, {}), **extra})
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM
    model.from_config(config, dtype=dtype).eval().save_pretrained(folder)
    return folder

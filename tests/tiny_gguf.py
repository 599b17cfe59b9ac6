"""A small random Llama as a GGUF file, each kind of weight in a format of its own."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS = 64, 96, 2, 4, 2
_BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]  # of GPT-2's alphabet: those that stand for themselves
TOKENS = ["<|endoftext|>", *map(chr, _BYTES), *(chr(256 + number) for number in range(256 - len(_BYTES))), "th"]

FORMATS = {
    "token_embd": "Q8_0",
    "output": "F16",
    "attn_q": "Q4_0",
    "attn_k": "Q4_1",
    "attn_v": "Q5_1",
    "attn_output": "Q5_0",
    "ffn_gate": "Q8_0",
    "ffn_up": "F32",
    "ffn_down": "Q4_1",
}
_SHAPES = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (HIDDEN // HEADS * KV_HEADS, HIDDEN),
    "attn_v": (HIDDEN // HEADS * KV_HEADS, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (INNER, HIDDEN),
    "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
}


def write_gguf(path: Path) -> Path:
    """The file at `path`. Rows of q and k are what they are: a reader that knows llama.cpp reorders them."""
    writer: Any = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_name("tiny")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(TOKENS))
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    random = np.random.default_rng(0)

    def add(name: str, kind: str, shape: tuple[int, ...]) -> None:
        weight: npt.NDArray[np.float32] = random.normal(size=shape).astype(np.float32) * 0.2
        quants: Any = gguf.quants
        type_ = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(f"{name}.weight", quants.quantize(weight, type_), raw_dtype=type_)

    add("token_embd", FORMATS["token_embd"], (len(TOKENS), HIDDEN))
    add("output", FORMATS["output"], (len(TOKENS), HIDDEN))
    add("output_norm", "F32", (HIDDEN,))
    for layer in range(LAYERS):
        for name, shape in _SHAPES.items():
            add(f"blk.{layer}.{name}", FORMATS[name], shape)
        for name in ("attn_norm", "ffn_norm"):
            add(f"blk.{layer}.{name}", "F32", (HIDDEN,))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

"""Tiny tokenizers made on the spot: one of bytes, as most models have, one of words with byte tokens for the rest."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXTS = [
    "The baton passes from prefill to decode, and the answer goes on.",
    "one two three one two three four five six seven eight nine ten",
    "Grüße aus 東京 und São Paulo: 漢字 🙂 👩‍👩‍👧 naïve café",
    "def add(a, b):\n    return a + b\n",
]
BOS, EOS, START = "<|endoftext|>", "<|im_end|>", "<|im_start|>"
TEMPLATE = """\
{% for message in messages %}
{% if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}
{{ raise_exception('unknown role ' + message['role']) }}
{% endif %}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""


def byte_level() -> Tokenizer:
    """Few merges, so that emoji and CJK are split over tokens. Ids 0 to 2 are special, the last one is not."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[BOS, EOS, START],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    return tokenizer


def word_piece_like() -> Tokenizer:
    """As SentencePiece models have it: "▁" for a space, the first one dropped, bytes for what has no token."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ["▁", "a", "b", "c", "d", "▁a", "▁b", "▁ab", "ab", "▁▁"]:
        vocab[piece] = len(vocab)
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁a", "b"), ("▁", "▁")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def write_folder(folder: Path, tokenizer: Tokenizer | None = None, *, template: str | None = TEMPLATE) -> Path:
    """A model folder as far as the text side reads it: context 128, eos `<|im_end|>`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer or byte_level()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 128, "eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1]}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS, "bos_token": {"content": BOS}}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder

"""Text to token ids and back, from a model folder. Neither torch nor transformers.

Reads tokenizer.json and, where they exist, tokenizer_config.json, chat_template.jinja,
generation_config.json and config.json.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders

from common.errors import ConfigError, RequestError
from common.model.chat_template import ChatTemplate
from common.model.detokenizer import ByteDetokenizer, Detokenizer, TokenPieces, WindowDetokenizer

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_NO_LIMIT = 1 << 30
"""Tokenizer configs write an astronomical number for "no limit"."""


class Tokenizer:
    """One model's text side. All methods may be called from any thread."""

    def __init__(self, fast: FastTokenizer, configs: Mapping[str, Mapping[str, Any]], template: str | None) -> None:
        """`configs` holds the parsed "tokenizer_config", "generation_config" and "config", empty if absent."""
        fast.no_truncation()
        fast.no_padding()
        self._fast = fast
        self._special = {token: True for token, added in fast.get_added_tokens_decoder().items() if added.special}
        is_byte_level = isinstance(fast.decoder, decoders.ByteLevel)
        self._pieces = TokenPieces(fast.id_to_token, self._special) if is_byte_level else None
        special_tokens = _special_tokens(configs["tokenizer_config"])
        self._chat_template = None if template is None else ChatTemplate(template, special_tokens)
        self.eos_token_ids = _eos_token_ids(fast, configs, special_tokens)
        self.vocab_size = _vocab_size(fast, configs["config"])
        """Token ids are below this."""
        self.max_model_len = _max_model_len(configs)
        """The model's own context length in tokens; 0 if the folder does not say."""

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """ConfigError if the folder has no tokenizer.json or one of the files is broken."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{folder} has no tokenizer.json: give a model folder that has one")
        try:
            fast = FastTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"{path} is not a tokenizer: {error}") from error
        names = ("tokenizer_config", "generation_config", "config")
        configs = {name: _read_json(folder / f"{name}.json") for name in names}
        return cls(fast, configs, _template_source(folder, configs["tokenizer_config"]))

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with the bos that the tokenizer itself puts in front, if any."""
        return self._encode(text, add_special_tokens=True)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a chat, ready for the assistant's answer. RequestError if it has no template or refuses."""
        return self.encode_rendered(self.render_chat(messages))

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt that the model's template makes of a chat; RequestError if it has none or refuses."""
        if self._chat_template is None:
            raise RequestError("this model has no chat template: use /v1/completions")
        return self._chat_template.render(messages)

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of what `render_chat` made: the template has put all special tokens already."""
        return self._encode(text, add_special_tokens=False)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of all tokens at once, special ones skipped."""
        return self._fast.decode(list(tokens), skip_special_tokens=True)

    def detokenizer(self, context: Sequence[int] = ()) -> Detokenizer:
        """A fresh stream. With `context` the text continues it (a completion), without it stands alone (an answer)."""
        if self._pieces is not None:
            return ByteDetokenizer(self._pieces)
        return WindowDetokenizer(self._fast.decode, self._special, context)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._fast.encode(text, add_special_tokens=add_special_tokens).ids
        return ids


def _read_json(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content


def _template_source(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    inside = tokenizer_config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(inside, list):  # named templates
        by_name = {entry["name"]: entry["template"] for entry in inside}
        inside = by_name.get("default")
    return inside if isinstance(inside, str) else None


def _special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name in _SPECIAL_TOKENS:
        value = tokenizer_config.get(name)
        if isinstance(value, dict):  # a serialised AddedToken
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _eos_token_ids(
    fast: FastTokenizer, configs: Mapping[str, Mapping[str, Any]], special_tokens: Mapping[str, str]
) -> tuple[int, ...]:
    """What generation_config.json says, else config.json, else the tokenizer's eos token."""
    for source in (configs["generation_config"], configs["config"]):
        value = source.get("eos_token_id")
        if isinstance(value, int):
            return (value,)
        if isinstance(value, list) and value:
            return tuple(value)
    token = fast.token_to_id(special_tokens["eos_token"]) if "eos_token" in special_tokens else None
    return () if token is None else (token,)


def _vocab_size(fast: FastTokenizer, config: Mapping[str, Any]) -> int:
    """Ids must mean something to the tokenizer and have a row in the model."""
    known = max(fast.get_vocab(with_added_tokens=True).values()) + 1
    rows = _text_config(config).get("vocab_size")
    return min(known, rows) if isinstance(rows, int) else known


def _max_model_len(configs: Mapping[str, Mapping[str, Any]]) -> int:
    config = _text_config(configs["config"])
    for key in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        if isinstance(config.get(key), int):
            return int(config[key])
    limit = configs["tokenizer_config"].get("model_max_length")
    return int(limit) if isinstance(limit, int | float) and limit < _NO_LIMIT else 0


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config

"""Text to ids and back: folders, templates, and incremental detokenising against decoding all at once."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.processors import TemplateProcessing

from common.errors import ConfigError, RequestError
from common.model.chat_template import ChatTemplate
from common.model.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from common.model.tokenizer import Tokenizer
from tests.tiny_tokenizer import BOS, byte_level, word_piece_like, write_folder

NO_CONFIGS: dict[str, dict[str, object]] = {"tokenizer_config": {}, "generation_config": {}, "config": {}}
BYTE_LEVEL = Tokenizer(byte_level(), NO_CONFIGS, None)
WORDS = Tokenizer(word_piece_like(), NO_CONFIGS, None)
HARD_TEXTS = ["🙂", "漢字", "a🙂b漢c字d", "👩‍👩‍👧", "é", "  two  spaces ", "tab\tline\n", "", "\ufffd", "x\ufffd🙂"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model"))


def pieces(detokenizer: Detokenizer, tokens: list[int]) -> list[str]:
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


# --- detokenising -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", HARD_TEXTS)
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, WORDS], ids=["byte-level", "words"])
def test_a_text_comes_back_piece_by_piece(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    shown = pieces(tokenizer.detokenizer(), tokens)
    assert "".join(shown) == tokenizer.decode(tokens) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in shown)


@settings(deadline=None)
@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 3), max_size=40))
def test_any_byte_level_tokens_give_the_text_of_decoding_them_at_once(tokens: list[int]) -> None:
    assert isinstance(BYTE_LEVEL.detokenizer(), ByteDetokenizer)
    assert "".join(pieces(BYTE_LEVEL.detokenizer(), tokens)) == BYTE_LEVEL.decode(tokens)


@settings(deadline=None)
@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1), max_size=40))
def test_the_window_gives_the_same_text_as_the_byte_table(tokens: list[int]) -> None:
    window = WindowDetokenizer(lambda ids: BYTE_LEVEL.decode(ids), {0: True, 1: True, 2: True})
    assert "".join(pieces(window, tokens)) == BYTE_LEVEL.decode(tokens)


@settings(deadline=None)
@given(st.text(alphabet="abcd 漢🙂é\n", max_size=30))
def test_any_text_in_word_pieces_comes_back(text: str) -> None:
    tokens = WORDS.encode(text)
    assert isinstance(WORDS.detokenizer(), WindowDetokenizer)
    assert "".join(pieces(WORDS.detokenizer(), tokens)) == WORDS.decode(tokens) == text


@settings(deadline=None)
@given(st.lists(st.sampled_from([WORDS.encode("a b")[0], 259, 260, 261, 262, 264, 266, 268]), max_size=30))
def test_any_word_pieces_give_the_text_of_decoding_them_at_once(tokens: list[int]) -> None:
    assert "".join(pieces(WORDS.detokenizer(), tokens)) == WORDS.decode(tokens)


def test_text_is_emitted_with_the_token_that_completes_it() -> None:
    tokens = BYTE_LEVEL.encode("a🙂b")
    shown = pieces(BYTE_LEVEL.detokenizer(), tokens)
    assert shown[0] == "a"
    assert shown[-2] == "b"
    assert [piece for piece in shown if piece] == ["a", "🙂", "b"]
    assert len(tokens) > 4, "the emoji is split"


def test_a_character_left_unfinished_is_replaced_at_the_end_only() -> None:
    tokens = BYTE_LEVEL.encode("a🙂")[:-1]
    assert pieces(BYTE_LEVEL.detokenizer(), tokens) == ["a", "", "", "\ufffd"]


def test_a_finished_character_stays_when_an_unfinished_one_follows_at_the_end() -> None:
    tokens = WORDS.encode("漢🙂")[:-2]
    shown = "".join(pieces(WORDS.detokenizer(), tokens))
    assert shown.startswith("漢")
    assert shown.endswith("\ufffd")


def test_special_tokens_have_no_text_and_added_ones_do() -> None:
    assert "".join(pieces(BYTE_LEVEL.detokenizer(), [0, 1, 2])) == ""
    think = BYTE_LEVEL.encode("<think>")
    assert len(think) == 1
    assert "".join(pieces(BYTE_LEVEL.detokenizer(), [1, *think, 1])) == "<think>"


def test_a_completion_keeps_its_leading_space_and_an_answer_has_none() -> None:
    prompt, continued = WORDS.encode("ab"), WORDS.encode("ab")  # the piece begins with a space
    assert "".join(pieces(WORDS.detokenizer(), continued)) == "ab"
    assert "".join(pieces(WORDS.detokenizer(prompt), continued)) == " ab"


def test_the_window_stays_small_whatever_comes() -> None:
    longest = 0

    def decode(tokens: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return WORDS.decode(tokens)

    stray_bytes = [3 + 0x80] * 300
    detokenizer = WindowDetokenizer(decode, {0: True, 1: True, 2: True})
    assert "".join(pieces(detokenizer, [*stray_bytes, *WORDS.encode("ab " * 300)])).endswith("ab ab ")
    assert longest <= 24


# --- folders ----------------------------------------------------------------------------------------------


def test_a_folder_says_where_answers_end_and_how_long_they_may_be(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.eos_token_ids == (1,)
    assert tokenizer.max_model_len == 128
    assert tokenizer.vocab_size == 321
    assert tokenizer.has_chat_template


def test_eos_falls_back_to_the_config_and_then_to_the_tokenizers_own(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == (0,)
    (tmp_path / "config.json").unlink()
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == (1,)


def test_ids_without_a_row_in_the_model_are_outside_the_vocabulary(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 300, "n_positions": 64}}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.max_model_len) == (300, 64)


def test_a_plain_prompt_gets_the_bos_its_tokenizer_gives_it_and_a_chat_none(tmp_path: Path) -> None:
    fast = byte_level()
    fast.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    fast.enable_truncation(4)
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, fast))
    plain = tokenizer.encode("one two three four five")
    assert plain[0] == 0
    assert tokenizer.decode(plain) == "one two three four five"
    assert tokenizer.encode_chat([{"role": "user", "content": "one"}])[0] == 2


def test_a_chat_becomes_the_prompt_its_template_writes(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    tokens = tokenizer.encode_chat([{"role": "developer", "content": "Be brief"}, {"role": "user", "content": "Hi"}])
    text = FastTokenizer.from_file(str(folder / "tokenizer.json")).decode(tokens, skip_special_tokens=False)
    assert text == "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_a_named_template_inside_the_config_is_found(tmp_path: Path) -> None:
    write_folder(tmp_path, template=None)
    templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ bos_token }}yes"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates, "bos_token": BOS}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode_chat([{"role": "user", "content": ""}]) == [0, *tokenizer.encode("yes")]


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, template=None))
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="use /v1/completions"):
        tokenizer.encode_chat([{"role": "user", "content": "Hi"}])


def test_broken_folders_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    write_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is not JSON"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not a tokenizer"):
        Tokenizer.from_folder(tmp_path)


# --- templates --------------------------------------------------------------------------------------------


def render(source: str, messages: list[dict[str, object]] | None = None) -> str:
    return ChatTemplate(source, {"eos_token": "</s>"}).render(messages or [{"role": "user", "content": "Hi"}])


def test_templates_find_what_their_authors_rely_on() -> None:
    assert render("{% for m in messages %}\n{{ m.content }}{{ eos_token }}\n{% endfor %}\n") == "Hi</s>\n"
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert render("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}!") == "Hi!"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}") == "TrueTrueTrue"


def test_a_template_that_refuses_or_trips_is_the_requests_fault() -> None:
    with pytest.raises(RequestError, match="refuses these messages: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="cannot render"):
        render("{{ 1 + messages[0].content }}")


def test_a_template_cannot_reach_out_of_its_sandbox() -> None:
    with pytest.raises(RequestError, match="refuses these messages"):
        render("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(RequestError, match="refuses these messages"):
        render("{{ messages.append(1) }}")


def test_a_template_that_does_not_compile_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="does not compile: line 1"):
        render("{% if %}")

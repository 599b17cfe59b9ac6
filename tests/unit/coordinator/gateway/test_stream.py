"""Stop strings, text streams and the events of a stream."""

from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.messages import FinishReason
from common.model.tokenizer import Tokenizer
from coordinator.gateway import replies
from coordinator.gateway.stream import ChunkWriter, StopStrings, TextStream
from tests.tiny_tokenizer import byte_level

TOKENIZER = Tokenizer(byte_level(), {"tokenizer_config": {}, "generation_config": {}, "config": {}}, None)

short_text = st.text(alphabet="abc", max_size=24)
stop_strings = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4)


def run(stops: Iterable[str], pieces: Iterable[str]) -> tuple[str, bool]:
    stream = StopStrings(list(stops))
    shown = "".join([stream.push(piece) for piece in pieces]) + stream.flush()
    return shown, stream.found


def first_completed(stops: list[str], text: str) -> tuple[str, bool]:
    """The rule itself, letter by letter."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            return text[: end - max(map(len, done))], True
    return text, False


@settings(deadline=None)
@given(stop_strings, st.lists(short_text, max_size=6))
def test_however_text_is_cut_the_stop_that_completes_first_is_found(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    expected = first_completed(stops, text)
    assert run(stops, pieces) == expected
    assert run(stops, [text]) == expected
    assert run(stops, text) == expected


@settings(deadline=None)
@given(stop_strings, st.lists(short_text, max_size=6))
def test_exactly_the_ambiguous_tail_is_held_back(stops: list[str], pieces: list[str]) -> None:
    stream = StopStrings(stops)
    seen = shown = ""
    for piece in pieces:
        seen += piece
        shown += stream.push(piece)
        if stream.found:
            break
        tails = [n for n in range(1, len(seen) + 1) if any(s.startswith(seen[-n:]) and s != seen[-n:] for s in stops)]
        assert shown == seen[: len(seen) - max(tails, default=0)]


def test_a_stop_over_three_tokens_leaves_no_fragment() -> None:
    assert run(["wo thr"], ["one t", "wo", " th", "ree"]) == ("one t", True)


def test_a_long_stop_string_delays_nothing_that_it_does_not_begin_with() -> None:
    stream = StopStrings(["x" * 80])
    assert stream.push("plain") == "plain"
    assert stream.push("x") == ""
    assert stream.push("y") == "xy"


def test_text_after_the_stop_is_gone() -> None:
    stream = StopStrings(["."])
    assert stream.push("a.b") == "a"
    assert stream.push("c") == ""
    assert stream.flush() == ""


# --- tokens to text ---------------------------------------------------------------------------------------


def text_of(text: str, stops: list[str], sizes: list[int]) -> tuple[str, int]:
    tokens = TOKENIZER.encode(text)
    stream = TextStream(TOKENIZER.detokenizer(), stops)
    shown = ""
    for size in [*sizes, len(tokens)]:
        shown += stream.push(tokens[:size])
        tokens = tokens[size:]
    return shown + stream.flush(), stream.num_tokens


@settings(deadline=None)
@given(st.lists(st.integers(1, 5), max_size=12), st.sampled_from([[], ["two three"], ["字", "🙂"], ["e"]]))
def test_how_tokens_are_grouped_changes_neither_text_nor_count(sizes: list[int], stops: list[str]) -> None:
    text = "one two 漢字 three 🙂 two three four"
    assert text_of(text, stops, sizes) == text_of(text, stops, [])


def test_tokens_behind_a_stop_string_are_not_counted() -> None:
    tokens = TOKENIZER.encode("one two three four")
    stream = TextStream(TOKENIZER.detokenizer(), [" two"])
    assert stream.push(tokens) == "one"
    assert stream.stopped
    assert stream.num_tokens == len(TOKENIZER.encode("one two")) < len(tokens)


def test_the_ending_token_is_counted_and_not_shown() -> None:
    think = TOKENIZER.encode("<think>")  # no special token, yet this answer ends with it
    stream = TextStream(TOKENIZER.detokenizer(), [], silent=think)
    assert stream.push([*TOKENIZER.encode("one"), *think]) == "one"
    assert stream.num_tokens == len(TOKENIZER.encode("one")) + 1


def test_what_the_flush_brings_can_still_complete_a_stop_string() -> None:
    stream = TextStream(TOKENIZER.detokenizer(), ["a\ufffd"])
    assert stream.push(TOKENIZER.encode("a🙂")[:-1]) == ""
    assert stream.flush() == ""
    assert stream.stopped


# --- events -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_chat", [True, False], ids=["chat", "completion"])
@pytest.mark.parametrize("text", ["hi", '"quoted"\\ \n', "漢🙂", "\u2028\x00</script>"])
def test_every_event_is_one_line_of_json(is_chat: bool, text: str) -> None:
    writer = ChunkWriter(is_chat=is_chat, id='id"', created=7, model="m/🙂")
    events = [writer.text(text), writer.finish(FinishReason.LENGTH), writer.usage({"prompt_tokens": 1})]
    if is_chat:
        events.append(writer.first())
    for event in events:
        assert event.startswith(b"data: ")
        assert event.endswith(b"\n\n")
        assert event.count(b"\n") == 2
        chunk = msgspec.json.decode(event[6:])
        assert (chunk["id"], chunk["created"], chunk["model"]) == ('id"', 7, "m/🙂")
    choice = msgspec.json.decode(events[0][6:])["choices"][0]
    assert (choice["delta"]["content"] if is_chat else choice["text"]) == text
    assert msgspec.json.decode(events[2][6:])["choices"] == []


def test_usage_adds_up() -> None:
    assert replies.usage(num_prompt_tokens=5, num_output_tokens=3, cached_tokens=4) == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 4},
    }

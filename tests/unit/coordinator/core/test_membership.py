import pytest

from coordinator.core.membership import (
    common_transports,
    longest_prompt,
    longest_shared_prompt,
    misfits,
    pair_mismatch,
    reference,
)
from tests.unit.coordinator.core.cards import OTHER_LAYOUT, make_card, offers


def test_nodes_with_equal_digest_and_layout_fit() -> None:
    assert misfits([make_card("prefill-0"), make_card("decode-0")]) == {}


def test_of_two_that_differ_the_first_is_the_reference() -> None:
    first, second = make_card("decode-0"), make_card("prefill-0", layout=OTHER_LAYOUT)
    assert reference([first, second]) is first
    assert misfits([first, second]) == {"prefill-0": "does not fit decode-0: block_size 32 here, 16 there"}


def test_a_wrong_node_that_came_first_yields_to_the_majority() -> None:
    wrong = make_card("decode-0", model_digest="e" * 32)
    reasons = misfits([wrong, make_card("decode-1"), make_card("prefill-0")])
    assert reasons == {"decode-0": "does not fit decode-1: model digest eeeeeeeeeeee here, dddddddddddd there"}


def test_a_pair_needs_a_transport_in_common() -> None:
    prefill, decode = make_card("prefill-0", offers=offers("ucx")), make_card("decode-0", offers=offers("tcp"))
    assert pair_mismatch(prefill, decode) == ("no transport in common: prefill-0 offers ucx, decode-0 speaks tcp")


def test_shared_memory_counts_on_one_host_only() -> None:
    prefill, near, far = make_card("prefill-0"), make_card("decode-0"), make_card("decode-1", host="elsewhere")
    assert common_transports(prefill, near) == ("shm", "tcp")
    assert common_transports(prefill, far) == ("tcp",)


def test_a_decode_node_that_offers_nothing_itself_may_speak_anything() -> None:
    assert common_transports(make_card("prefill-0"), make_card("decode-0", offers=())) == ("shm", "tcp")
    assert pair_mismatch(make_card("prefill-0", offers=()), make_card("decode-0")) is not None


def test_nodes_of_another_quantization_do_not_fit_and_the_reason_says_so() -> None:
    wrong = make_card("decode-0", model_digest="e" * 32, quantization="int8")
    reasons = misfits([wrong, make_card("decode-1"), make_card("prefill-0")])
    assert reasons == {"decode-0": "does not fit decode-1: quantization int8 here, none there"}


@pytest.mark.parametrize(
    ("field", "value"),
    [("model", "other"), ("model_digest", "e" * 32), ("quantization", "int8"), ("layout", OTHER_LAYOUT)],
)
def test_a_pair_must_agree(field: str, value: object) -> None:
    assert pair_mismatch(make_card("prefill-0"), make_card("decode-0")) is None
    assert pair_mismatch(make_card("prefill-0", **{field: value}), make_card("decode-0")) is not None


def test_one_token_of_the_context_is_left_for_the_answer() -> None:
    assert longest_prompt(make_card("decode-0", max_model_len=100)) == 99


def test_a_prompt_must_fit_the_pool() -> None:
    assert longest_prompt(make_card("decode-0", max_model_len=10_000, num_blocks=10)) == 160


def test_a_prefill_node_of_shorter_context_must_not_end_the_answer() -> None:
    decode = make_card("decode-0", max_model_len=100)
    assert longest_shared_prompt(make_card("prefill-0", max_model_len=100), decode) == 99
    assert longest_shared_prompt(make_card("prefill-0", max_model_len=101), decode) == 99
    # With 50 tokens of context, 49 of prompt and the first token would be its end: 48 leaves one more.
    assert longest_shared_prompt(make_card("prefill-0", max_model_len=50), decode) == 48

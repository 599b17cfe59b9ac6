"""The peers by name."""

import pytest

from tests.benchmarks.peers.base import DEFAULT, PEERS, chosen, load


def test_a_word_names_a_peer_or_all_kinds_of_one() -> None:
    assert chosen(["openvino", "openvino-int8", "vllm"]) == ["openvino-int8", "openvino-fp32", "vllm"]
    assert chosen(DEFAULT) == [name for name in PEERS if name.startswith(("llama.cpp", "openvino"))]


def test_an_unknown_peer_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'ollama'; known: llama\.cpp-q4_1, "):
        chosen(["ollama"])


@pytest.mark.parametrize("name", PEERS)
def test_each_peer_says_what_it_is_and_how_it_starts(name: str) -> None:
    peer = load(name)
    assert peer.name == name
    assert "==" in peer.version or peer.version.split()[1][0].isdigit()

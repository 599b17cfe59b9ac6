"""How far Baton is from what it aims at."""

import pytest

from tests.benchmarks.peers.comparison import Comparison
from tests.benchmarks.peers.figures import Record
from tests.benchmarks.peers.tables import tables
from tests.benchmarks.peers.targets import BATON, COLOCATED, Distance, best_chunk, distances

_MEDIANS = {
    BATON: {
        "W1": {"tokens_per_s": 260.0},
        "W2": {"ttft_p50": 90.0, "itl_p50": 15.0},
        "W3L": {"tokens_per_s": 200.0, "itl_p99": 50.0, "calm_itl_p99": 40.0},
        "goodput": {"requests_per_s": 1.5},
    },
    COLOCATED: {"W3L": {"tokens_per_s": 150.0, "itl_p99": 125.0, "calm_itl_p99": 45.0}},
    "openvino-int8": {
        "W1": {"tokens_per_s": 200.0},
        "W2": {"ttft_p50": 100.0, "itl_p50": 12.0},
        "W3L": {"tokens_per_s": 160.0, "itl_p99": 400.0, "calm_itl_p99": 30.0},
        "goodput": {"requests_per_s": 0.5},
    },
    "openvino-fp32": {"W1": {"tokens_per_s": 130.0}},
    "llama.cpp-q8_0": {"W1": {"tokens_per_s": 50.0}, "W2": {"ttft_p50": 300.0, "itl_p50": 13.0}},
}


def distance(what: str, against: str) -> Distance:
    [found] = [one for one in distances(_MEDIANS) if (one.what, one.against) == (what, against)]
    return found


def test_a_rate_is_held_against_the_fastest_peer() -> None:
    found = distance("W1 tokens/s", "openvino-int8")
    assert (found.ours, found.reference, found.value) == (260.0, 200.0, 1.3)
    assert found.is_met
    assert found.factor_missing == 1.0


def test_fp32_is_held_against_fp32() -> None:
    assert distance("W1 tokens/s, if ours are fp32", "openvino-fp32").value == 2.0


def test_a_latency_that_is_too_long_says_by_how_much() -> None:
    found = distance("W2 TTFT", "openvino-int8")
    assert found.value == 0.9
    assert not found.is_met
    assert found.factor_missing == pytest.approx(1.125)


def test_the_itl_of_one_stream_is_held_against_llama_cpp_alone() -> None:
    assert distance("W2 ITL", "llama.cpp-q8_0").value == pytest.approx(15 / 13)


def test_interference_is_held_against_calm_the_colocated_engine_and_the_steadiest_peer() -> None:
    assert distance("W3L ITL p99", "without long prompts").value == 1.25
    assert distance("W3L ITL p99", COLOCATED).value == 0.4
    assert distance("W3L ITL p99", "openvino-int8").value == 0.125


def test_what_was_not_measured_has_no_distance() -> None:
    assert not any(found.what.startswith(("W3 ", "W4")) for found in distances(_MEDIANS))
    assert distances({}) == []


def test_a_peer_that_meets_the_objective_at_no_rate_is_infinitely_behind() -> None:
    medians = {
        BATON: {"goodput": {"requests_per_s": 0.5}},
        "llama.cpp-q8_0": {"goodput": {"requests_per_s": 0.0}},
    }
    [found] = distances(medians)
    assert found.value == float("inf")
    assert found.is_met


def test_the_best_chunk_size_is_the_steadiest_of_those_that_keep_up() -> None:
    swept = [(64, 80.0, 9_000.0), (128, 100.0, 4_000.0), (256, 180.0, 2_000.0)]
    assert best_chunk(swept, every_s=5.0) == 128
    assert best_chunk(swept, every_s=1.0) == 256


def test_the_tables_show_medians_ratios_failures_and_distances() -> None:
    result = Comparison(versions={BATON: "one of each"}, unavailable={"vllm": "no wheel"})
    for name, others in ((BATON, 0.1), ("openvino-int8", 0.3)):
        record = result.records.setdefault(name, Record())
        for rate in (100.0, 300.0, 200.0):
            latencies = {f"{kind}_{place}": 20.0 for kind in ("ttft", "itl") for place in ("p50", "p95", "p99", "max")}
            record.add("W1", {"tokens_per_s": rate * (1 if name == BATON else 2), **latencies, "others": others})
    result.records["openvino-int8"].failures["W4"] = "it hung up"
    text = tables(result)
    lines = {line.split("  ")[0]: line.split() for line in text.splitlines() if "400.0" in line}
    assert lines["openvino-int8"][1:3] == ["400.0", "0.50"]
    assert "no wheel" in text
    assert "it hung up" in text
    assert "2.60x to go" in text
    assert "up to 0.30 cores" in text

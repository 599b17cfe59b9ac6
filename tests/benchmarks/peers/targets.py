"""What Baton aims at beside its peers, and how far it is. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.benchmarks.peers.figures import Medians

BATON, COLOCATED = "baton 1P1D", "baton colocated"


@dataclass(frozen=True, slots=True)
class Distance:
    """`value` is a ratio of ours to theirs where there is a `reference`, else a plain figure; nan: not measured."""

    what: str
    against: str
    ours: float
    reference: float
    value: float
    target: float
    at_least: bool

    @property
    def is_met(self) -> bool:
        return self.value >= self.target if self.at_least else self.value <= self.target

    @property
    def factor_missing(self) -> float:
        """By how much the figure has to improve; 1 or less if it is there."""
        if self.value == self.target:
            return 1.0
        above, below = (self.target, self.value) if self.at_least else (self.value, self.target)
        return above / below if below else float("inf")


Pick = Callable[[str], bool]


def distances(medians: Medians) -> list[Distance]:
    """Those for which both sides were measured, in the order of the workloads."""
    found = [
        _beside_best(medians, "W1 tokens/s", "W1", "tokens_per_s", 1.3, at_least=True, among=_in_few_bits),
        _beside_best(medians, "W1 tokens/s, if ours are fp32", "W1", "tokens_per_s", 0.9, at_least=True, among=_fp32),
        _beside_best(medians, "W2 TTFT", "W2", "ttft_p50", 0.8, at_least=False),
        _beside_best(medians, "W2 ITL", "W2", "itl_p50", 1.0, at_least=False, among=_llama),
        _beside_best(medians, "W3L steady tokens/s", "W3L", "tokens_per_s", 1.3, at_least=True),
    ]
    for workload in ("W3L", "W3"):
        what = f"{workload} ITL p99"
        ours = _figure(medians, BATON, workload, "itl_p99")
        calm = _figure(medians, BATON, workload, "calm_itl_p99")
        colocated = _figure(medians, COLOCATED, workload, "itl_p99")
        found += [
            _ratio(what, "without long prompts", ours, calm, 1.3, at_least=False),
            _ratio(what, COLOCATED, ours, colocated, 0.5, at_least=False),
            _beside_best(medians, what, workload, "itl_p99", 0.2, at_least=False),
        ]
    found.append(_beside_best(medians, "goodput", "goodput", "requests_per_s", 2.0, at_least=True))
    first, later = (_figure(medians, BATON, "W4", name) for name in ("first_ttft", "later_ttft"))
    ready_s = _figure(medians, BATON, "memory", "ready_s")
    found += [
        _ratio("W4 later TTFT", "the first", later, first, 0.08, at_least=False),
        Distance("W4 later TTFT, ms", "", later, _NAN, later, 60.0, at_least=False),
        Distance("ready after, s", "", ready_s, _NAN, ready_s, 10.0, at_least=False),
    ]
    return [distance for distance in found if distance.value == distance.value]


_NAN = float("nan")


def _beside_best(
    medians: Medians, what: str, workload: str, name: str, target: float, *, at_least: bool, among: "Pick | None" = None
) -> Distance:
    """Beside the peer that does best in this figure."""
    peers = [peer for peer in medians if peer not in (BATON, COLOCATED) and (among is None or among(peer))]
    figures = {peer: _figure(medians, peer, workload, name) for peer in peers}
    measured = {peer: value for peer, value in figures.items() if value == value}
    ours = _figure(medians, BATON, workload, name)
    if not measured:
        return _ratio(what, "", ours, _NAN, target, at_least=at_least)
    best = (max if at_least else min)(measured, key=lambda peer: measured[peer])
    return _ratio(what, best, ours, measured[best], target, at_least=at_least)


def _ratio(what: str, against: str, ours: float, reference: float, target: float, *, at_least: bool) -> Distance:
    value = ours / reference if reference else (_NAN if not ours else float("inf"))
    return Distance(what, against, ours, reference, value, target, at_least)


def _figure(medians: Medians, server: str, workload: str, name: str) -> float:
    return medians.get(server, {}).get(workload, {}).get(name, _NAN)


def _in_few_bits(peer: str) -> bool:
    return not _fp32(peer)


def _fp32(peer: str) -> bool:
    return peer in ("openvino-fp32", "vllm", "transformers")


def _llama(peer: str) -> bool:
    return peer.startswith("llama.cpp")


def best_chunk(swept: Sequence[tuple[int, float, float]], *, every_s: float) -> int:
    """Of (chunk size, ITL p99, longest TTFT, both in ms): the one with the steadiest streams among those that answer
    a long prompt before the next one comes, so that all read prompts equally fast; failing that the fastest."""
    keep_up = [one for one in swept if one[2] <= 1e3 * every_s]
    if keep_up:
        return min(keep_up, key=lambda one: one[1])[0]
    return min(swept, key=lambda one: one[2])[0]

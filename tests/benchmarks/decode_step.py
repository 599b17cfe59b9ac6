"""One engine step of the demo model in process, on one thread, beside the least it could take.

Floor of a decode step: the bytes that it must read, all weights once and every sequence's keys and values, at the
speed of memory. Floor of a prompt: its arithmetic, the linear layers of every token and its causal attention, at
the speed of a large fp32 product. Both limits are measured between the rounds of the same run. Ratios compare the
best rounds; the median beside them shows how disturbed they were.

The pool holds noise, which costs what real keys and values cost. The same step runs again and again, so the
sequences stay at the context named.

The profile tells where one decode step's time goes: matrix products and attention as torch's profiler sees them,
the rest of torch's operators, and what is left: Python, building the step, drawing the tokens.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from common.attention.base import BACKENDS
from common.attention.native import NativeAttention
from common.config import EngineConfig, ModelConfig
from common.engine.request import Chunk, EngineRequest, StepPlan
from common.messages import BlockId, Incarnation, KVLayout, RequestId, Sampling
from common.model.base import Runner
from common.model.runner import load_runner
from common.model.store import DEMO, Progress, resolve, weight_files
from tests.benchmarks.machine import Limits, seconds
from tests.benchmarks.report import grid, median, number, run_part

CONTEXT = 256
DECODE_SEQS = (1, 8, 32)
PROFILED_SEQS = 8
PROMPT_TOKENS = 512
POOL_BYTES = 400 << 20
_GREEDY = Sampling(max_tokens=1 << 20, seed=0, temperature=0.0)
_SAMPLED = Sampling(max_tokens=1 << 20, seed=0, temperature=0.8, top_p=0.95)
_RANGE = "baton attention"
_PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::mv", "aten::addmv"}


@dataclass(frozen=True, slots=True)
class Step:
    """One kind of step. `of_floor`: the floor over our best round."""

    case: str
    num_seqs: int
    num_tokens: int
    context: int
    best_ms: float
    median_ms: float
    floor_ms: float
    of_floor: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Profile:
    """Milliseconds of one decode step, the median of some; `slowed_by` is what watching cost, as a factor."""

    num_seqs: int
    gemm_ms: float
    attention_ms: float
    other_operators_ms: float
    outside_ms: float
    num_operators: int
    slowed_by: float


@dataclass(frozen=True, slots=True)
class Result:
    model: str
    weight_bytes: int
    kv_bytes_per_token: int
    read_gb_per_s: float
    gemm_gflop_per_s: float
    steps: tuple[Step, ...]
    profile: Profile


@dataclass(frozen=True, slots=True)
class Work:
    """What the model's steps must read and compute, from its folder's own words."""

    weight_bytes: int
    linear_flop_per_token: int
    attention_flop_per_pair: int
    """For each query and each key that it sees, over all layers."""
    head_flop: int

    @classmethod
    def of(cls, folder: Path) -> "Work":
        config = json.loads((folder / "config.json").read_text())
        weight_bytes = sum(path.stat().st_size for path in weight_files(folder))
        embedding = config["vocab_size"] * config["hidden_size"]
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        return cls(
            weight_bytes=weight_bytes,  # tied: the embedding is the head, read whole
            linear_flop_per_token=2 * (weight_bytes // 4 - embedding),
            attention_flop_per_pair=4 * config["num_hidden_layers"] * config["num_attention_heads"] * head_dim,
            head_flop=2 * embedding,
        )

    def prompt_flop(self, num_tokens: int) -> int:
        pairs = num_tokens * (num_tokens + 1) // 2
        return num_tokens * self.linear_flop_per_token + pairs * self.attention_flop_per_pair + self.head_flop


def measure(quick: bool, progress: Progress) -> Result:
    progress("loading the demo model", None, None)
    folder = resolve(DEMO)
    with _marked_attention():
        runner, memory = load_runner(
            ModelConfig(model=str(folder), threads=1, quantization="none"),
            EngineConfig(kv_cache_memory=POOL_BYTES),
            Incarnation("0" * 32),
        )
    torch.from_numpy(memory.blocks).view(torch.float32).normal_()
    work, limits = Work.of(folder), Limits()
    cases = [("decode", num_seqs, _decode_plan(runner.layout, num_seqs, _GREEDY)) for num_seqs in DECODE_SEQS]
    cases.append(("sampled", PROFILED_SEQS, _decode_plan(runner.layout, PROFILED_SEQS, _SAMPLED)))
    cases.append(("prompt", 1, _prompt_plan(runner.layout, PROMPT_TOKENS)))
    times: list[list[float]] = [[] for _ in cases]
    rounds = 2 if quick else 8
    for _, _, plan in cases:
        runner.execute(plan)
    for round_number in range(rounds):
        progress("engine steps", round_number, rounds)
        limits.measure()
        for (_, _, plan), taken_s in zip(cases, times, strict=True):
            taken_s.append(seconds(partial(runner.execute, plan)))
    progress("profile of a step", None, None)
    profile = _profile(runner, cases[DECODE_SEQS.index(PROFILED_SEQS)][2], 3 if quick else 5)
    return Result(
        model=folder.name,
        weight_bytes=work.weight_bytes,
        kv_bytes_per_token=runner.layout.block_bytes // runner.layout.block_size,
        read_gb_per_s=limits.best_read_bytes_per_s / 1e9,
        gemm_gflop_per_s=limits.best_flop_per_s / 1e9,
        steps=tuple(
            _step(case, num_seqs, plan, taken_s, work, limits, runner.layout)
            for (case, num_seqs, plan), taken_s in zip(cases, times, strict=True)
        ),
        profile=profile,
    )


def _decode_plan(layout: KVLayout, num_seqs: int, sampling: Sampling) -> StepPlan:
    requests = [_request(layout, seq, num_seqs, CONTEXT, sampling) for seq in range(num_seqs)]
    return StepPlan(tuple(Chunk(request, CONTEXT - 1, 1, True) for request in requests))


def _prompt_plan(layout: KVLayout, num_tokens: int) -> StepPlan:
    return StepPlan((Chunk(_request(layout, 0, 1, num_tokens, _GREEDY), 0, num_tokens, True),))


def _request(layout: KVLayout, seq: int, num_seqs: int, num_tokens: int, sampling: Sampling) -> EngineRequest:
    """The blocks of the step's sequences alternate, as they do in a pool that has been in use."""
    num_blocks = -(-num_tokens // layout.block_size)
    return EngineRequest(
        id=RequestId(str(seq)),
        tokens=[1000 + (7919 * (seq + 1) * place) % 40_000 for place in range(num_tokens)],
        num_prompt_tokens=num_tokens,
        sampling=sampling,
        blocks=[BlockId(block * num_seqs + seq) for block in range(num_blocks)],
    )


def _step(
    case: str, num_seqs: int, plan: StepPlan, taken_s: list[float], work: Work, limits: Limits, layout: KVLayout
) -> Step:
    context = plan.chunks[0].start + plan.chunks[0].num_tokens
    if case == "prompt":
        floor_s = work.prompt_flop(plan.num_tokens) / limits.best_flop_per_s
    else:
        kv_bytes = num_seqs * context * layout.block_bytes // layout.block_size
        floor_s = (work.weight_bytes + kv_bytes) / limits.best_read_bytes_per_s
    best_s = min(taken_s)
    return Step(
        case=case,
        num_seqs=num_seqs,
        num_tokens=plan.num_tokens,
        context=context,
        best_ms=best_s * 1e3,
        median_ms=median(taken_s) * 1e3,
        floor_ms=floor_s * 1e3,
        of_floor=floor_s / best_s,
        tokens_per_s=plan.num_tokens / best_s,
    )


# --- where a step's time goes -------------------------------------------------------------------------------


class MarkedAttention(NativeAttention):
    """The native backend under a name that the profiler sees: its kernel is no operator of torch."""

    def attend(self, *arguments: Any, **options: Any) -> torch.Tensor:
        with torch.profiler.record_function(_RANGE):
            return super().attend(*arguments, **options)


@contextmanager
def _marked_attention() -> Iterator[None]:
    native = BACKENDS["native"]
    BACKENDS["native"] = f"{__spec__.name if __spec__ else __name__}:{MarkedAttention.__name__}"
    try:
        yield
    finally:
        BACKENDS["native"] = native


def _profile(runner: Runner, plan: StepPlan, rounds: int) -> Profile:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would write two lines a step
    plain_s, seen = [], []
    for _ in range(rounds):
        plain_s.append(seconds(lambda: runner.execute(plan)))
        seen.append(_watched(runner, plan))
    wall_ms, gemm_ms, attention_ms, other_ms = (median([one[part] for one in seen]) for part in range(4))
    return Profile(
        num_seqs=len(plan.chunks),
        gemm_ms=gemm_ms,
        attention_ms=attention_ms,
        other_operators_ms=other_ms,
        outside_ms=wall_ms - gemm_ms - attention_ms - other_ms,
        num_operators=int(seen[-1][4]),
        slowed_by=wall_ms / 1e3 / median(plain_s),
    )


def _watched(runner: Runner, plan: StepPlan) -> tuple[float, float, float, float, float]:
    """One step: milliseconds in all, in matrix products, in attention, in other operators; and how many of these."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        wall_s = seconds(lambda: runner.execute(plan))
    gemm_us = attention_us = other_us = 0.0
    count = 0
    for event in profiler.key_averages():
        if event.key == _RANGE:
            attention_us += event.cpu_time_total
        elif event.key in _PRODUCTS:
            gemm_us += event.self_cpu_time_total
        elif event.key.startswith("aten::"):
            other_us += event.self_cpu_time_total
            count += event.count
    return wall_s * 1e3, gemm_us / 1e3, attention_us / 1e3, other_us / 1e3, float(count)


# --- tables -------------------------------------------------------------------------------------------------


def tables(result: Result) -> str:
    profile = result.profile
    parts = (
        ("matrix products", profile.gemm_ms),
        ("attention", profile.attention_ms),
        ("other operators", profile.other_operators_ms),
        ("Python, step, sampling", profile.outside_ms),
    )
    whole_ms = sum(value for _, value in parts)
    return "\n".join(
        [
            f"{result.model}, one thread: {result.weight_bytes / 1e6:.0f} MB of weights, "
            f"{result.kv_bytes_per_token / 1e3:.0f} KB of KV a token; limits in this run: "
            f"{result.read_gb_per_s:.1f} GB/s, {result.gemm_gflop_per_s:.0f} GFLOP/s",
            grid(
                ("step", "seqs", "context", "best ms", "median", "floor ms", "floor/best", "tokens/s"),
                [
                    (
                        step.case,
                        str(step.num_seqs),
                        str(step.context),
                        number(step.best_ms),
                        number(step.median_ms),
                        number(step.floor_ms),
                        number(step.of_floor, 2),
                        number(step.tokens_per_s, 0),
                    )
                    for step in result.steps
                ],
            ),
            "",
            f"profile of a decode step of {profile.num_seqs} (watching makes it {profile.slowed_by:.2f} times as long; "
            f"{profile.num_operators:,} other operators)",
            grid(("", "ms", "share"), [(name, number(ms), f"{ms / whole_ms:.0%}") for name, ms in parts]),
        ]
    )


if __name__ == "__main__":
    run_part(__doc__, measure, tables)

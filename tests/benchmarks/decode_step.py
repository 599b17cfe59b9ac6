"""One engine step of the demo model in process, on one thread, beside the least it could take.

Three ways to compute it, in turns: through the modules of transformers in fp32, by our kernels alone in fp32, and by
our kernels from the weights as the checkpoint stores them.

Floor of a decode step: the bytes that it must read, all weights once and every sequence's keys and values, at the
speed of memory. Floor of a prompt: its arithmetic, the linear layers of every token and its causal attention, at
the speed of a large fp32 product (narrower weights can be faster than that). Both limits are measured between the
rounds of the same run. Ratios compare the best rounds; the median beside them shows how disturbed they were.

The pool holds noise, which costs what real keys and values cost. The same step runs again and again, so the
sequences stay at the context named.

The profile tells where a decode step of our kernels goes: matrix products, attention, what is between them, and what
is outside the kernels: Python, laying out the step, drawing the tokens.
"""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from common.config import EngineConfig, ModelConfig
from common.engine.request import Chunk, EngineRequest, StepPlan
from common.kv_cache.memory import PoolMemory
from common.messages import BlockId, Incarnation, KVLayout, RequestId, Sampling
from common.model.base import ModelRunner
from common.model.prepared import prepared_path
from common.model.program_runner import ProgramRunner
from common.model.runner import load_runner
from common.model.store import DEMO, Progress, resolve, weight_files
from common.native.abi import OpCode
from tests.benchmarks.machine import Limits, seconds
from tests.benchmarks.report import grid, median, number, run_part

CONTEXT = 256
DECODE_SEQS = (1, 8, 32)
PROFILED_SEQS = 8
PROMPT_TOKENS = 512
POOL_BYTES = 400 << 20
_GREEDY = Sampling(max_tokens=1 << 20, seed=0, temperature=0.0)
_SAMPLED = Sampling(max_tokens=1 << 20, seed=0, temperature=0.8, top_p=0.95)


Executor = Literal["native", "transformers"]
Quantization = Literal["auto", "none"]
WAYS: tuple[tuple[Executor, Quantization], ...] = (("transformers", "none"), ("native", "none"), ("native", "auto"))


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
    """Milliseconds of one decode step, the median of some."""

    num_seqs: int
    linear_ms: float
    attention_ms: float
    other_kernels_ms: float
    outside_ms: float

    @property
    def whole_ms(self) -> float:
        return self.linear_ms + self.attention_ms + self.other_kernels_ms + self.outside_ms


@dataclass(frozen=True, slots=True)
class Way:
    executor: str
    quantization: str
    weight_bytes: int
    steps: tuple[Step, ...]
    profile: Profile | None


@dataclass(frozen=True, slots=True)
class Result:
    model: str
    kv_bytes_per_token: int
    read_gb_per_s: float
    gemm_gflop_per_s: float
    ways: tuple[Way, ...]


@dataclass(frozen=True, slots=True)
class Work:
    """What the model's steps must read and compute, from its folder's own words."""

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
            linear_flop_per_token=2 * (weight_bytes // 4 - embedding),
            attention_flop_per_pair=4 * config["num_hidden_layers"] * config["num_attention_heads"] * head_dim,
            head_flop=2 * embedding,
        )

    def prompt_flop(self, num_tokens: int) -> int:
        pairs = num_tokens * (num_tokens + 1) // 2
        return num_tokens * self.linear_flop_per_token + pairs * self.attention_flop_per_pair + self.head_flop


class Loaded:
    """A runner on a pool of noise, its steps, and the times they took."""

    def __init__(
        self, folder: Path, executor: Executor, quantization: Quantization, *, borrow_cores: bool = False
    ) -> None:
        model = ModelConfig(
            model=str(folder), threads=1, quantization=quantization, executor=executor, borrow_cores=borrow_cores
        )
        self.model = model
        self.weight_bytes = prepared_path(folder, model).stat().st_size if executor == "native" else 0
        runner, memory = load_runner(model, EngineConfig(kv_cache_memory=POOL_BYTES), Incarnation("0" * 32))
        self.runner: ModelRunner = runner
        _fill(memory)
        layout = runner.layout
        cases = [("decode", num_seqs, _decode_plan(layout, num_seqs, _GREEDY)) for num_seqs in DECODE_SEQS]
        cases.append(("sampled", PROFILED_SEQS, _decode_plan(layout, PROFILED_SEQS, _SAMPLED)))
        cases.append(("prompt", 1, _prompt_plan(layout, PROMPT_TOKENS)))
        self.cases = cases
        self.times: list[list[float]] = [[] for _ in cases]
        for _, _, plan in cases:
            runner.execute(plan)

    def run(self) -> None:
        for (_, _, plan), taken_s in zip(self.cases, self.times, strict=True):
            taken_s.append(seconds(partial(self.runner.execute, plan)))

    def way(self, work: Work, limits: Limits, profile_rounds: int) -> Way:
        steps = tuple(
            _step(case, num_seqs, plan, taken_s, work, limits, self.weight_bytes, self.runner.layout)
            for (case, num_seqs, plan), taken_s in zip(self.cases, self.times, strict=True)
        )
        plan = self.cases[DECODE_SEQS.index(PROFILED_SEQS)][2]
        profile = _profile(self.runner, plan, profile_rounds) if isinstance(self.runner, ProgramRunner) else None
        return Way(self.model.executor, self.runner.quantization, self.weight_bytes, steps, profile)


def _fill(memory: PoolMemory) -> None:
    noise = np.random.default_rng(0).standard_normal(1 << 20, np.float32)
    pool = memory.blocks.reshape(-1).view(np.float32)
    for start in range(0, pool.size, noise.size):
        pool[start : start + noise.size] = noise[: pool.size - start]


def measure(quick: bool, progress: Progress) -> Result:
    progress("loading the demo model", None, None)
    folder = resolve(DEMO)
    loaded = [Loaded(folder, executor, quantization) for executor, quantization in WAYS]
    loaded[0].weight_bytes = loaded[1].weight_bytes  # the same fp32 numbers
    work, limits = Work.of(folder), Limits()
    rounds = 2 if quick else 8
    for round_number in range(rounds):
        progress("engine steps", round_number, rounds)
        limits.measure()
        for one in loaded:
            one.run()
    progress("profile of a step", None, None)
    layout = loaded[0].runner.layout
    return Result(
        model=folder.name,
        kv_bytes_per_token=layout.block_bytes // layout.block_size,
        read_gb_per_s=limits.best_read_bytes_per_s / 1e9,
        gemm_gflop_per_s=limits.best_flop_per_s / 1e9,
        ways=tuple(one.way(work, limits, 5 if quick else 20) for one in loaded),
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
    case: str,
    num_seqs: int,
    plan: StepPlan,
    taken_s: list[float],
    work: Work,
    limits: Limits,
    weight_bytes: int,
    layout: KVLayout,
) -> Step:
    context = plan.chunks[0].start + plan.chunks[0].num_tokens
    if case == "prompt":
        floor_s = work.prompt_flop(plan.num_tokens) / limits.best_flop_per_s
    else:
        kv_bytes = num_seqs * context * layout.block_bytes // layout.block_size
        floor_s = (weight_bytes + kv_bytes) / limits.best_read_bytes_per_s
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


def _profile(runner: ProgramRunner, plan: StepPlan, rounds: int) -> Profile:
    seen = [_watched(runner, plan) for _ in range(rounds)]
    linear_ms, attention_ms, other_ms, outside_ms = (median([one[part] for one in seen]) for part in range(4))
    return Profile(len(plan.chunks), linear_ms, attention_ms, other_ms, outside_ms)


def _watched(runner: ProgramRunner, plan: StepPlan) -> tuple[float, float, float, float]:
    """One step: milliseconds in matrix products, in attention, in other kernels and outside them."""
    program = runner.program
    program.timed = True
    before = program.spent_ns.copy()
    try:
        wall_s = seconds(lambda: runner.execute(plan))
    finally:
        program.timed = False
    spent_ms = (program.spent_ns - before) / 1e6
    linear_ms, attention_ms = float(spent_ms[OpCode.LINEAR]), float(spent_ms[OpCode.ATTEND])
    kernels_ms = float(spent_ms.sum())
    return linear_ms, attention_ms, kernels_ms - linear_ms - attention_ms, wall_s * 1e3 - kernels_ms


# --- tables -------------------------------------------------------------------------------------------------


def tables(result: Result) -> str:
    head = (
        f"{result.model}, one thread: {result.kv_bytes_per_token / 1e3:.0f} KB of KV a token; limits in this run: "
        f"{result.read_gb_per_s:.1f} GB/s, {result.gemm_gflop_per_s:.0f} GFLOP/s in fp32"
    )
    return "\n".join([head, *(_way_table(way, result.ways[0]) for way in result.ways), "", _profile_table(result)])


def _way_table(way: Way, first: Way) -> str:
    rows = [
        (
            step.case,
            str(step.num_seqs),
            str(step.context),
            number(step.best_ms),
            number(step.median_ms),
            number(step.floor_ms),
            number(step.of_floor, 2),
            number(step.tokens_per_s, 0),
            f"{other.best_ms / step.best_ms:.2f}x",
        )
        for step, other in zip(way.steps, first.steps, strict=True)
    ]
    names = ("step", "seqs", "context", "best ms", "median", "floor ms", "floor/best", "tokens/s", "of first")
    title = f"\n{way.executor}, quantization {way.quantization}, {way.weight_bytes / 1e6:.0f} MB of weights"
    return f"{title}\n{grid(names, rows)}"


def _profile_table(result: Result) -> str:
    rows = []
    for way in result.ways:
        if (profile := way.profile) is not None:
            outside = f"{profile.outside_ms / profile.whole_ms:.0%}"
            parts = (profile.linear_ms, profile.attention_ms, profile.other_kernels_ms, profile.outside_ms)
            rows.append((f"native, {way.quantization}", *(number(part, 2) for part in parts), outside))
    names = (f"decode step of {PROFILED_SEQS}", "linear ms", "attention", "other kernels", "outside", "outside of all")
    return grid(names, rows)


if __name__ == "__main__":
    run_part(__doc__, measure, tables)

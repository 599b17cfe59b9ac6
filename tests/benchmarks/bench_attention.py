"""How fast attention runs on one thread: the native kernel beside its limits and beside gather + SDPA.

Run `python tests/benchmarks/bench_attention.py [--json FILE]`. Limits are measured between the rounds of the same
run: for decode the time to read the context's K and V once at the speed of a plain sum over memory; for a prefill
chunk the speed of a large fp32 matrix product. The model's shape is the demo model's (9 heads, 3 KV heads of 64).
Layers rotate so that none is still in a cache when its turn comes. Ratios compare the best rounds, the least
disturbed by whatever else the machine does.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from common.attention.base import AttentionBackend, AttentionBatch, LayerSpec
from common.attention.native import NativeAttention
from common.attention.reference import layer_views

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 16
CACHE_BYTES = 128 << 20  # beyond what any cache holds
DECODE = [(1, 512), (1, 2048), (8, 512), (8, 2048)]  # sequences, context
PREFILL = [(512, 512), (512, 1500), (64, 1500)]  # chunk, context


@dataclass(frozen=True, slots=True)
class Row:
    """One case, a layer. Times but `median_us` are the best round's. `of_limit`: the limit's time over ours."""

    case: str
    dtype: str
    num_seqs: int
    chunk: int
    context: int
    native_us: float
    median_us: float
    limit_us: float
    of_limit: float
    gflop_per_s: float
    sdpa_us: float
    of_sdpa: float


def rows(num_rounds: int = 15) -> list[Row]:
    """Every case, fp32 and bf16 KV. ConfigError where the kernel cannot run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            backend = NativeAttention()
            return [
                _measure(backend, dtype, num_seqs=num_seqs, chunk=chunk, context=context, num_rounds=num_rounds)
                for dtype in (torch.float32, torch.bfloat16)
                for num_seqs, chunk, context in [(n, 1, c) for n, c in DECODE] + [(1, t, c) for t, c in PREFILL]
            ]
    finally:
        torch.set_num_threads(threads)


def _measure(
    backend: AttentionBackend, dtype: torch.dtype, *, num_seqs: int, chunk: int, context: int, num_rounds: int
) -> Row:
    context_bytes = num_seqs * context * NUM_KV_HEADS * HEAD_DIM * 2 * dtype.itemsize
    num_layers = -(-CACHE_BYTES // context_bytes) + 1
    layers, batch = _scene(dtype, num_seqs=num_seqs, chunk=chunk, context=context, num_layers=num_layers)
    tokens = num_seqs * chunk
    query = torch.randn(tokens, NUM_HEADS, HEAD_DIM)
    key, value = torch.randn(2, tokens, NUM_KV_HEADS, HEAD_DIM)
    flop = 4 * num_seqs * NUM_HEADS * HEAD_DIM * sum(range(context - chunk + 1, context + 1))
    memory, matrix = torch.randn(CACHE_BYTES // 4), torch.randn(1024, 1024)
    turn = iter(range(10**9))

    def layer() -> LayerSpec:
        return layers[next(turn) % num_layers]

    calls: dict[str, Callable[[], object]] = {
        "native": lambda: backend.attend(layer(), query, key, value, batch),
        "sdpa": lambda: _gather_and_sdpa(layer(), query, batch, chunk),
        "read": lambda: memory.sum(),
        "matmul": lambda: matrix @ matrix,
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(num_rounds):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - started)
    best = {name: min(values) for name, values in times.items()}
    read_s = best["read"] * context_bytes / CACHE_BYTES
    limit_s = max(read_s, best["matmul"] * flop / (2 * 1024**3)) if chunk > 1 else read_s
    return Row(
        case="decode" if chunk == 1 else "prefill",
        dtype=str(dtype).removeprefix("torch."),
        num_seqs=num_seqs,
        chunk=chunk,
        context=context,
        native_us=best["native"] * 1e6,
        median_us=statistics.median(times["native"]) * 1e6,
        limit_us=limit_s * 1e6,
        of_limit=limit_s / best["native"],
        gflop_per_s=flop / best["native"] / 1e9,
        sdpa_us=best["sdpa"] * 1e6,
        of_sdpa=best["sdpa"] / best["native"],
    )


def _scene(
    dtype: torch.dtype, *, num_seqs: int, chunk: int, context: int, num_layers: int
) -> tuple[list[LayerSpec], AttentionBatch]:
    """Sequences of one length, their blocks scattered over the pool."""
    blocks_each = -(-context // BLOCK_SIZE)
    part = NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
    pool = torch.empty(num_seqs * blocks_each, num_layers * 2 * part, dtype=dtype).normal_()
    tables = torch.randperm(num_seqs * blocks_each).to(torch.int32).view(num_seqs, blocks_each)
    positions = torch.arange(context - chunk, context)
    layers = [
        LayerSpec(i, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HEAD_DIM, 2 * i * part, (2 * i + 1) * part, HEAD_DIM**-0.5)
        for i in range(num_layers)
    ]
    return layers, AttentionBatch(
        pool=pool,
        block_size=BLOCK_SIZE,
        starts=torch.arange(num_seqs + 1, dtype=torch.int32) * chunk,
        context_lens=torch.full((num_seqs,), context, dtype=torch.int32),
        block_tables=tables,
        row_blocks=tables[:, positions // BLOCK_SIZE].flatten().long(),
        row_offsets=(positions % BLOCK_SIZE).repeat(num_seqs),
    )


def _gather_and_sdpa(layer: LayerSpec, query: torch.Tensor, batch: AttentionBatch, chunk: int) -> torch.Tensor:
    """What one would write without a kernel: copy each sequence's K and V together, then torch's own attention."""
    views = layer_views(layer, batch.pool, batch.block_size)
    context = int(batch.context_lens[0])
    hidden = torch.ones(chunk, context, dtype=torch.bool).tril(context - chunk) if chunk > 1 else None
    outs = []
    for seq in range(batch.num_seqs):
        table = batch.block_tables[seq].long()
        key, value = (view[table].transpose(0, 1).flatten(1, 2)[None, :, :context].to(query.dtype) for view in views)
        rows = query[seq * chunk : (seq + 1) * chunk].transpose(0, 1)[None]
        outs.append(
            torch.nn.functional.scaled_dot_product_attention(
                rows, key, value, attn_mask=hidden, scale=layer.scale, enable_gqa=True
            )
        )
    return torch.cat(outs)


def table(measured: list[Row]) -> str:
    lines = ["one thread, a layer of 9 heads, 3 KV heads of 64; limit: memory read (decode), fp32 product (prefill)"]
    lines.append(
        f"{'':8}{'KV':10}{'seqs':>5}{'chunk':>6}{'context':>8}{'us':>9}{'median':>9}{'limit':>9}{'ratio':>7}"
        f"{'GFLOP/s':>9}{'SDPA us':>10}{'ratio':>7}"
    )
    lines += [
        f"{row.case:8}{row.dtype:10}{row.num_seqs:5}{row.chunk:6}{row.context:8,}{row.native_us:9,.0f}"
        f"{row.median_us:9,.0f}{row.limit_us:9,.0f}{row.of_limit:7.2f}{row.gflop_per_s:9.1f}{row.sdpa_us:10,.0f}"
        f"{row.of_sdpa:7.1f}"
        for row in measured
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    measured = rows(arguments.rounds)
    print(table(measured))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(row) for row in measured], indent=1))


if __name__ == "__main__":
    main()

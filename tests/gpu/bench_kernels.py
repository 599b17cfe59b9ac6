"""How fast the Triton kernels run on this GPU, beside limits measured in the same run.

Not yet run on a GPU. Decode: the time to read the context's K and V once, at the speed at which a large copy reads
and writes. A prefill chunk: the speed of a large matrix product of the same type. The shape is that of an 8B Llama
(32 heads, 8 KV heads of 128) in bfloat16, 16 tokens a block. Layers rotate, so that none lies in the L2 cache.
"""

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from common.attention.base import AttentionBatch, LayerSpec
from common.attention.triton import TritonAttention

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
DECODE = [(batch, context) for batch in (1, 8, 64) for context in (512, 2048, 8192)]
PREFILL = (512, 4096)  # chunk, context
PREFILL_ROWS = (16, 32, 64, 128)  # 32 is the default; from 64 on last bits may differ from decode's
_LEAST_BYTES = 256 << 20  # what the layers hold together: beyond any L2


def seconds(run: Callable[[int], object], num_runs: int = 30) -> float:
    """Median of single runs on the device's clock, after three to warm up; `run` gets the number of its turn."""
    for turn in range(3):
        run(turn)
    times = []
    for turn in range(num_runs):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run(turn)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def bytes_per_s() -> float:
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda _: target.copy_(source))


def flop_per_s() -> float:
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    return 2 * 8192**3 / seconds(lambda _: a @ a)


def make_case(num_seqs: int, chunk: int, context: int) -> tuple[list[LayerSpec], AttentionBatch, tuple[Any, Any, Any]]:
    """Layers enough to outgrow the cache, a batch whose blocks lie scattered, and query, key, value of the chunk."""
    kv_elements = NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
    num_blocks = -(-context // BLOCK_SIZE)
    num_layers = max(1, -(-_LEAST_BYTES // (num_seqs * num_blocks * 2 * kv_elements * 2)))
    layers = [
        LayerSpec(
            i,
            NUM_HEADS,
            NUM_KV_HEADS,
            HEAD_DIM,
            HEAD_DIM,
            2 * i * kv_elements,
            (2 * i + 1) * kv_elements,
            HEAD_DIM**-0.5,
        )
        for i in range(num_layers)
    ]
    pool = torch.randn(num_seqs * num_blocks, num_layers * 2 * kv_elements, device="cuda").to(torch.bfloat16)
    tables = torch.randperm(num_seqs * num_blocks, device="cuda").int().view(num_seqs, num_blocks)
    positions = torch.arange(context - chunk, context, device="cuda")
    batch = AttentionBatch(
        pool=pool,
        block_size=BLOCK_SIZE,
        starts=torch.arange(0, num_seqs * chunk + 1, chunk, dtype=torch.int32, device="cuda"),
        context_lens=torch.full((num_seqs,), context, dtype=torch.int32, device="cuda"),
        block_tables=tables,
        row_blocks=tables[:, positions // BLOCK_SIZE].flatten().long(),
        row_offsets=(positions % BLOCK_SIZE).repeat(num_seqs),
    )
    rows = num_seqs * chunk
    query, key, value = (
        torch.randn(rows, heads, HEAD_DIM, device="cuda").to(torch.bfloat16)
        for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
    )
    return layers, batch, (query, key, value)


def measure(num_seqs: int, chunk: int, context: int, *, limit_s: float, rows: int = 0) -> dict[str, Any]:
    """One layer's attention, storing included, and how much of it the limit would take."""
    layers, batch, states = make_case(num_seqs, chunk, context)
    backend = TritonAttention(prefill_rows=rows)
    taken = seconds(lambda turn: backend.attend(layers[turn % len(layers)], *states, batch))
    found = {"sequences": num_seqs, "chunk": chunk, "context": context, "rows": rows or None}
    return {**found, "us": taken * 1e6, "limit_us": limit_s * 1e6, "of_limit": limit_s / taken}


def prefill_keeps_bits(rows: int) -> bool:
    """Whether the chunk's last row has the bits that decode gives it."""
    chunk, context = PREFILL
    layers, batch, (query, key, value) = make_case(1, chunk, context)
    out = TritonAttention(prefill_rows=rows).attend(layers[0], query, key, value, batch)[-1]
    last = AttentionBatch(
        pool=batch.pool,
        block_size=BLOCK_SIZE,
        starts=torch.tensor([0, 1], dtype=torch.int32, device="cuda"),
        context_lens=batch.context_lens,
        block_tables=batch.block_tables,
        row_blocks=batch.row_blocks[-1:],
        row_offsets=batch.row_offsets[-1:],
    )
    return torch.equal(TritonAttention().attend(layers[0], query[-1:], key[-1:], value[-1:], last)[0], out)


def main(target: Path | None) -> None:
    """Print every case and write them to `target`."""
    bandwidth, compute = bytes_per_s(), flop_per_s()
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "gb_per_s": bandwidth / 1e9,
        "tflop_per_s": compute / 1e12,
        "decode": [],
        "prefill": [],
    }
    print({name: report[name] for name in ("device", "torch", "gb_per_s", "tflop_per_s")}, flush=True)
    for num_seqs, context in DECODE:
        kv_bytes = num_seqs * context * 2 * NUM_KV_HEADS * HEAD_DIM * 2
        report["decode"].append(measure(num_seqs, 1, context, limit_s=kv_bytes / bandwidth))
        print("decode", report["decode"][-1], flush=True)
    chunk, context = PREFILL
    flop = 4 * NUM_HEADS * HEAD_DIM * chunk * (context - chunk / 2)
    for rows in PREFILL_ROWS:
        found = measure(1, chunk, context, limit_s=flop / compute, rows=rows)
        report["prefill"].append({**found, "same_bits_as_decode": prefill_keeps_bits(rows)})
        print("prefill", report["prefill"][-1], flush=True)
    if target is not None:
        target.write_text(json.dumps(report, indent=1))

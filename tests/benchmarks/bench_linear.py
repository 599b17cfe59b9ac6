"""How fast linear layers run on one thread: fp32, bf16, 8 and 4 bits beside their limits and beside torch in fp32.

Run `python tests/benchmarks/bench_linear.py [--json FILE]`. The shapes are the demo model's: four products in each of
30 layers, and the head. Limits are measured between the rounds of the same run: `read` is the time to read the
weights once at the speed of a plain sum over memory, `product` the time of as many multiplications in a large fp32
product (which weights of 4 and 8 bits may beat). Times are the thread's own, of the best round: the least disturbed
by whatever else the machine does.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from common.native.linear import GROUP, Kind, PackedLinear, linear, packed_shape

LAYER = [(960, 576), (576, 576), (3072, 576), (576, 1536)]  # n, k: qkv, o, gate and up, down
PARTS = {"layers": LAYER * 30, "head": [(49_152, 576)]}
ROWS = (1, 8, 32, 512)
HEAD_ROWS = (1, 8, 32)  # only a sequence's last token reaches the head
CACHE_BYTES = 128 << 20  # beyond what any cache holds


@dataclass(frozen=True, slots=True)
class Row:
    """One part of the model at so many rows. Milliseconds of the best round but `median_ms`."""

    part: str
    kind: str
    rows: int
    native_ms: float
    median_ms: float
    read_ms: float
    product_ms: float
    torch_ms: float
    of_torch: float
    gmac_per_s: float
    rows_per_s: float


def rows(num_rounds: int = 9) -> list[Row]:
    """Every part, kind and number of rows. ConfigError where the kernel cannot be compiled."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            return [
                row
                for part, shapes in PARTS.items()
                for kind in (Kind.Q4, Kind.Q8, Kind.BF16, Kind.F32)
                for row in _measure(part, shapes, kind, num_rounds)
            ]
    finally:
        torch.set_num_threads(threads)


def _measure(part: str, shapes: list[tuple[int, int]], kind: Kind, num_rounds: int) -> list[Row]:
    layers = [random_layer(kind, n=n, k=k) for n, k in shapes]
    weights = [torch.randn(n, k) for n, k in shapes]
    memory, matrix = torch.randn(CACHE_BYTES // 4), torch.randn(1024, 1024)
    num_bytes, num_macs = sum(layer.num_bytes for layer in layers), sum(n * k for n, k in shapes)
    measured = []
    for num_rows in ROWS if part == "layers" else HEAD_ROWS:
        inputs = {k: torch.randn(num_rows, k) for _, k in shapes}
        outputs = {n: torch.empty(num_rows, n) for n, _ in shapes}
        calls: dict[str, Callable[[], object]] = {
            "native": lambda x=inputs, y=outputs: [linear(layer, x[layer.k], out=y[layer.n]) for layer in layers],
            "torch": lambda x=inputs: [torch.nn.functional.linear(x[w.shape[1]], w) for w in weights],
            "read": lambda: memory.sum(),
            "product": lambda: matrix @ matrix,
        }
        times = _times(calls, num_rounds)
        best = {name: min(values) for name, values in times.items()}
        measured.append(
            Row(
                part=part,
                kind=kind.name,
                rows=num_rows,
                native_ms=best["native"] * 1e3,
                median_ms=statistics.median(times["native"]) * 1e3,
                read_ms=best["read"] * num_bytes / CACHE_BYTES * 1e3,
                product_ms=best["product"] * num_macs * num_rows / 1024**3 * 1e3,
                torch_ms=best["torch"] * 1e3,
                of_torch=best["torch"] / best["native"],
                gmac_per_s=num_macs * num_rows / best["native"] / 1e9,
                rows_per_s=num_rows / best["native"],
            )
        )
    return measured


def random_layer(kind: Kind, *, n: int, k: int) -> PackedLinear:
    """Packed numbers by chance: what they are changes no time."""
    shape, dtype = packed_shape(kind, n=n, k=k)
    if kind in (Kind.F32, Kind.BF16):
        return PackedLinear(kind, n, k, torch.randn(shape).to(dtype))
    factors = (shape[0], k // GROUP, shape[-2])
    values = torch.randint(0, 256, shape, dtype=dtype)
    return PackedLinear(kind, n, k, values, torch.rand(factors).half(), torch.rand(factors).half())


def _times(calls: dict[str, Callable[[], object]], num_rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(num_rounds):
        for name, call in calls.items():
            started = time.thread_time()
            call()
            times[name].append(time.thread_time() - started)
    return times


def table(measured: list[Row]) -> str:
    lines = ["one thread, the demo model's 30 layers and its head; ms; read, product: limits (see the module)"]
    lines.append(
        f"{'':8}{'kind':6}{'rows':>5}{'ms':>9}{'median':>9}{'read':>9}{'product':>9}{'torch':>9}{'ratio':>7}"
        f"{'GMAC/s':>8}{'rows/s':>8}"
    )
    lines += [
        f"{row.part:8}{row.kind:6}{row.rows:5}{row.native_ms:9.2f}{row.median_ms:9.2f}{row.read_ms:9.2f}"
        f"{row.product_ms:9.2f}{row.torch_ms:9.2f}{row.of_torch:7.1f}{row.gmac_per_s:8.1f}{row.rows_per_s:8.0f}"
        for row in measured
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    measured = rows(arguments.rounds)
    print(table(measured))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(row) for row in measured], indent=1))


if __name__ == "__main__":
    main()

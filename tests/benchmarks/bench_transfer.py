"""How fast blocks travel: GB/s of each transport between two processes, beside a memcpy of the same blocks.

Run `python tests/benchmarks/bench_transfer.py [--json FILE]`. The limit is the memcpy, measured between the reads
of the same run; the ratio means more than the GB/s on a machine that does other things too.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import numpy as np
import uvloop

from common.kv_cache.memory import PoolMemory, allocate
from common.messages import BlockId, BlockRef, Generation, Incarnation, KVLayout, LayerKV, Offer, RequestId
from common.registry import load
from kv_transfer import ucx
from kv_transfer.base import TRANSPORTS, BlockReader, Transport

NUM_BLOCKS = 192
NUM_READ = 64
BLOCK_BYTES = (368_640, 737_280)
OWNER = Incarnation("0" * 32)
SECRET = b"one open call's"


@dataclass(frozen=True, slots=True)
class Row:
    """One transport at one block size; medians over the rounds. CPU seconds count both processes."""

    transport: str
    block_bytes: int
    gb_per_s: float
    best_gb_per_s: float
    memcpy_gb_per_s: float
    of_memcpy: float
    cpu_s_per_gb: float


def rows(num_rounds: int = 20) -> list[Row]:
    """Every transport that can run here, at every block size."""
    names = [name for name in TRANSPORTS if name != "ucx" or ucx.available() is None]
    return [uvloop.run(_measure(name, block_bytes, num_rounds)) for block_bytes in BLOCK_BYTES for name in names]


def _layout(block_bytes: int) -> KVLayout:
    """The demo model's shape (30 layers, 3 KV heads of 64) in 16 or 32 bits."""
    itemsize = block_bytes // (30 * 3 * 16 * 128)
    layout = KVLayout(16, {2: "bfloat16", 4: "float32"}[itemsize], itemsize, (LayerKV(3, 64, 64),) * 30)
    assert layout.block_bytes == block_bytes
    return layout


async def _measure(name: str, block_bytes: int, num_rounds: int) -> Row:
    pool = allocate(_layout(block_bytes), NUM_BLOCKS, Incarnation("1" * 32))
    shuffled = np.random.default_rng(0)
    refs = [BlockRef(BlockId(block), Generation(0)) for block in shuffled.permutation(NUM_BLOCKS)[:NUM_READ].tolist()]
    into = [BlockId(block) for block in shuffled.permutation(NUM_BLOCKS)[:NUM_READ].tolist()]
    owner = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--own", name, str(block_bytes), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert owner.stdin is not None
    assert owner.stdout is not None
    offer = msgspec.json.decode(await owner.stdout.readline(), type=Offer)
    transport: Transport = load(TRANSPORTS, name, kind="transport")()
    reader = transport.reader(offer, owner=OWNER, pool=pool)
    await reader.open()
    await reader.read(refs, into, secret=SECRET)
    row = await _rounds(name, reader, pool, refs, into, owner.pid, num_rounds)
    await reader.close()
    owner.stdin.close()
    await owner.wait()
    return row


async def _rounds(
    name: str,
    reader: BlockReader,
    pool: PoolMemory,
    refs: list[BlockRef],
    into: list[BlockId],
    owner_pid: int,
    num_rounds: int,
) -> Row:
    other = pool.blocks.copy()
    gigabytes = NUM_READ * pool.layout.block_bytes / 1e9
    reads_s: list[float] = []
    memcpys_s: list[float] = []
    cpu_s = 0.0
    for _ in range(num_rounds):
        start_s = time.perf_counter()
        for ref, block in zip(refs, into, strict=True):
            pool.blocks[block] = other[ref.block]
        memcpys_s.append(time.perf_counter() - start_s)
        start_s, start_cpu_s = time.perf_counter(), time.process_time() + _cpu_s(owner_pid)
        await reader.read(refs, into, secret=SECRET)
        reads_s.append(time.perf_counter() - start_s)
        cpu_s += time.process_time() + _cpu_s(owner_pid) - start_cpu_s
    read_s, memcpy_s = statistics.median(reads_s), statistics.median(memcpys_s)
    return Row(
        transport=name,
        block_bytes=pool.layout.block_bytes,
        gb_per_s=gigabytes / read_s,
        best_gb_per_s=gigabytes / min(reads_s),
        memcpy_gb_per_s=gigabytes / memcpy_s,
        of_memcpy=memcpy_s / read_s,
        cpu_s_per_gb=cpu_s / num_rounds / gigabytes,
    )


def _cpu_s(pid: int) -> float:
    """CPU seconds that a process has used, from the scheduler's own count of every thread."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


async def _own(name: str, block_bytes: int) -> None:
    pool = allocate(_layout(block_bytes), NUM_BLOCKS, OWNER)
    pool.blocks[:] = 1
    every_block = [BlockRef(BlockId(block), Generation(0)) for block in range(NUM_BLOCKS)]
    pool.grants.grant(SECRET, every_block, request=RequestId("the benchmark's"))
    transport: Transport = load(TRANSPORTS, name, kind="transport")()
    server = transport.serve(pool)
    print(msgspec.json.encode(await server.start()).decode(), flush=True)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), ended.set)
    await ended.wait()
    asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
    await server.close()


def table(measured: list[Row]) -> str:
    lines = [f"{NUM_READ} scattered blocks a read, two processes, {os.cpu_count()} cores"]
    lines.append(f"{'':9} {'block':>9} {'GB/s':>6} {'best':>6} {'memcpy':>7} {'ratio':>6} {'CPU s/GB':>9}")
    lines += [
        f"{row.transport:9} {row.block_bytes:9,} {row.gb_per_s:6.2f} {row.best_gb_per_s:6.2f} "
        f"{row.memcpy_gb_per_s:7.2f} {row.of_memcpy:6.2f} {row.cpu_s_per_gb:9.2f}"
        for row in measured
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--own", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.own:
        name, block_bytes = arguments.own
        uvloop.run(_own(name, int(block_bytes)))
        return
    measured = rows(arguments.rounds)
    print(table(measured))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(row) for row in measured], indent=1))


if __name__ == "__main__":
    main()

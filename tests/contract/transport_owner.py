"""A process that owns a pool, for tests that kill and freeze it: `python transport_owner.py TRANSPORT`.

Prints one JSON line, the offer, when it serves; ends when its standard input does.
"""

import asyncio
import sys

import msgspec
import numpy as np

from common.kv_cache.memory import allocate
from common.messages import BlockId, BlockRef, Generation, Incarnation, KVLayout, LayerKV, RequestId
from common.registry import load
from kv_transfer.base import TRANSPORTS, Transport

LAYOUT = KVLayout(block_size=16, dtype="float32", itemsize=4, layers=(LayerKV(2, 64, 64),) * 4)
INCARNATION = Incarnation("0" * 31 + "1")
GENERATION = Generation(3)
SECRET = b"one open call's"


async def main(name: str) -> None:
    pool = allocate(LAYOUT, 64, INCARNATION)
    pool.blocks[:] = np.arange(64, dtype=np.uint8)[:, None]
    pool.generations[:] = GENERATION
    every_block = [BlockRef(BlockId(block), GENERATION) for block in range(64)]
    pool.grants.grant(SECRET, every_block, request=RequestId("the test's"))
    transport: Transport = load(TRANSPORTS, name, kind="transport")()
    server = transport.serve(pool)
    offer = await server.start()
    print(msgspec.json.encode(offer).decode(), flush=True)
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), ended.set)
    await ended.wait()
    loop.remove_reader(sys.stdin.fileno())
    await server.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))

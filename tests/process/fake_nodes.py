"""A coordinator, a prefill and a decode node of the fake model in one process: quick enough for a thousand streams.

`python tests/process/fake_nodes.py MODEL VOCAB_SIZE MAX_MODEL_LEN NUM_BLOCKS` prints the coordinator's endpoint when
all serve, and ends when its stdin does. Links and blocks go over real sockets.
"""

import asyncio
import sys
from contextlib import AsyncExitStack

from common.config import EngineConfig, ModelConfig, NodeConfig
from common.kv_cache.memory import allocate
from common.messages import NodeAddress, Role
from common.model.fake import FakeRunner, fake_layout
from common.node import NodeHost, new_incarnation
from common.rpc.link import ZmqNetwork
from coordinator.server import Coordinator
from decode_node.node import DecodeNode
from decode_node.readers import Readers
from kv_transfer.base import BlockReader
from kv_transfer.choose import connect, serve_all
from prefill_node.node import PrefillNode


async def main(model: str, vocab_size: int, max_model_len: int, num_blocks: int) -> None:
    async with AsyncExitStack() as life:
        coordinator = Coordinator()
        network = ZmqNetwork()
        life.push_async_callback(network.close)
        server = await coordinator.listen("tcp://127.0.0.1:0", network)
        ticking = asyncio.create_task(coordinator.tick_forever())
        life.callback(ticking.cancel)
        for role in (Role.PREFILL, Role.DECODE):
            await _start(role, server.address, life, model, vocab_size, max_model_len, num_blocks)
        print(server.address, flush=True)
        await asyncio.to_thread(sys.stdin.read)


async def _start(
    role: Role,
    coordinator: str,
    life: AsyncExitStack,
    model: str,
    vocab_size: int,
    max_model_len: int,
    num_blocks: int,
) -> None:
    memory = allocate(fake_layout(), num_blocks, new_incarnation())
    network = ZmqNetwork()
    life.push_async_callback(network.close)
    host = NodeHost(
        NodeConfig(
            model=ModelConfig(model=model),
            engine=EngineConfig(max_running=2000, max_waiting=4000, max_step_tokens=8192),
            name=role,
            coordinators=(coordinator,),
        ),
        role,
        runner=FakeRunner(memory, max_model_len=max_model_len, vocab_size=vocab_size),
        memory=memory,
        network=network,
        serve_blocks=serve_all,
    )

    async def open_reader(owner: NodeAddress) -> tuple[str, BlockReader]:
        return await connect(owner.offers, owner=owner.incarnation, pool=memory, wanted="auto")

    if role is Role.PREFILL:
        await life.enter_async_context(host)
        await PrefillNode(host).join()
    else:
        readers = Readers(open_reader)
        life.push_async_callback(readers.close)
        await life.enter_async_context(host)
        await DecodeNode(host, readers).join()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))

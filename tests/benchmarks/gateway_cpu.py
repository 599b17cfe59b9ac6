"""CPU time that the gateway process spends on a relayed token: HTTP streams in front, a node of tokens behind.

    python -m tests.benchmarks.gateway_cpu [--streams 128] [--rate 100] [--seconds 5]

Three processes: a coordinator with a decode node that gives every stream one token a step, the gateway, and
clients that only read. Beside it in the same run: the node inside the gateway, which leaves out calls and
ZeroMQ, and the floor, nothing but writing the same events to as many sockets.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import resource
import socket
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvloop

from common.clock import new_id
from common.config import CoordinatorConfig, GatewayConfig
from common.errors import PeerLostError
from common.kv_cache.cache_news import OfferedNames
from common.messages import (
    FinishReason,
    Generate,
    Incarnation,
    KVLayout,
    LayerKV,
    NodeAddress,
    NodeCard,
    NodeId,
    NodeLoad,
    NodeState,
    NodeView,
    RequestBody,
    Role,
    Route,
    Routed,
    Tokens,
    View,
    Watch,
)
from common.model.tokenizer import Tokenizer
from common.rpc.base import IncomingCall
from common.rpc.endpoint import Inbox
from common.rpc.link import ZmqNetwork
from common.rpc.registration import stay_registered
from coordinator.gateway.serve import serve
from coordinator.server import serve as serve_coordinator
from tests.tiny_tokenizer import write_folder

MODEL = "bench"
_spawn = multiprocessing.get_context("spawn")


def free_address() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{found.getsockname()[1]}"


def card_at(address: str) -> NodeCard:
    return NodeCard(
        node=NodeId("decode-0"),
        incarnation=Incarnation(new_id()),
        role=Role.DECODE,
        address=address,
        model=MODEL,
        model_digest="digest",
        layout=KVLayout(16, "float32", 4, (LayerKV(1, 8, 8),)),
        max_model_len=1 << 20,
        num_blocks=1 << 20,
    )


class Steps:
    """One token to every open stream a step; the first stream with enough ends, and so on."""

    def __init__(self, rate: float, num_tokens: int) -> None:
        self._period_s = 1 / rate
        self._num_tokens = num_tokens
        self._left: dict[Any, int] = {}

    def add(self, inbox: Any) -> None:
        self._left[inbox] = self._num_tokens

    def drop(self, inbox: Any) -> None:
        self._left.pop(inbox, None)

    async def run(self) -> None:
        due_s = asyncio.get_running_loop().time()
        while True:
            for inbox, left in list(self._left.items()):
                self._left[inbox] = left - 1
                inbox.send(Tokens([40 + left % 50], FinishReason.LENGTH if left == 1 else None))
                if left == 1:
                    self.drop(inbox)
            due_s += self._period_s
            await asyncio.sleep(max(0.0, due_s - asyncio.get_running_loop().time()))


class Stream:
    def __init__(self) -> None:
        self.inbox: Inbox[Any] = Inbox()

    def send(self, item: Tokens) -> None:
        self.inbox.put(item)
        if item.finish is not None:
            self.inbox.end(None)


class InProcessCall:
    def __init__(self, body: RequestBody, card: NodeCard, steps: Steps) -> None:
        self._body, self._card, self._steps = body, card, steps
        self._stream = Stream()
        self.peer = card.incarnation

    def send(self, body: object) -> None: ...

    async def __aenter__(self) -> "InProcessCall":
        match self._body:
            case Watch():
                self._stream.inbox.put(View((NodeView(self._card, NodeState.READY, "", NodeLoad()),)))
            case Route():
                self._stream.inbox.put(Routed(NodeAddress(self._card.node, self.peer, self._card.address)))
            case Generate():
                self._steps.add(self._stream)
            case _:
                raise PeerLostError("unknown")
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._steps.drop(self._stream)

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        return await self._stream.inbox.get()


class InProcessNetwork:
    def __init__(self, steps: Steps) -> None:
        self._card, self._steps = card_at("here"), steps

    def client(self, **identity: object) -> "InProcessNetwork":
        return self

    def open(self, address: str, body: RequestBody, **limits: object) -> InProcessCall:
        return InProcessCall(body, self._card, self._steps)

    async def close(self) -> None: ...


# --- processes ----------------------------------------------------------------------------------------------


class Ending:
    """A call that ends its handler with its last token, as a node does."""

    def __init__(self, call: IncomingCall) -> None:
        self._call = call
        self.done = asyncio.Event()

    def send(self, item: Tokens) -> None:
        self._call.send(item)
        if item.finish is not None:
            self.done.set()


def run_node(coordinator: str, rate: float, num_tokens: int) -> None:
    async def main() -> None:
        network, steps = ZmqNetwork(), Steps(rate, num_tokens)

        async def generate(call: IncomingCall) -> None:
            ending = Ending(call)
            steps.add(ending)
            try:
                await ending.done.wait()
            finally:
                steps.drop(ending)

        address = free_address()
        card = card_at(address)
        await network.serve(address, {Generate: generate}, node=card.node, incarnation=card.incarnation)
        client = network.client(node=card.node, incarnation=card.incarnation)
        load = NodeLoad(free_blocks=1 << 20)
        await asyncio.gather(
            serve_coordinator(CoordinatorConfig(listen=coordinator), network),
            stay_registered(client, coordinator, card, lambda: load, OfferedNames()),
            steps.run(),
        )

    uvloop.run(main())


def run_clients(url: str, streams: int, results: Any) -> None:
    async def one(host: str, port: int) -> int:
        reader, writer = await asyncio.open_connection(host, port, limit=1 << 22)
        fields = {"model": MODEL, "stream": True, "ignore_eos": True, "max_tokens": 1 << 19, "prompt": [5, 6]}
        body = json.dumps(fields)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + body.encode())
        received = 0
        while piece := await reader.read(1 << 16):
            received += piece.count(b"data: {")
        writer.close()
        return received

    async def main() -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        counts = await asyncio.gather(*(one(host, int(port)) for _ in range(streams)))
        results.put(counts)

    uvloop.run(main())


async def measure_gateway(streams: int, rate: float, seconds: float, in_process: bool) -> float:
    """CPU seconds a token."""
    num_tokens = int(rate * seconds)
    coordinator = free_address()
    node = _spawn.Process(target=run_node, args=(coordinator, rate, num_tokens), daemon=True)
    steps = Steps(rate, num_tokens)
    network: Any = InProcessNetwork(steps) if in_process else ZmqNetwork()
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Tokenizer.from_folder(write_folder(Path(folder)))
    config = GatewayConfig(model=MODEL, port=0, coordinators=(coordinator,))
    tasks = [asyncio.create_task(serve(config, network, tokenizer=tokenizer, listening=listening))]
    if in_process:
        tasks.append(asyncio.create_task(steps.run()))
    else:
        node.start()
    url = await listening
    await ready(url)
    spent_s = await read_all(url, streams)
    await end(tasks)
    if node.is_alive():
        node.terminate()
    return spent_s


async def measure_floor(streams: int, rate: float, seconds: float) -> float:
    """The same events at the same pace from nothing but the transports' own write."""
    steps = Steps(rate, int(rate * seconds))
    event = b"data: {" + b"x" * 160 + b"\n\n"

    class Plain(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            self._transport = transport
            steps.add(self)

        def send(self, item: Tokens) -> None:
            self._transport.write(b"%x\r\n%b\r\n" % (len(event), event))
            if item.finish is not None:
                self._transport.close()

    server = await asyncio.get_running_loop().create_server(Plain, "127.0.0.1", 0)
    tasks = [asyncio.create_task(steps.run())]
    host, port = server.sockets[0].getsockname()
    spent_s = await read_all(f"http://{host}:{port}", streams)
    await end(tasks)
    server.close()
    return spent_s


async def read_all(url: str, streams: int) -> float:
    """CPU seconds a token of this process, while the clients in another one read."""
    results = _spawn.Queue()
    clients = _spawn.Process(target=run_clients, args=(url, streams, results), daemon=True)
    clients.start()
    before = resource.getrusage(resource.RUSAGE_SELF)
    num_events: int = sum(await asyncio.to_thread(results.get))
    after = resource.getrusage(resource.RUSAGE_SELF)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / num_events


async def end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def main(streams: int, rate: float, seconds: float) -> None:
    floor_s = await measure_floor(streams, rate, seconds)
    print(f"{streams} streams x {rate:g} tokens/s, CPU of the sending process a token:")
    print(f"  floor, plain writes          {1e6 * floor_s:5.1f} us")
    for in_process, label in ((True, "gateway, node in-process"), (False, "gateway, node over ZeroMQ")):
        spent_s = await measure_gateway(streams, rate, seconds, in_process)
        print(f"  {label:<28} {1e6 * spent_s:5.1f} us ({spent_s / floor_s:.1f} x)")


async def ready(url: str) -> None:
    import aiohttp

    async with aiohttp.ClientSession() as http:
        while True:
            async with http.get(f"{url}/ready") as response:
                if response.status == 200:
                    return
            await asyncio.sleep(0.05)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--rate", type=float, default=100.0)
    parser.add_argument("--seconds", type=float, default=5.0)
    given = parser.parse_args()
    uvloop.run(main(given.streams, given.rate, given.seconds))

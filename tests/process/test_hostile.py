"""Whatever comes in at any port of a running cluster: nobody dies, nobody grows, nobody else notices."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import aiohttp
import psutil
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from common.messages import (
    WIRE_VERSION,
    Beat,
    CallId,
    Generate,
    Hello,
    Incarnation,
    NodeId,
    Open,
    RequestId,
    Sampling,
    View,
    encode,
)
from common.rpc.endpoint import MAX_MESSAGE_BYTES
from tests.hostile import NOISE, Words, zmtp
from tests.hostile_http import http_requests
from tests.process.attacker import Attacker, Doors
from tests.process.cluster import BatonUp
from tests.process.questions import caller_of
from tests.process.streams import body, nothing_is_held, read_stream

pytestmark = [pytest.mark.process, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="session")]

MODEL = "tiny-llama"
MIB = 1 << 20
MAX_GROWTH_BYTES = 20 * MIB
MAX_BULK_BYTES = 24 * MAX_MESSAGE_BYTES
NUM_BULK_ROUNDS = 3
NUM_EXAMPLES = 120
NUM_STREAMS = 3


@pytest_asyncio.fixture(loop_scope="session")
async def view(standing_pair: BatonUp) -> View:
    async with caller_of(standing_pair.coordinator) as caller:
        return await caller.view()


@pytest_asyncio.fixture(loop_scope="session")
async def attacker(standing_pair: BatonUp, view: View) -> AsyncIterator[Attacker]:
    up = standing_pair
    up.children()
    with Attacker(
        Doors.of(url=up.url, coordinator=up.coordinator, view=view, ports=sorted(up.footprint.ports))
    ) as attacker:
        yield attacker


def attack(attacker: Attacker, view: View, *, num_examples: int) -> None:
    """Not shrunk: what fails here is a process that has ended, and the cluster is not started again for it."""
    words, right_words = Words(view, well_formed=False), Words(view, well_formed=True)

    @settings(
        max_examples=num_examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        calls=words.of_calls(),
        right_calls=right_words.of_calls(),
        reads=words.of_reads(),
        mappings=words.of_mappings(),
        raw=st.one_of(NOISE, zmtp()),
        requests=http_requests(MODEL),
    )
    def say(
        calls: list[list[bytes]],
        right_calls: list[list[bytes]],
        reads: list[list[bytes]],
        mappings: list[bytes],
        raw: bytes,
        requests: bytes,
    ) -> None:
        doors = attacker.doors
        attacker.say_zmq(doors.calls, calls)
        attacker.say_zmq(doors.calls, right_calls)
        attacker.say_zmq(doors.reads, reads)
        attacker.say_unix(mappings)
        attacker.say_tcp(doors.ports, raw)
        attacker.say_http(requests)

    say()


def residents(processes: Mapping[str, psutil.Process]) -> dict[str, int]:
    return {name: process.memory_info().rss for name, process in processes.items()}


@asynccontextmanager
async def nobody_is_harmed(up: BatonUp, *, may_grow_bytes: int = MAX_GROWTH_BYTES) -> AsyncIterator[list[int]]:
    """While the block runs streams come and go, each with its right text; the list grows with each that has ended.

    At its end the processes are the same ones, hold nothing, and are about as large as they were.
    """
    processes, before = up.children(), up.pids()
    finished: list[int] = []
    over = asyncio.Event()
    async with aiohttp.ClientSession() as session:
        asked = [body(MODEL, f"stream {n} goes on", max_tokens=100 + 40 * n) for n in range(NUM_STREAMS)]
        quiet = [await read_stream(session, up.url, one) for one in asked]

        async def keep_asking(number: int) -> None:
            while not over.is_set():
                assert await read_stream(session, up.url, asked[number]) == quiet[number]
                finished.append(number)

        sizes = residents(processes)
        async with asyncio.TaskGroup() as tasks:
            for number in range(NUM_STREAMS):
                tasks.create_task(keep_asking(number))
            try:
                yield finished
            finally:
                over.set()
    assert set(finished) == set(range(NUM_STREAMS))
    assert up.pids() == before
    growth = {name: size - sizes[name] for name, size in residents(processes).items()}
    print({name: f"{grown / MIB:.1f} MiB" for name, grown in growth.items()})
    await nothing_is_held(up.coordinator)
    assert max(growth.values()) < may_grow_bytes


async def test_hostile_messages_at_every_port_harm_nobody(
    standing_pair: BatonUp, view: View, attacker: Attacker
) -> None:
    doors = attacker.doors
    assert len(doors.calls) == 4, "a coordinator, a gateway, two nodes"
    assert len(doors.reads) == len(doors.mappings) == 2, "both nodes offer their blocks in both ways"
    async with nobody_is_harmed(standing_pair) as finished:
        await asyncio.to_thread(attack, attacker, view, num_examples=NUM_EXAMPLES)
    print(f"{attacker.num_messages} messages, {len(finished)} streams")
    assert attacker.num_messages > 2_000


def bulky(view: View) -> Mapping[str, list[bytes]]:
    """What one connection says to a server of calls: as much as a message may hold, and more."""
    digest, most = view.nodes[0].card.model_digest, MAX_MESSAGE_BYTES - 1_000
    hello = encode([Hello(WIRE_VERSION, NodeId("stranger"), Incarnation("1" * 32))])
    generate = Generate(RequestId("r"), 0, digest, [7] * most, 1, Sampling(max_tokens=1, seed=1))
    calls = {CallId(70_000 + number): 0 for number in range(most // 6)}
    text = b"\xdb" + most.to_bytes(4, "big") + bytes(most)
    return {
        "over the limit": [hello, bytes(MAX_MESSAGE_BYTES + 1)],
        "tokens": [hello, encode([Open(CallId(1), generate)])],
        "calls": [hello, encode([Beat(calls)])],
        "a name": [encode([Hello(WIRE_VERSION, NodeId("n" * most), Incarnation("1" * 32))])],
        "a tag": [hello, b"\x91\x81\xa4type" + text],
        "a field nobody knows": [hello, b"\x91\x83\xa4type\xa6Cancel\xa4call\x01\xa1x" + text],
        "lists in lists": [hello, b"\x91" * most + b"\x90"],
    }


async def test_messages_as_large_as_they_may_be_harm_nobody(
    standing_pair: BatonUp, view: View, attacker: Attacker
) -> None:
    """What it took to decode one message is kept for the next."""
    said = [[[part] for part in parts] for parts in bulky(view).values()]
    async with nobody_is_harmed(standing_pair, may_grow_bytes=MAX_BULK_BYTES):
        for messages in said * NUM_BULK_ROUNDS:
            await asyncio.to_thread(attacker.say_zmq, attacker.doors.calls, messages)

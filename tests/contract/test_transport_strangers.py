"""What comes to a server's door uninvited: it loses its own connection at most; a good reader never notices."""

import asyncio
import errno
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
import pytest
import zmq

from common.clock import new_id
from common.errors import ConfigError, TransferError
from common.keys import KeyPair, Keys, Trust
from common.kv_cache.memory import PoolMemory, allocate
from common.messages import BlockId, BlockRef, Generation, Incarnation, KVLayout, LayerKV, Offer, RequestId
from kv_transfer import shm_owner, shm_wire, tcp_owner, tcp_wire, ucx
from kv_transfer.base import TransferSettings, Transport
from kv_transfer.shm import ShmTransport
from kv_transfer.tcp import TcpTransport
from kv_transfer.ucx import UcxTransport
from tests.pools import WITH_KEYS

LAYOUT = KVLayout(block_size=16, dtype="float32", itemsize=4, layers=(LayerKV(2, 64, 64),) * 4)
SECRET = b"one open call's"
JUNK = [b"", b"\0", b"\xff" * 64, b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 512]


def ref(block: int, generation: int = 0) -> BlockRef:
    return BlockRef(BlockId(block), Generation(generation))


@pytest.fixture
def source() -> PoolMemory:
    pool = allocate(LAYOUT, 16, Incarnation(new_id()))
    pool.blocks[:] = np.arange(16, dtype=np.uint8)[:, None]
    pool.grants.grant(SECRET, [ref(block) for block in range(16)], request=RequestId("r"))
    return pool


@asynccontextmanager
async def serving(transport: Transport, source: PoolMemory) -> AsyncIterator[Offer]:
    """A server that at the end still serves whoever behaves."""
    server = transport.serve(source)
    offer = await server.start()
    try:
        yield offer
        destination = allocate(LAYOUT, 16, Incarnation(new_id()))
        reader = transport.reader(offer, owner=source.incarnation, pool=destination)
        await reader.open()
        await reader.read([ref(block) for block in range(16)], [BlockId(block) for block in range(16)], secret=SECRET)
        await reader.close()
        np.testing.assert_array_equal(destination.blocks, source.blocks)
    finally:
        await server.close()


# --- shm ---------------------------------------------------------------------------------------------


async def hear(connection: socket.socket) -> bytes:
    async with asyncio.timeout(5):
        return await asyncio.get_running_loop().sock_recv(connection, 1 << 16)


@pytest.mark.parametrize("junk", JUNK[1:])
async def test_shm_hangs_up_on_who_says_no_hello(source: PoolMemory, junk: bytes) -> None:
    async with serving(ShmTransport(), source) as offer:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.setblocking(False)
            stranger.connect("\0" + offer.address)
            stranger.send(junk)
            assert await hear(stranger) == b""


async def test_shm_hangs_up_on_who_says_nothing(source: PoolMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_transfer.shm_owner._HELLO_TIMEOUT_S", 0.05)
    async with serving(ShmTransport(), source) as offer:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.setblocking(False)
            stranger.connect("\0" + offer.address)
            assert await hear(stranger) == b""


@pytest.mark.parametrize("words", [[shm_wire.Ask(SECRET)], ["Hello", "Hello"], ["Hello", shm_wire.Ask(b"guess"), b"x"]])
async def test_shm_hangs_up_on_who_asks_out_of_turn(source: PoolMemory, words: list[object]) -> None:
    async with serving(ShmTransport(), source) as offer:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.setblocking(False)
            stranger.connect("\0" + offer.address)
            for word in words:
                hello = shm_wire.Hello(source.incarnation)
                stranger.send(word if isinstance(word, bytes) else shm_wire.encode(hello if word == "Hello" else word))
            while answer := await hear(stranger):
                assert b"Grant" not in answer


async def test_shm_rests_when_descriptors_run_out_and_then_lets_readers_in_again(
    source: PoolMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_failed = 0

    class Exhausted(socket.socket):
        def accept(self) -> Any:
            nonlocal num_failed
            if num_failed < 3:
                num_failed += 1
                raise OSError(errno.EMFILE, "too many open files")
            return super().accept()

    monkeypatch.setattr(shm_owner, "_REST_S", 0.02)
    monkeypatch.setattr(shm_owner.socket, "socket", Exhausted)
    began_s = time.monotonic()
    async with serving(ShmTransport(), source):
        pass  # its good reader waits in line meanwhile
    assert num_failed == 3
    assert time.monotonic() - began_s >= 3 * 0.02


# --- tcp ---------------------------------------------------------------------------------------------


class Stranger:
    """Speaks ZeroMQ, for the rest whatever the test says."""

    def __init__(self, offer: Offer) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(offer.address)

    def say(self, *words: object) -> None:
        for word in words:
            self.socket.send(word if isinstance(word, bytes) else msgspec.msgpack.encode(word))

    async def answer(self) -> tcp_wire.ReaderHears:
        """The next word, skipping the bytes of chunks."""
        assert await asyncio.to_thread(self.socket.poll, 5_000), "no answer"
        return tcp_wire.reader_decoder.decode(self.socket.recv_multipart()[0])

    def close(self) -> None:
        self.socket.close()
        self._context.term()


@pytest.fixture
async def tcp_offer(source: PoolMemory) -> AsyncIterator[Offer]:
    async with serving(TcpTransport(), source) as offer:
        yield offer


@pytest.fixture
def stranger(tcp_offer: Offer) -> Iterator[Stranger]:
    made = Stranger(tcp_offer)
    yield made
    made.close()


@pytest.mark.parametrize("junk", JUNK)
async def test_tcp_refuses_who_says_no_hello(stranger: Stranger, junk: bytes) -> None:
    stranger.say(junk)
    assert isinstance(await stranger.answer(), tcp_wire.Refuse)


@pytest.mark.parametrize("junk", JUNK)
async def test_tcp_survives_bytes_that_are_no_zeromq(tcp_offer: Offer, junk: bytes) -> None:
    address = urlsplit(tcp_offer.address)
    _, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(junk)
    writer.close()
    await asyncio.wait([asyncio.ensure_future(writer.wait_closed())])


async def test_tcp_refuses_a_message_above_its_limit_and_lives(stranger: Stranger) -> None:
    stranger.say(b"x" * (tcp_wire.MAX_CONTROL_BYTES + 1))


@pytest.mark.parametrize(
    "words",
    [
        [tcp_wire.Credit(1)],
        [tcp_wire.Read(0, (ref(0),), SECRET), tcp_wire.Read(0, (ref(0),), SECRET)],
        [tcp_wire.Read(0, (ref(0),), SECRET), tcp_wire.Credit(1 << 62)],
        [tcp_wire.Read(0, tuple(ref(0) for _ in range(1 << 17)), SECRET) for _ in range(1)] * 9,
        ["Hello again"],
        [b"\x93\xa4Read\x00\x91\x92\xcf\xff\xff\xff\xff\xff\xff\xff\xff"],
        [["Read", -1, [[0, 0]], SECRET]],
        [["Read", 0, [["0", 0]], SECRET]],
        [["Read", 0, [[0, 0]]]],
        [["Credit", -5]],
        [["Verdict", 0, None]],
    ],
    ids=lambda words: str(words)[:40],
)
async def test_tcp_drops_a_reader_that_breaks_the_protocol(
    source: PoolMemory, stranger: Stranger, words: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_owner, "_MAX_QUEUED_REFS", 1 << 16)
    hello = tcp_wire.Hello(tcp_wire.VERSION, source.incarnation)
    stranger.say(hello)
    assert isinstance(await stranger.answer(), tcp_wire.Welcome)
    stranger.say(*words)
    while not isinstance(await stranger.answer(), tcp_wire.Refuse):
        pass
    stranger.say(tcp_wire.Read(7, (ref(0),), SECRET))
    while not isinstance(await stranger.answer(), tcp_wire.Refuse):
        pass


@pytest.mark.parametrize("block", [-1, 16, -(1 << 63), (1 << 63) - 1])
async def test_tcp_answers_a_read_outside_the_pool_with_an_error(
    source: PoolMemory, stranger: Stranger, block: int
) -> None:
    stranger.say(tcp_wire.Hello(tcp_wire.VERSION, source.incarnation), tcp_wire.Read(0, (ref(0), ref(block)), SECRET))
    assert isinstance(await stranger.answer(), tcp_wire.Welcome)
    verdict = await stranger.answer()
    assert isinstance(verdict, tcp_wire.Verdict)
    assert verdict.error is not None


async def test_tcp_sends_no_more_than_the_window_to_a_reader_that_gives_no_credit(
    source: PoolMemory, stranger: Stranger
) -> None:
    num_refs = 2 * tcp_wire.WINDOW_BYTES // LAYOUT.block_bytes
    stranger.say(
        tcp_wire.Hello(tcp_wire.VERSION, source.incarnation),
        tcp_wire.Read(0, tuple(ref(k % 16) for k in range(num_refs)), SECRET),
        tcp_wire.Read(1, (ref(16),), SECRET),  # refused at once: its verdict comes after all chunks that were sent
    )
    answers = [await stranger.answer()]
    while not isinstance(answers[-1], tcp_wire.Verdict):
        answers.append(await stranger.answer())
    chunks = [answer for answer in answers if isinstance(answer, tcp_wire.Chunk)]
    assert len(chunks) == tcp_wire.WINDOW_BYTES // tcp_wire.CHUNK_BYTES


@pytest.mark.parametrize("who", ["no keys", "other keys", "no allowed key"])
async def test_tcp_with_keys_lets_no_stranger_in(source: PoolMemory, who: str) -> None:
    keys = WITH_KEYS.trust.keys
    assert keys is not None
    others = KeyPair(*zmq.curve_keypair())
    trust = {
        "no keys": Trust(),
        "other keys": Trust(keys=Keys(server=others, client=others)),
        "no allowed key": Trust(keys=Keys(server=keys.server, client=others)),
    }[who]
    async with serving(TcpTransport(WITH_KEYS), source) as offer:
        stranger = TcpTransport(TransferSettings(trust=trust)).reader(offer, owner=source.incarnation, pool=source)
        with pytest.raises(TransferError, match=r"tcp: the owner at .* refused: .*keys"):
            await stranger.open()


@pytest.mark.parametrize("transport", [TcpTransport, UcxTransport])
async def test_beyond_this_host_blocks_are_served_with_keys_or_a_word_only(
    source: PoolMemory, transport: type[TcpTransport | UcxTransport]
) -> None:
    if transport is UcxTransport and ucx.available() is not None:
        pytest.skip(str(ucx.available()))
    for host in ("192.0.2.1", "2001:db8::1"):  # nobody's, so nothing is ever bound there
        with pytest.raises(ConfigError, match=r"--keys FOLDER; or say --open-network"):
            await transport().serve(source, listen_host=host).start()
    for trust in (WITH_KEYS.trust, Trust(open_network=True)):
        with pytest.raises(TransferError, match="cannot listen"):
            await TcpTransport(TransferSettings(trust=trust)).serve(source, listen_host="192.0.2.1").start()


async def test_tcp_forgets_a_reader_whose_connection_ends(source: PoolMemory) -> None:
    transport = TcpTransport()
    server = transport.serve(source)
    offer = await server.start()
    reader = transport.reader(offer, owner=source.incarnation, pool=allocate(LAYOUT, 4, Incarnation(new_id())))
    await reader.open()
    assert server.num_readers == 1
    await reader.close()
    async with asyncio.timeout(5):
        while server.num_readers:  # noqa: ASYNC110 - ZeroMQ has no event for having let go of a peer
            await asyncio.sleep(0)
    await server.close()


# --- ucx ---------------------------------------------------------------------------------------------

needs_ucx = pytest.mark.skipif(ucx.available() is not None, reason=str(ucx.available()))


@needs_ucx
async def test_ucx_survives_bytes_that_are_no_ucx(source: PoolMemory) -> None:
    async with serving(UcxTransport(), source) as offer:
        address = urlsplit(offer.address)
        for junk in JUNK:
            _, writer = await asyncio.open_connection(address.hostname, address.port)
            writer.write(junk)
            writer.close()
            await asyncio.wait([asyncio.ensure_future(writer.wait_closed())])


@needs_ucx
async def test_ucx_hangs_up_on_who_does_not_know_the_secret(source: PoolMemory) -> None:
    async with serving(UcxTransport(), source) as offer:
        guess = Offer("ucx", offer.address.split("?")[0] + "?secret=guess&fast=0")
        reader = UcxTransport().reader(guess, owner=source.incarnation, pool=source)
        with pytest.raises(TransferError, match="does not answer the greeting"):
            await reader.open()


@needs_ucx
async def test_ucx_hangs_up_on_who_says_nothing_or_nonsense(
    source: PoolMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kv_transfer import ucx_owner, ucx_wire

    monkeypatch.setattr(ucx_owner, "_HELLO_TIMEOUT_S", 0.3)
    async with serving(UcxTransport(), source) as offer:
        address = urlsplit(offer.address)
        for junk in (None, np.full(64, 255, np.uint8), np.zeros(3, np.uint8)):
            line = await ucx_wire.connect("127.0.0.1", address.port or 0, timeout_s=5)
            if junk is not None:
                await line.send(junk, 0)
            async with asyncio.timeout(5):
                await asyncio.wait([line.next_word()])
            line.abort()

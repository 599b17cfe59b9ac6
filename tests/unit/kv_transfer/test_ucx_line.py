"""`Line` over an endpoint that loses the end of its operations, as ucxx can when a connection breaks."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from common.errors import PeerLostError, TransferError
from kv_transfer import ucx_wire


class ForgetfulEndpoint:
    """Operations end when the test says so, or never."""

    def __init__(self) -> None:
        self._ep = SimpleNamespace(alive=True)
        self.closes_at_once = True
        self.cancelled = False
        self.done = asyncio.Event()

    async def recv(self, _into: object, *, tag: int) -> None:
        try:
            await self.done.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise

    send = recv

    def abort(self, period: int) -> None:
        self._ep.alive = not self.closes_at_once


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucx_wire, "_GRACE_S", 0.01)


def buffer() -> ucx_wire.Bytes:
    return np.zeros(8, np.uint8)


async def test_an_operation_whose_end_is_lost_settles_after_the_connection_is_closed() -> None:
    line = ucx_wire.Line(ForgetfulEndpoint())
    receive, send = line.receive(buffer(), 1), line.send(buffer(), 2)
    line.abort()
    for operation in (receive, send):
        with pytest.raises(PeerLostError):
            async with asyncio.timeout(5):
                await operation


async def test_no_operation_is_given_up_before_the_connection_is_closed() -> None:
    """Until then UCX may still write into the buffer."""
    endpoint = ForgetfulEndpoint()
    endpoint.closes_at_once = False
    line = ucx_wire.Line(endpoint)
    receive = line.receive(buffer(), 1)
    line.abort()
    await asyncio.wait([receive], timeout=0.1)
    assert not receive.done()
    assert not endpoint.cancelled
    endpoint._ep.alive = False
    with pytest.raises(PeerLostError):
        async with asyncio.timeout(5):
            await receive


async def test_an_operation_is_never_given_up_without_an_abort() -> None:
    endpoint = ForgetfulEndpoint()
    receive = ucx_wire.Line(endpoint).receive(buffer(), 1)
    await asyncio.wait([receive], timeout=0.05)
    assert not receive.done()
    endpoint.done.set()
    await receive


async def test_nothing_begins_on_a_broken_connection() -> None:
    line = ucx_wire.Line(ForgetfulEndpoint())
    line.abort()
    line.abort()
    with pytest.raises(PeerLostError):
        await line.receive(buffer(), 1)


async def test_only_writable_runs_of_bytes_are_received_into() -> None:
    line = ucx_wire.Line(ForgetfulEndpoint())
    frozen = buffer()
    frozen.flags.writeable = False
    for wrong in (frozen, np.zeros((4, 4), np.uint8)[:, 1], np.zeros(4, np.float32)):
        with pytest.raises(TransferError):
            line.receive(wrong, 1)  # type: ignore[arg-type]

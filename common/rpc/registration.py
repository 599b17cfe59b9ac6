"""A node's standing with a coordinator: one Register call, held open and made again for as long as the node lives."""

import asyncio
from collections.abc import Callable

from common import telemetry
from common.errors import BatonError
from common.kv_cache.cache_news import OfferedNames
from common.messages import NodeCard, NodeLoad, Register, Registered, Report
from common.rpc.base import Client, OutgoingCall
from common.tasks import ended

log = telemetry.logger(__name__)

_FIRST_RETRY_S = 0.2
_LAST_RETRY_S = 1.0  # a restarted coordinator is to know all nodes again within two seconds
_HASTE = 0.1
"""While the cache's names are not all told, reports follow each other this much faster."""


async def stay_registered(
    client: Client,
    coordinator: str,
    card: NodeCard,
    load: Callable[[], NodeLoad],
    offered: OfferedNames,
    *,
    report_s: float = 0.5,
) -> None:
    """Runs until cancelled. A coordinator that is away is asked again and again; it learns all anew each time."""
    retry_s = _FIRST_RETRY_S
    while True:
        try:
            async with client.open(coordinator, Register(card)) as call:
                retry_s = _FIRST_RETRY_S
                await _report_while_open(call, load, offered, report_s)
        except BatonError as error:
            log.info("coordinator away", coordinator=coordinator, error=str(error), retry_s=retry_s)
        except Exception:  # an edge: a node that nobody knows is worse than a bug that is logged again and again
            log.exception("registration failed", coordinator=coordinator, retry_s=retry_s)
        await asyncio.sleep(retry_s)
        retry_s = min(retry_s * 2, _LAST_RETRY_S)


async def _report_while_open(
    call: OutgoingCall, load: Callable[[], NodeLoad], offered: OfferedNames, report_s: float
) -> None:
    async def report() -> None:
        with offered.telling() as teller:
            while True:
                call.send(Report(load(), teller.next()))
                await asyncio.sleep(report_s * _HASTE if teller.has_more else report_s)

    reporter = asyncio.create_task(report())
    try:
        async for item in call:
            assert isinstance(item, Registered)
            if item.reason:
                log.warning("not routed to", coordinator=call.peer, reason=item.reason)
            else:
                log.info("registered", coordinator=call.peer)
    finally:
        await ended(reporter)

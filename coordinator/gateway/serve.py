"""The gateway process: `serve` runs until cancelled."""

import asyncio
import errno
from contextlib import AsyncExitStack

from aiohttp import web

from common import telemetry
from common.clock import SystemClock, new_id
from common.config import GatewayConfig
from common.errors import ConfigError
from common.messages import Incarnation, NodeId
from common.model.store import resolve
from common.model.tokenizer import Tokenizer
from common.rpc.base import Network
from coordinator.gateway.app import Gateway
from coordinator.gateway.connection import GatewayRunner
from coordinator.gateway.watch import ClusterWatch

log = telemetry.logger(__name__)

DRAIN_S = 3.0
"""Requests in flight get this long to end when the gateway stops; then they are cancelled."""


async def serve(
    config: GatewayConfig,
    network: Network,
    *,
    tokenizer: Tokenizer | None = None,
    listening: "asyncio.Future[str] | None" = None,
) -> None:
    """Until cancelled. `listening` is given the URL. ConfigError if the port is taken or the model has no tokenizer."""
    if tokenizer is None:
        # On a thread: fetching and converting a model takes a while, and a signal must still end it.
        tokenizer = await asyncio.to_thread(_tokenizer_of, config.model)
    clock = SystemClock()
    async with AsyncExitStack() as resources:
        client = network.client(node=NodeId("gateway"), incarnation=Incarnation(new_id()))
        resources.push_async_callback(client.close)
        model = config.served_name or config.model
        cluster = ClusterWatch(client, config.coordinators, model=model, clock=clock)
        watching = asyncio.create_task(cluster.run(), name="watch")
        resources.push_async_callback(_ended, watching)
        gateway = Gateway(config, tokenizer=tokenizer, cluster=cluster, client=client, clock=clock)
        runner = GatewayRunner(
            gateway.app(), access_log=None, handler_cancellation=True, shutdown_timeout=DRAIN_S, keepalive_timeout=75.0
        )
        await runner.setup()
        resources.push_async_callback(runner.cleanup)
        url = await _listen(runner, config)
        log.info("serving", url=url, model=model)
        if listening is not None:
            listening.set_result(url)
        try:
            await asyncio.gather(watching)
        finally:
            gateway.is_stopping = True


def _tokenizer_of(model: str) -> Tokenizer:
    return Tokenizer.from_folder(resolve(model))


async def _listen(runner: web.AppRunner, config: GatewayConfig) -> str:
    try:
        await web.TCPSite(runner, config.host, config.port).start()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {config.port} on {config.host} is taken by another program: stop that one, "
                "or choose another port with --port (0 takes any free one)"
            ) from error
        raise ConfigError(f"cannot listen on {config.host}:{config.port}: {error.strerror or error}") from error
    host, port = runner.addresses[0][:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])

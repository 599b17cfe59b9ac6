"""The gateway process: `serve` runs until cancelled."""

import asyncio
import errno
import os
from contextlib import AsyncExitStack
from typing import NoReturn

from aiohttp import web

from common import telemetry
from common.clock import SystemClock, new_id
from common.config import GatewayConfig
from common.errors import ConfigError
from common.keys import is_local
from common.messages import Audit, GatewayCard, Holdings, Incarnation, NodeId
from common.model.store import resolve
from common.model.tokenizer import Tokenizer
from common.rpc.base import Client, IncomingCall, Network, Server
from common.tasks import ended
from coordinator.gateway.app import LAST_WORDS_S, Gateway
from coordinator.gateway.connection import GatewayRunner
from coordinator.gateway.watch import ClusterWatch

log = telemetry.logger(__name__)


async def serve(
    config: GatewayConfig,
    network: Network,
    *,
    tokenizer: Tokenizer | None = None,
    listening: "asyncio.Future[str] | None" = None,
) -> None:
    """Until cancelled. `listening` is given the URL. ConfigError if the port is taken or the model has no tokenizer."""
    _check_bind(config)
    if tokenizer is None:
        # On a thread: fetching and converting a model takes a while, and a signal must still end it.
        tokenizer = await asyncio.to_thread(_tokenizer_of, config.model)
    clock = SystemClock()
    async with AsyncExitStack() as resources:
        incarnation = Incarnation(new_id())
        name = NodeId(f"gateway-{incarnation[:6]}")
        client = network.client(node=name, incarnation=incarnation)
        resources.push_async_callback(client.close)
        model = config.served_name or config.model
        cluster = ClusterWatch(client, config.coordinators, model=model, clock=clock)
        watching: list[asyncio.Task[NoReturn]] = []
        resources.push_async_callback(lambda: ended(*watching))
        gateway = Gateway(config, tokenizer=tokenizer, cluster=cluster, client=client, clock=clock)

        async def audit(call: IncomingCall) -> None:
            call.send(_holdings(name, incarnation, server, client, gateway))

        server = await network.serve(config.listen, {Audit: audit}, node=name, incarnation=incarnation)
        resources.push_async_callback(server.close)
        runner = GatewayRunner(
            gateway.app(),
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=LAST_WORDS_S,  # for what `finish` left
            keepalive_timeout=75.0,
        )
        await runner.setup()
        resources.push_async_callback(runner.cleanup)
        site, url = await _listen(runner, config)
        cluster.card = GatewayCard(name, incarnation, server.address, url, model, os.uname().nodename, os.getpid())
        watching.append(asyncio.create_task(cluster.run(), name="watch"))
        log.info("serving", url=url, model=model)
        if listening is not None:
            listening.set_result(url)
        try:
            await asyncio.gather(*watching)
        finally:
            await site.stop()
            # A task of its own: this one is being cancelled, where asyncio.timeout fails before Python 3.11.3
            await asyncio.create_task(gateway.finish(config.drain_s), name="finish")


def _check_bind(config: GatewayConfig) -> None:
    if config.api_keys or config.links.open_network or is_local(f"tcp://{config.host}:{config.port}"):
        return
    raise ConfigError(
        f"host = {config.host!r} can be reached from other hosts, and there are no API keys: whoever reaches it could "
        "use the model. Make a file of them with `baton api-key FILE --tenant NAME` and give it as --api-keys FILE; or "
        "say --open-network, where you trust everybody who reaches the port"
    )


def _tokenizer_of(model: str) -> Tokenizer:
    return Tokenizer.from_folder(resolve(model))


async def _listen(runner: web.AppRunner, config: GatewayConfig) -> tuple[web.TCPSite, str]:
    site = web.TCPSite(runner, config.host, config.port)
    try:
        await site.start()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {config.port} on {config.host} is taken by another program: stop that one, "
                "or choose another port with --port (0 takes any free one)"
            ) from error
        raise ConfigError(f"cannot listen on {config.host}:{config.port}: {error.strerror or error}") from error
    host, port = runner.addresses[0][:2]
    return site, f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _holdings(name: NodeId, incarnation: Incarnation, server: Server, client: Client, gateway: Gateway) -> Holdings:
    return Holdings(
        kind="gateway",
        node=name,
        incarnation=incarnation,
        incoming=tuple(server.held_calls()),
        outgoing=tuple(client.held_calls()),
        requests=gateway.requests,
    )

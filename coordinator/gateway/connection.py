"""Connections that speak no HTTP: they too get OpenAI's error shape, and leave one debug line instead of a traceback.

aiohttp answers what it cannot parse below the application, where no middleware is asked; `handle_error` is its
hook there, but the class that has it is built in `Server.__call__` (aiohttp is pinned: see the tests).
"""

from aiohttp import web

from common import telemetry
from coordinator.gateway import replies
from coordinator.gateway.answers import json_response

log = telemetry.logger(__name__)

_MAX_REASON_CHARS = 160


class GatewayRunner(web.AppRunner):
    """An AppRunner whose connections are `GatewayConnection`s."""

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        server.__class__ = _GatewayServer
        return server


class _GatewayServer(web.Server):
    def __call__(self) -> web.RequestHandler:
        return GatewayConnection(self, loop=self._loop, **self._kwargs)


class GatewayConnection(web.RequestHandler):
    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """4xx is what a peer sent; anything else is ours, and for aiohttp to log."""
        if status >= 500 or request.writer.output_size > 0:
            return super().handle_error(request, status, exc, message)
        reason = (message or "").strip().partition("\n")[0].rstrip(":")[:_MAX_REASON_CHARS]
        log.debug("not HTTP", peer=request.remote, reason=reason)
        response = json_response(replies.http_error_body(f"this is not a valid HTTP request: {reason}"), status=status)
        response.force_close()
        return response

"""The HTTP routes. Thin: parse, hand over, answer; what goes wrong becomes OpenAI's error shape at one place.

aiohttp runs one task a request and cancels it when the connection is lost (`handler_cancellation`), while
nothing is being written too: that is how a client that hangs up ends everything it caused, at once.
"""

import asyncio
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

from aiohttp import web

from common import telemetry
from common.clock import Clock, new_id
from common.config import GatewayConfig
from common.errors import BatonError, InternalError, ModelNotFoundError, RequestError, UnavailableError
from common.messages import Origin, Priority, RequestId, Sampling
from common.model.tokenizer import Tokenizer
from common.rpc.base import Client
from coordinator.gateway import openai, replies, wishes
from coordinator.gateway.answers import Envelope, StreamAnswer, WholeAnswer, json_response
from coordinator.gateway.metrics import CONTENT_TYPE, GatewayMetrics
from coordinator.gateway.overview import cluster_overview
from coordinator.gateway.prefix import prefix_names
from coordinator.gateway.relay import Relay
from coordinator.gateway.session import Session
from coordinator.gateway.stream import TextStream
from coordinator.gateway.tenants import ApiKeys, Tenant
from coordinator.gateway.watch import ClusterWatch

log = telemetry.logger(__name__)

BODY_TIMEOUT_S = 60.0
"""For a client to send its whole body."""
LAST_WORDS_S = 0.5
"""How long what a stopping gateway still has to say may take."""
LONG_BODY_BYTES = 4 << 10
"""Beyond this a prompt is tokenised on a thread: it would hold up everybody's tokens."""
MAX_LABEL_CHARS = 128
_TENANT = web.RequestKey("tenant", Tenant)
_BROKE = web.RequestKey("broke", int)
"""Where a request keeps the status that its error would have had."""
_NO_LIMIT = 1 << 20
"""Context length while neither a node nor the model's folder has told one: the node will check."""

_Respond = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Gateway:
    """Everything the routes share."""

    def __init__(
        self, config: GatewayConfig, *, tokenizer: Tokenizer, cluster: ClusterWatch, client: Client, clock: Clock
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._cluster = cluster
        self._client = client
        self._clock = clock
        self._created = int(time.time())
        self._page = (Path(__file__).parent / "page" / "index.html").read_text(encoding="utf-8")
        self._api_keys = ApiKeys(config.api_keys, clock)
        self.metrics = GatewayMetrics()
        self._live: dict[RequestId, Relay | None] = {}
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self.is_stopping = False

    @property
    def requests(self) -> tuple[RequestId, ...]:
        """Those that have been neither answered nor given up."""
        return tuple(self._live)

    @property
    def num_in_flight(self) -> int:
        return len(self._live)

    async def finish(self, within_s: float) -> None:
        """Take no more requests, wait for those in flight, and end those that take longer with an error."""
        self.is_stopping = True
        if await self._idle_within(within_s):
            return
        log.warning("requests cut short", count=len(self._live), after_s=within_s)
        for relay in list(self._live.values()):
            if relay is not None:
                relay.stop()
        await self._idle_within(LAST_WORDS_S)

    async def _idle_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._is_idle.wait()
        except TimeoutError:
            return False
        return True

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._edge], client_max_size=self._config.max_body_bytes)
        app.router.add_post("/v1/chat/completions", self.chat_completions)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/v1/models/{id:.+}", self.model)
        app.router.add_get("/health", self.health)
        app.router.add_get("/ready", self.ready)
        app.router.add_get("/metrics", self.show_metrics)
        app.router.add_get("/cluster", self.show_cluster)
        app.router.add_get("/", self.show_page)
        return app

    # --- answers ------------------------------------------------------------------------------------------

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, openai.parse_chat)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, openai.parse_completion)

    async def _generate(self, request: web.Request, parse: Callable[[bytes], openai.Asked]) -> web.StreamResponse:
        arrived_s = self._clock.now_s()
        if self.is_stopping:  # on a connection from before
            raise UnavailableError("this gateway is being stopped", retry_after_s=1.0)
        body = await self._body(request)
        asked = parse(body)
        origin = request[_TENANT].origin(asked.priority or wishes.priority_of(request.headers) or Priority.NORMAL)
        openai.check_model(asked, self._cluster.model)
        max_model_len = self._cluster.max_model_len or self._tokenizer.max_model_len or _NO_LIMIT
        tokenize = partial(self._tokenize, asked, tenant=origin.tenant, max_model_len=max_model_len)
        prompt, prefix = await asyncio.to_thread(tokenize) if len(body) > LONG_BODY_BYTES else tokenize()
        sampling = openai.sampling_of(
            asked,
            num_prompt_tokens=len(prompt),
            max_model_len=max_model_len,
            eos=self._tokenizer.eos_token_ids,
            seed=secrets.randbits(63),
        )
        session = self._session(
            request, prompt, prefix, sampling, num_choices=asked.best_of, arrived_s=arrived_s, origin=origin
        )
        stop_ids = session.sampling.stop_token_ids
        context = [] if asked.is_chat else prompt
        texts = [
            TextStream(self._tokenizer.detokenizer(context), asked.stop, stop_ids) for _ in range(session.num_choices)
        ]
        envelope = Envelope(
            session, is_chat=asked.is_chat, created=int(time.time()), label=_label(request) or session.id
        )
        answer = self._answer(request, asked, envelope, texts)
        self._live[session.id] = None
        self._is_idle.clear()
        try:
            return await self._serve(request, session, answer)
        finally:
            del self._live[session.id]
            if not self._live:
                self._is_idle.set()
            answer.close()
            self._account(request, session, answer.error, num_output_tokens=sum(text.num_tokens for text in texts))

    async def _body(self, request: web.Request) -> bytes:
        limit = self._config.max_body_bytes
        if request.content_length is not None and request.content_length > limit:
            # Before its first byte: whoever announces a terabyte need not send it to hear this.
            raise web.HTTPRequestEntityTooLarge(max_size=limit, actual_size=request.content_length)
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                return await request.read()
        except web.RequestPayloadError as error:  # broken chunks or compression
            reason = " ".join(str(error).split()).removeprefix("400, message: ")
            raise RequestError(f"the body cannot be read: {reason}") from error

    def _tokenize(self, asked: openai.Asked, *, tenant: bytes, max_model_len: int) -> tuple[list[int], bytes]:
        """The prompt, and its blocks' names. Linear in its length: long ones on a thread."""
        prompt = openai.tokenize(asked, self._tokenizer, max_model_len=max_model_len)
        return prompt, prefix_names(prompt, self._cluster.view, self._cluster.model, tenant=tenant)

    def _session(
        self,
        request: web.Request,
        prompt: list[int],
        prefix: bytes,
        sampling: Sampling,
        *,
        num_choices: int,
        arrived_s: float,
        origin: Origin,
    ) -> Session:
        timeout_s = wishes.seconds_of(request.headers, wishes.TIMEOUT) or math.inf
        return Session(
            id=RequestId(new_id()),
            model=self._cluster.model,
            prompt=prompt,
            prefix=prefix,
            sampling=sampling,
            num_choices=num_choices,
            created_s=arrived_s,
            origin=origin,
            first_token_s=wishes.seconds_of(request.headers, wishes.FIRST_TOKEN) or self._config.first_token_s or None,
            deadline_s=arrived_s + min(timeout_s, self._config.request_timeout_s),
            max_attempts=self._config.max_attempts,
            patience_s=self._config.patience_s,
            stream_patience_s=self._config.stream_patience_s,
        )

    def _answer(
        self, request: web.Request, asked: openai.Asked, envelope: Envelope, texts: Sequence[TextStream]
    ) -> WholeAnswer | StreamAnswer:
        if not asked.stream:
            return WholeAnswer(envelope, texts, num_shown=asked.n)
        return StreamAnswer(
            request,
            envelope,
            texts,
            include_usage=asked.include_usage,
            keep_alive_s=self._config.keep_alive_s,
            clock=self._clock,
        )

    async def _serve(
        self, request: web.Request, session: Session, answer: WholeAnswer | StreamAnswer
    ) -> web.StreamResponse:
        relay = Relay(
            session,
            answer,
            cluster=self._cluster,
            client=self._client,
            clock=self._clock,
            metrics=self.metrics,
        )
        self._live[session.id] = relay
        await relay.run()
        try:
            # A reader that does not take the end of its answer has until the request's deadline.
            async with asyncio.timeout(max(1.0, session.deadline_s - self._clock.now_s())):
                return await answer.response()
        except TimeoutError as error:
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("the client does not read") from error

    def _account(
        self, request: web.Request, session: Session, error: BatonError | None, *, num_output_tokens: int
    ) -> None:
        """The one line and the figures of a request that has ended."""
        self.metrics.ended(session, num_output_tokens=num_output_tokens)
        if error is not None:
            request[_BROKE] = replies.status_of(error)
        log.info(
            "request ended",
            request=session.id,
            route=request.path,
            outcome=session.outcome,
            why=session.history[-1].why,
            error=None if error is None else error.message,
            prompt_tokens=len(session.prompt),
            cached_tokens=session.cached_tokens,
            output_tokens=num_output_tokens,
            attempts=session.attempt,
            path=session.path,
            routed=None if session.routed is None else session.routed.why,
            **{f"{phase}_s": round(seconds, 4) for phase, seconds in session.phases().items()},
        )

    # --- models, health, the cluster ----------------------------------------------------------------------

    async def models(self, request: web.Request) -> web.Response:
        return json_response({"object": "list", "data": self._models()})

    async def model(self, request: web.Request) -> web.Response:
        for entry in self._models():
            if entry["id"] == request.match_info["id"]:
                return json_response(entry)
        raise ModelNotFoundError(f"the model '{request.match_info['id']}' is not served here")

    def _models(self) -> list[dict[str, object]]:
        max_model_len = self._cluster.max_model_len
        if max_model_len is None:
            return []
        return [replies.model_entry(self._cluster.model, created=self._created, max_model_len=max_model_len)]

    async def health(self, request: web.Request) -> web.Response:
        return json_response({"status": "ok"})

    async def ready(self, request: web.Request) -> web.Response:
        reason = "the gateway is stopping" if self.is_stopping else self._cluster.not_ready()
        if reason is None:
            return json_response({"ready": True})
        return json_response({"ready": False, "reason": reason}, status=503)

    async def show_metrics(self, request: web.Request) -> web.Response:
        self.metrics.in_flight.set(self.num_in_flight)
        return web.Response(body=self.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def show_cluster(self, request: web.Request) -> web.Response:
        return json_response(cluster_overview(self._cluster, num_in_flight=self.num_in_flight))

    async def show_page(self, request: web.Request) -> web.Response:
        return web.Response(text=self._page, content_type="text/html")

    # --- the edge -----------------------------------------------------------------------------------------

    @web.middleware
    async def _edge(self, request: web.Request, handler: _Respond) -> web.StreamResponse:
        """Every error of a request ends here, as a status and a body in OpenAI's shape."""
        status = replies.CLIENT_GONE
        try:
            response = await self._guarded(request, handler)
            # A stream that broke was a 200 when it began.
            status = request.get(_BROKE, response.status)
            return response
        finally:
            resource = request.match_info.route.resource
            route = "other" if resource is None else resource.canonical
            self.metrics.requests.labels(route, str(status)).inc()

    async def _guarded(self, request: web.Request, respond: _Respond) -> web.StreamResponse:
        try:
            if request.path.startswith("/v1/"):
                request[_TENANT] = self._api_keys.tenant_of(request.headers.get("Authorization"))
            return await respond(request)
        except BatonError as error:
            self.metrics.refusals.labels(error.code.value).inc()
            return _error_response(request, error)
        except TimeoutError:
            return json_response(replies.http_error_body("the body did not arrive in time"), status=408)
        except web.HTTPRequestEntityTooLarge:
            limit = self._config.max_body_bytes
            return json_response(replies.http_error_body(f"the body is larger than {limit} bytes"), status=413)
        except web.HTTPMethodNotAllowed as error:
            allowed = ", ".join(sorted(error.allowed_methods))
            body = replies.http_error_body(f"{request.method} {request.path} does not exist: use {allowed}")
            return json_response(body, status=error.status, headers={"Allow": allowed})
        except web.HTTPException as error:
            return json_response(replies.http_error_body(f"{request.path}: {error.reason}"), status=error.status)
        except ConnectionResetError:
            return web.Response(status=replies.CLIENT_GONE)  # for nobody: raised, it would be logged as an error
        except Exception as error:
            log.exception("request broke", route=request.path)
            return _error_response(request, InternalError(f"the gateway failed on this request: {error!r}"))


def _error_response(request: web.Request, error: BatonError) -> web.Response:
    headers = replies.error_headers(error)
    label = _label(request)
    if label:
        headers["x-request-id"] = label
    return json_response(replies.error_body(error), status=replies.status_of(error), headers=headers)


def _label(request: web.Request) -> str:
    """The client's own id of the request: shown back to it, used for nothing."""
    label = request.headers.get("X-Request-Id", "")
    return label if len(label) <= MAX_LABEL_CHARS and label.isascii() and label.isprintable() else ""

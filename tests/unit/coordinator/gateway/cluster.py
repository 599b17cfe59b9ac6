"""A cluster that does what its script says, in place of coordinators and nodes: `common.rpc.base.Client` in-process."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Self

from common.errors import BatonError, PeerLostError
from common.messages import (
    Audit,
    FinishReason,
    Generate,
    HeldCall,
    Incarnation,
    ItemBody,
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
    SentBody,
    StopChoice,
    Tokens,
    View,
    Watch,
)
from common.rpc.base import Client, Handler, Server

MODEL = "tiny"
COORDINATOR = "tcp://coordinator"


def address(name: str) -> NodeAddress:
    return NodeAddress(NodeId(name), Incarnation(f"incarnation of {name}"), f"tcp://{name}")


def node_view(
    name: str,
    role: Role = Role.DECODE,
    *,
    state: NodeState = NodeState.READY,
    reason: str = "",
    model: str = MODEL,
    max_model_len: int = 100,
) -> NodeView:
    at = address(name)
    card = NodeCard(
        node=at.node,
        incarnation=at.incarnation,
        role=role,
        address=at.address,
        model=model,
        model_digest="digest",
        layout=KVLayout(16, "float32", 4, (LayerKV(1, 8, 8),)),
        max_model_len=max_model_len,
        num_blocks=64,
    )
    return NodeView(card, state, reason, NodeLoad(num_running=1, free_blocks=60, tokens_per_s=12.5))


Script = Callable[[Generate], AsyncIterator[Tokens]]


class ScriptedCall:
    def __init__(self, client: "ScriptedClient", address: str, body: RequestBody) -> None:
        self._client = client
        self._address = address
        self.body = body
        self._items: AsyncIterator[ItemBody] | None = None

    @property
    def peer(self) -> Incarnation:
        return Incarnation(self._address)

    def send(self, body: SentBody) -> None:
        assert isinstance(body, StopChoice), "a gateway sends nothing else into its calls"
        self._client.stopped.append(body.choice)

    def __aiter__(self) -> AsyncIterator[ItemBody]:
        assert self._items is not None
        return self._items

    async def __aenter__(self) -> Self:
        if self._address in self._client.away:
            raise PeerLostError(f"{self._address} is away")
        self._items = self._client.answer(self.body)
        self._client.opened(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.left(self)
        await self._items.aclose()  # type: ignore[union-attr]


class ScriptedClient:
    """`generate` and `route` are the script. What was asked for is kept in `generates` and `routes`."""

    def __init__(self) -> None:
        self.generate: Script = says([])
        self.route: Callable[[Route], Routed] = lambda route: Routed(address("d1"), address("p1"), "scripted")
        self.view = View((node_view("p1", Role.PREFILL), node_view("d1")))
        self.away: dict[str, bool] = {}
        """Addresses that nobody answers at."""
        self.generates: list[Generate] = []
        self.stopped: list[int] = []
        """Choices that a gateway wanted no more of."""
        self.routes: list[Route] = []
        self.open_calls: list[ScriptedCall] = []
        self.on_lost: Callable[[Incarnation], None] = lambda peer: None
        self._changed = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []

    def open(
        self,
        address: str,
        body: RequestBody,
        *,
        incarnation: Incarnation | None = None,
        timeout_s: float | None = None,
    ) -> ScriptedCall:
        return ScriptedCall(self, address, body)

    def held_calls(self) -> list[HeldCall]:
        return [HeldCall(type(call.body).__name__, call.peer) for call in self.open_calls]

    async def close(self) -> None:
        assert self.open_calls == []

    # --- what calls answer --------------------------------------------------------------------------------

    async def answer(self, body: RequestBody) -> AsyncIterator[ItemBody]:
        match body:
            case Watch():
                while True:
                    shown = self.view
                    yield shown
                    await self.until(partial(self._has_news, shown))
                    if COORDINATOR in self.away:
                        raise PeerLostError("the coordinator has gone")
            case Route():
                self.routes.append(body)
                yield self.route(body)
            case Generate():
                self.generates.append(body)
                async for item in self.generate(body):
                    yield item
            case _:
                raise AssertionError(f"a gateway opens no {body}")

    def _has_news(self, shown: View) -> bool:
        return self.view is not shown or COORDINATOR in self.away

    # --- what a test waits for ----------------------------------------------------------------------------

    async def until(self, condition: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(condition)

    async def change(self, **attributes: object) -> None:
        """Set attributes of the script, and let those who wait see it."""
        for name, value in attributes.items():
            setattr(self, name, value)
        async with self._changed:
            self._changed.notify_all()

    async def settled(self) -> None:
        """All who waited have been told."""
        await asyncio.gather(*self._tasks)

    @property
    def num_generating(self) -> int:
        return sum(isinstance(call.body, Generate) for call in self.open_calls)

    def opened(self, call: ScriptedCall) -> None:
        self.open_calls.append(call)
        self._notify()

    def left(self, call: ScriptedCall) -> None:
        self.open_calls.remove(call)
        self._notify()

    def _notify(self) -> None:
        self._tasks = [task for task in self._tasks if not task.done()]
        self._tasks.append(asyncio.ensure_future(self.change()))


class ScriptedServer:
    """`common.rpc.base.Server` that nobody calls."""

    num_calls = 0

    def __init__(self, address: str) -> None:
        self.address = address

    def held_calls(self) -> list[HeldCall]:
        return []

    async def close(self) -> None: ...


class ScriptedNetwork:
    def __init__(self, client: ScriptedClient) -> None:
        self._client = client

    def client(self, *, node: NodeId, incarnation: Incarnation) -> Client:
        return self._client

    async def serve(
        self,
        address: str,
        handlers: Mapping[type[RequestBody], Handler],
        *,
        node: NodeId,
        incarnation: Incarnation,
    ) -> Server:
        assert list(handlers) == [Audit], "a gateway answers nothing else"
        return ScriptedServer(address)


# --- scripts ------------------------------------------------------------------------------------------------


def says_each(*answers: list[int], finish: FinishReason = FinishReason.STOP, logprobs: Sequence[float] = ()) -> Script:
    """To each choice its own, a token of each in turn, as an engine does; goes on where the request stands.

    `logprobs`: of each token of a choice.
    """

    async def script(body: Generate) -> AsyncIterator[Tokens]:
        shared = body.tokens[body.num_prompt_tokens :]
        rest = {one.choice: answers[one.choice][len(shared) + len(one.tokens) :] for one in body.branches}
        while rest:
            for choice, tokens in list(rest.items()):
                is_last = len(tokens) <= 1
                score = logprobs[choice] if logprobs else None
                yield Tokens(tokens[:1], finish if is_last else None, choice=choice, logprob=score)
                rest[choice] = tokens[1:]
                if is_last:
                    del rest[choice]

    return script


def says(
    tokens: list[int],
    *,
    per_item: int = 1,
    finish: FinishReason = FinishReason.STOP,
    cached_tokens: int = 0,
    path: str = "",
    before: Callable[[], Awaitable[object]] | None = None,
) -> Script:
    """Goes on where the request stands. `before` is awaited before the first token."""

    async def script(body: Generate) -> AsyncIterator[Tokens]:
        if before is not None:
            await before()
        rest = tokens[len(body.tokens) - body.num_prompt_tokens :][: body.sampling.max_tokens]
        is_cut = len(tokens) > body.sampling.max_tokens
        for start in range(0, max(1, len(rest)), per_item):
            is_last = start + per_item >= len(rest)
            reason = (FinishReason.LENGTH if is_cut else finish) if is_last else None
            phases = {"decode": 0.5} if is_last else None
            yield Tokens(rest[start : start + per_item], reason, cached_tokens, phases, path)

    return script


def breaks(tokens: list[int], error: Exception, *, cached_tokens: int = 0) -> Script:
    """Says these tokens and fails."""

    async def script(body: Generate) -> AsyncIterator[Tokens]:
        if tokens:
            yield Tokens(tokens, cached_tokens=cached_tokens)
        raise error

    return script


def in_turn(*scripts: Script) -> Script:
    """The first attempt runs the first script, and so on; the last one again and again."""
    left = list(scripts)

    async def script(body: Generate) -> AsyncIterator[Tokens]:
        chosen = left.pop(0) if len(left) > 1 else left[0]
        async for item in chosen(body):
            yield item

    return script


def hangs(tokens: list[int]) -> Script:
    """Says these tokens, then nothing more."""

    async def script(body: Generate) -> AsyncIterator[Tokens]:
        if tokens:
            yield Tokens(tokens)
        await asyncio.Event().wait()

    return script


def refuses(error: BatonError) -> Script:
    return breaks([], error)

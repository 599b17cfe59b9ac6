"""Runs one session: its commands become calls, what the calls bring becomes events and answers.

The task that runs a relay is the request. Cancelling it (the client hung up) leaves the context of the one call
that is open, which cancels that call, its node and everything below.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Protocol, assert_never

from common import telemetry
from common.clock import Clock
from common.errors import BatonError, InternalError, MovedError, PeerLostError
from common.messages import FinishReason, ItemBody, Leaving, StopChoice, Tokens
from common.rpc.base import Client, OutgoingCall
from coordinator.gateway.metrics import GatewayMetrics
from coordinator.gateway.session import Session
from coordinator.gateway.session_events import (
    AskRoute,
    AttemptEnded,
    AttemptFailed,
    CancelAttempt,
    ClientGone,
    DeadlinePassed,
    Deliver,
    Fail,
    Finish,
    GatewayStopping,
    OpenAttempt,
    Prepared,
    RouteArrived,
    RouteRefused,
    SessionCommand,
    SessionStatus,
    StopAtNode,
    StopStringFound,
    TokensArrived,
    WaitEnded,
    WaitForCluster,
)
from coordinator.gateway.successor import PreparedAttempt, Successor
from coordinator.gateway.watch import ClusterWatch

log = telemetry.logger(__name__)

END_PATIENCE_S = 0.5
"""How long a finished attempt may take to end by itself; then it is cancelled."""


class Answer(Protocol):
    """Where a session's tokens go. ConnectionResetError means that nobody is there any more."""

    def stopped(self, choice: int) -> bool:
        """A stop string was found: no more tokens of this choice are wanted."""
        ...

    async def deliver(self, tokens: list[int], choice: int) -> None: ...

    async def finish(self, reason: FinishReason, choice: int) -> None:
        """Once for each choice; the answer is whole with the last."""
        ...

    async def fail(self, error: BatonError) -> None: ...


class Relay:
    """One request on its way through the cluster."""

    def __init__(
        self,
        session: Session,
        answer: Answer,
        *,
        cluster: ClusterWatch,
        client: Client,
        clock: Clock,
        metrics: GatewayMetrics,
    ) -> None:
        self._session = session
        self._answer = answer
        self._cluster = cluster
        self._client = client
        self._clock = clock
        self._metrics = metrics
        self._last_token_s: list[float | None] = [None] * session.num_choices
        self._call: OutgoingCall | None = None
        """The last attempt's."""
        self._seen = 0
        """The cluster's changes before the route was last asked for."""
        self._successor: Successor | None = None
        self._task: asyncio.Task[object] | None = None
        self._is_stopping = False

    async def run(self) -> None:
        """Until the session has ended. Raises CancelledError or ConnectionResetError if the client has gone."""
        self._task = asyncio.current_task()
        try:
            await self._run()
        finally:
            self._task = None
            await self._drop_successor()

    def stop(self) -> None:
        """End the request now, with an error that says that it is the gateway which goes."""
        if self._task is not None:
            self._is_stopping = True
            self._task.cancel()

    async def _run(self) -> None:
        session = self._session
        try:
            async with asyncio.timeout(session.deadline_s - self._clock.now_s()) as deadline:
                await self._work(session.handle(Prepared(self._clock.now_s())))
        except (asyncio.CancelledError, ConnectionResetError) as error:
            if self._is_stopping and isinstance(error, asyncio.CancelledError) and self._task is not None:
                self._task.uncancel()
                await self._work(session.handle(GatewayStopping(self._clock.now_s())))
                return
            session.handle(ClientGone(self._clock.now_s()))
            raise
        except Exception as error:  # an edge: one request's bug is its own
            now_s = self._clock.now_s()
            if isinstance(error, TimeoutError) and deadline.expired():
                await self._work(session.handle(DeadlinePassed(now_s)))
                return
            log.exception("relay broke", request=session.id)
            failure = InternalError(f"the gateway failed on this request: {error!r}")
            commands = session.handle(AttemptFailed(now_s, session.attempt, failure))
            await self._work(commands or [Fail(failure)])

    async def _work(self, commands: list[SessionCommand]) -> None:
        while commands:
            commands = await self._execute(commands)

    async def _execute(self, commands: list[SessionCommand]) -> list[SessionCommand]:
        """Run commands in order; returns those that their outcome led to."""
        following: list[SessionCommand] = []
        for command in commands:
            match command:
                case Deliver(tokens, choice):
                    await self._deliver(tokens, choice)
                case AskRoute():
                    following = await self._route(command)
                case WaitForCluster():
                    following = await self._wait(command)
                case OpenAttempt():
                    following = await self._attempt(command)
                case CancelAttempt():
                    pass  # whoever caused it has left the call's context, or is about to
                case StopAtNode(choice):
                    assert self._call is not None, "only what an attempt says leads to this"
                    self._call.send(StopChoice(choice))
                case Finish(reason, choice):
                    await self._answer.finish(reason, choice)
                case Fail(error):
                    await self._answer.fail(error)
                case _:
                    assert_never(command)
        return following

    async def _route(self, command: AskRoute) -> list[SessionCommand]:
        if (ready := self._prepared(command.attempt)) is not None:
            return self._session.handle(RouteArrived(self._clock.now_s(), ready.attempt, ready.routed, ready.digest))
        await self._drop_successor()
        self._seen = self._cluster.num_changes
        try:
            routed, digest = await self._cluster.route(command.body)
        except BatonError as error:
            log.debug("route refused", request=self._session.id, attempt=command.attempt, error=error.message)
            return self._session.handle(RouteRefused(self._clock.now_s(), command.attempt, error))
        return self._session.handle(RouteArrived(self._clock.now_s(), command.attempt, routed, digest))

    async def _wait(self, command: WaitForCluster) -> list[SessionCommand]:
        await self._cluster.changes_after(self._seen, within_s=command.at_most_s)
        return self._session.handle(WaitEnded(self._clock.now_s(), command.attempt))

    async def _attempt(self, command: OpenAttempt) -> list[SessionCommand]:
        try:
            async with self._opened(command) as call:
                return await self._relay(call, command.attempt)
        except BatonError as error:
            if not isinstance(error, MovedError):
                await self._drop_successor()  # it takes over from a node that lets go, from no other
            node = command.node
            log.info(
                "attempt failed",
                request=self._session.id,
                attempt=command.attempt,
                node=node.node,
                incarnation=node.incarnation[:8],
                error=error.message,
            )
            if isinstance(error, PeerLostError):
                self._cluster.lost(node.incarnation)
            return self._session.handle(AttemptFailed(self._clock.now_s(), command.attempt, error))

    @asynccontextmanager
    async def _opened(self, command: OpenAttempt) -> AsyncIterator[OutgoingCall]:
        """The attempt's call, entered: the one that was prepared for it, or a new one."""
        if (ready := self._prepared(command.attempt)) is not None:
            yield ready.call
            return
        async with self._client.open(
            command.node.address,
            command.body,
            incarnation=command.node.incarnation,
            timeout_s=max(0.0, self._session.deadline_s - self._clock.now_s()),
        ) as call:
            yield call

    def _prepared(self, attempt: int) -> PreparedAttempt | None:
        successor = self._successor
        return successor.prepared() if successor is not None and successor.attempt == attempt else None

    async def _prepare_successor(self) -> None:
        await self._drop_successor()
        self._successor = Successor(self._session, cluster=self._cluster, client=self._client, clock=self._clock)

    async def _drop_successor(self) -> None:
        successor, self._successor = self._successor, None
        if successor is not None:
            await successor.close()

    async def _relay(self, call: OutgoingCall, attempt: int) -> list[SessionCommand]:
        session, answer, now_s = self._session, self._answer, self._clock.now_s
        self._call = call
        items = aiter(call)
        async for item in items:
            if isinstance(item, Leaving):
                await self._prepare_successor()
                continue
            assert isinstance(item, Tokens)
            self._check(item)
            await self._execute(session.handle(TokensArrived(now_s(), attempt, item)))
            if session.status is SessionStatus.ENDED:
                await self._end_of(items)
                return []
            if answer.stopped(item.choice):
                commands = session.handle(StopStringFound(now_s(), item.choice))
                if session.outcome is not None:
                    return commands
                await self._execute(commands)
        return session.handle(AttemptEnded(now_s(), attempt))

    def _check(self, item: Tokens) -> None:
        session = self._session
        if not 0 <= item.choice < session.num_choices:
            raise PeerLostError(f"the node says something of choice {item.choice} of {session.num_choices}")
        at = session.choices.num_tokens(item.choice)
        if item.start not in (None, at) and session.choices[item.choice].finish is None:
            raise PeerLostError(f"the node goes on at token {item.start}, not at {at}")

    async def _end_of(self, items: AsyncIterator[ItemBody]) -> None:
        """Let the node end a finished call: its End mostly came along, and spares both sides a Cancel."""
        # The answer is whole: how its call ends is no news for anybody.
        with suppress(TimeoutError, BatonError):
            async with asyncio.timeout(END_PATIENCE_S):
                async for _ in items:
                    pass

    async def _deliver(self, tokens: list[int], choice: int) -> None:
        now_s = self._clock.now_s()
        last_s = self._last_token_s[choice]
        if last_s is not None:
            self._metrics.itl.observe(now_s - last_s)
        elif all(at_s is None for at_s in self._last_token_s):
            self._metrics.ttft.observe(now_s - self._session.created_s)
        self._last_token_s[choice] = now_s
        await self._answer.deliver(tokens, choice)

"""What a gateway does between HTTP and the cluster: real sessions, relays and watch; answers are kept as tokens."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from common.clock import new_id
from common.errors import BatonError
from common.messages import FinishReason, Incarnation, NodeId, RequestId, Sampling
from common.model.fake import fake_oracle
from common.rpc.client import ClientEndpoint
from common.tasks import ended
from coordinator.gateway.metrics import GatewayMetrics
from coordinator.gateway.relay import Relay
from coordinator.gateway.session import Outcome, Session, SessionStatus
from coordinator.gateway.watch import ClusterWatch
from tests.cluster.cluster import MODEL, Cluster

EXCLUSION_S = 0.3


@dataclass
class KeptAnswer:
    """`relay.Answer`. `stop_after` tokens a stop string is found."""

    stop_after: int = 1 << 30
    tokens: list[int] = field(default_factory=list)
    ends: list[FinishReason | BatonError] = field(default_factory=list)

    @property
    def stopped(self) -> bool:
        return len(self.tokens) >= self.stop_after

    async def deliver(self, tokens: list[int]) -> None:
        assert not self.ends, "tokens after the end"
        self.tokens += tokens

    async def finish(self, reason: FinishReason) -> None:
        self.ends.append(reason)

    async def fail(self, error: BatonError) -> None:
        self.ends.append(error)


class Request:
    """One request on its way."""

    def __init__(self, cluster: Cluster, session: Session, answer: KeptAnswer, relay: Relay) -> None:
        self._cluster = cluster
        self.session = session
        self.answer = answer
        self.task = asyncio.create_task(relay.run())

    @property
    def decode_node(self) -> str:
        """The one that it was routed to last."""
        assert self.session.routed is not None
        return self.session.routed.decode.node

    @property
    def oracle(self) -> list[int]:
        return fake_oracle(list(self.session.prompt), self.session.sampling.max_tokens, self.session.sampling)

    async def has(self, num_tokens: int) -> None:
        """At least that many tokens have been delivered, and they are right."""
        await self._cluster.until(lambda: len(self.answer.tokens) >= num_tokens)
        assert self.answer.tokens == self.oracle[: len(self.answer.tokens)]

    async def is_in(self, status: SessionStatus) -> None:
        await self._cluster.until(lambda: self.session.status is status)

    async def finishes_rightly(self, num_attempts: int | None = None) -> None:
        """The oracle's tokens, and one end."""
        async with asyncio.timeout(10.0):
            await self.task
        assert self.answer.ends == [FinishReason.LENGTH]
        assert self.answer.tokens == self.oracle
        assert self.session.outcome is Outcome.FINISHED
        self.session.check_invariants()
        if num_attempts is not None:
            assert self.session.attempt == num_attempts

    async def fails(self) -> BatonError:
        """One end, an error; what was delivered is right."""
        async with asyncio.timeout(10.0):
            await self.task
        [error] = self.answer.ends
        assert isinstance(error, BatonError)
        assert self.answer.tokens == self.oracle[: len(self.answer.tokens)]
        self.session.check_invariants()
        return error

    async def leaves(self) -> None:
        """The client hangs up."""
        self.task.cancel()
        await asyncio.wait([self.task])
        assert self.session.outcome is Outcome.CANCELLED
        assert self.answer.ends == []

    def was(self, status: SessionStatus) -> bool:
        return any(entry.status is status for entry in self.session.history)


class Requests:
    """A gateway without its HTTP: `incarnation` is the process that it is."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.incarnation = Incarnation(new_id())
        self.client: ClientEndpoint = cluster.network.client(node=NodeId("gateway"), incarnation=self.incarnation)
        self.watch = ClusterWatch(self.client, cluster.coordinators, model=MODEL, clock=cluster.clock)
        self._metrics = GatewayMetrics()
        self._seeds = itertools.count(1)

    def ask(
        self,
        prompt: list[int],
        max_tokens: int = 40,
        *,
        temperature: float = 0.0,
        stop_after: int = 1 << 30,
        within_s: float = 30.0,
        patience_s: float = 5.0,
        stream_patience_s: float = 10.0,
    ) -> Request:
        now_s = self._cluster.clock.now_s()
        session = Session(
            id=RequestId(new_id()),
            model=MODEL,
            prompt=prompt,
            sampling=Sampling(max_tokens=max_tokens, seed=next(self._seeds), temperature=temperature),
            created_s=now_s,
            deadline_s=now_s + within_s,
            max_attempts=4,
            patience_s=patience_s,
            stream_patience_s=stream_patience_s,
            exclusion_s=EXCLUSION_S,
        )
        answer = KeptAnswer(stop_after)
        relay = Relay(
            session,
            answer,
            cluster=self.watch,
            client=self.client,
            clock=self._cluster.clock,
            metrics=self._metrics,
        )
        return Request(self._cluster, session, answer, relay)


@asynccontextmanager
async def gateway(cluster: Cluster) -> AsyncIterator[Requests]:
    """Ends with nothing open but the watch, and then not even that."""
    requests = Requests(cluster)
    watching = asyncio.create_task(requests.watch.run())
    try:
        await cluster.until(lambda: requests.watch.coordinator is not None)
        yield requests
        await cluster.until(lambda: requests.client.num_calls <= 1)
    finally:
        await ended(watching)
        await requests.client.close()

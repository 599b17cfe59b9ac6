"""What a gateway does between HTTP and the cluster: real sessions, relays and watch; answers are kept as tokens."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from common.clock import new_id
from common.engine.request import sampling_of
from common.errors import BatonError
from common.messages import FinishReason, Incarnation, NodeId, RequestId, Sampling
from common.model.fake import fake_logprob, fake_oracle
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
    """`relay.Answer`. A stop string is found after `stop_after` tokens of a choice, or of `stops_in` alone."""

    num_choices: int = 1
    stop_after: int = 1 << 30
    stops_in: int | None = None
    errors: list[BatonError] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.all: list[list[int]] = [[] for _ in range(self.num_choices)]
        self.finishes: list[list[FinishReason]] = [[] for _ in range(self.num_choices)]

    @property
    def tokens(self) -> list[int]:
        """Choice 0."""
        return self.all[0]

    @property
    def ends(self) -> list[FinishReason | BatonError]:
        """Of choice 0."""
        return [*self.finishes[0], *self.errors]

    def stopped(self, choice: int) -> bool:
        return len(self.all[choice]) >= self.stop_after and self.stops_in in (None, choice)

    async def deliver(self, tokens: list[int], choice: int) -> None:
        assert not self.finishes[choice], "tokens after the end"
        assert not self.errors, "tokens after an error"
        self.all[choice] += tokens

    async def finish(self, reason: FinishReason, choice: int) -> None:
        self.finishes[choice].append(reason)

    async def fail(self, error: BatonError) -> None:
        self.errors.append(error)


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
        """Choice 0, as if it were alone."""
        return self.oracle_of(0)

    def oracle_of(self, choice: int) -> list[int]:
        sampling = sampling_of(self.session.sampling, choice)
        return fake_oracle(list(self.session.prompt), sampling.max_tokens, sampling)

    async def has(self, num_tokens: int) -> None:
        """At least that many tokens of each choice have been delivered, and they are right."""
        await self._cluster.until(lambda: all(len(tokens) >= num_tokens for tokens in self.answer.all))
        self._is_right_so_far()

    def _is_right_so_far(self) -> None:
        for choice, tokens in enumerate(self.answer.all):
            assert tokens == self.oracle_of(choice)[: len(tokens)], choice

    async def is_in(self, status: SessionStatus) -> None:
        await self._cluster.until(lambda: self.session.status is status)

    async def finishes_rightly(self, num_attempts: int | None = None) -> None:
        """The oracle's tokens, and one end."""
        async with asyncio.timeout(60.0):
            await self.task
        assert self.answer.errors == []
        for choice, tokens in enumerate(self.answer.all):
            assert self.answer.finishes[choice] == [FinishReason.LENGTH], choice
            assert tokens == self.oracle_of(choice), choice
        assert self.session.outcome is Outcome.FINISHED
        self.session.check_invariants()
        if num_attempts is not None:
            assert self.session.attempt == num_attempts

    async def ends_rightly(self, num_attempts: int | None = None) -> None:
        """As `finishes_rightly`, where stop tokens or strings may have cut some choices."""
        async with asyncio.timeout(10.0):
            await self.task
        assert self.answer.errors == []
        assert [len(ends) for ends in self.answer.finishes] == [1] * self.session.num_choices
        for choice, tokens in enumerate(self.answer.all):
            wanted = self.answer.stop_after if self.answer.stops_in in (None, choice) else None
            assert tokens == self.oracle_of(choice)[:wanted], choice
        assert self.session.outcome is Outcome.FINISHED
        self.session.check_invariants()
        assert num_attempts in (None, self.session.attempt)

    def is_scored_rightly(self) -> None:
        start = len(self.session.prompt)
        for choice, tokens in zip(self.session.choices, self.answer.all, strict=True):
            scores = [fake_logprob(token, start + index) for index, token in enumerate(tokens)]
            assert choice.mean_logprob == pytest.approx(sum(scores) / len(scores))

    async def fails(self) -> BatonError:
        """One end, an error; what was delivered is right."""
        async with asyncio.timeout(60.0):
            await self.task
        [error] = self.answer.ends
        assert isinstance(error, BatonError)
        self._is_right_so_far()
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
        seed: int | None = None,
        stop_token_ids: tuple[int, ...] = (),
        n: int = 1,
        scored: bool = False,
        stop_after: int = 1 << 30,
        stops_in: int | None = None,
        within_s: float = 30.0,
        patience_s: float = 5.0,
        stream_patience_s: float = 10.0,
    ) -> Request:
        now_s = self._cluster.clock.now_s()
        session = Session(
            id=RequestId(new_id()),
            model=MODEL,
            prompt=prompt,
            sampling=Sampling(
                max_tokens=max_tokens,
                seed=next(self._seeds) if seed is None else seed,
                temperature=temperature,
                stop_token_ids=stop_token_ids,
                scored=scored,
            ),
            created_s=now_s,
            deadline_s=now_s + within_s,
            max_attempts=4,
            num_choices=n,
            patience_s=patience_s,
            stream_patience_s=stream_patience_s,
            exclusion_s=EXCLUSION_S,
        )
        answer = KeptAnswer(n, stop_after, stops_in)
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

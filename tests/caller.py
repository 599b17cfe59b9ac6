"""A client of the cluster below the gateway: token ids in, token ids out, nothing in between."""

import itertools
from dataclasses import dataclass, field

from common.clock import new_id
from common.messages import Generate, Origin, RequestId, Route, Routed, Sampling, Tokens, View, Watch
from common.rpc.base import Client


@dataclass(slots=True)
class Answer:
    tokens: list[int] = field(default_factory=list)
    last: Tokens | None = None
    routed: Routed | None = None


class Caller:
    """Routes and generates as the gateway does, without retries: an error of the cluster is the caller's."""

    def __init__(self, client: Client, coordinator: str) -> None:
        self.client = client
        self.coordinator = coordinator
        self._seeds = itertools.count(1)

    async def view(self) -> View:
        async with self.client.open(self.coordinator, Watch()) as call:
            async for item in call:
                assert isinstance(item, View)
                return item
        raise AssertionError("the coordinator ended the watch")

    async def route(self, model: str, num_tokens: int, prefix: bytes = b"") -> Routed:
        async with self.client.open(self.coordinator, Route(model, num_tokens, prefix=prefix)) as call:
            async for item in call:
                assert isinstance(item, Routed)
                return item
        raise AssertionError("the coordinator ended without a route")

    async def ask(
        self,
        prompt: list[int],
        max_tokens: int,
        *,
        sampling: Sampling | None = None,
        routed: Routed | None = None,
        prefix: bytes = b"",
        origin: Origin | None = None,
    ) -> Answer:
        """One request, greedy unless `sampling` says otherwise. `prefix` names its blocks for the coordinator."""
        card = (await self.view()).nodes[0].card
        routed = routed or await self.route(card.model, len(prompt), prefix)
        body = Generate(
            request=RequestId(new_id()),
            attempt=0,
            model_digest=card.model_digest,
            tokens=prompt,
            num_prompt_tokens=len(prompt),
            sampling=sampling or Sampling(max_tokens=max_tokens, seed=next(self._seeds), temperature=0.0),
            prefill=routed.prefill,
            origin=origin or Origin(),
        )
        answer = Answer(routed=routed)
        address = routed.decode
        async with self.client.open(address.address, body, incarnation=address.incarnation) as call:
            async for item in call:
                assert isinstance(item, Tokens)
                answer.tokens += item.tokens
                answer.last = item
        return answer

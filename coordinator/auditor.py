"""Asks every process of a cluster what it holds, as often as it takes to be sure."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from common.clock import Clock, SystemClock, new_id
from common.errors import BatonError, DeadlineError, UnavailableError
from common.messages import Audit, Holdings, Incarnation, NodeId, View, Watch
from common.rpc.base import Client, Network
from coordinator.core.audit import (
    COORDINATOR,
    GATEWAY,
    Finding,
    Look,
    Member,
    Silent,
    cross_check,
    order_of,
    persisting,
)

INTERVAL_S = 1.0
"""Between two looks: what is under way from one process to another has arrived by then."""
ANSWER_S = 2.0
"""Less than a link takes to give up connecting: whoever does not answer is told from whoever has gone."""


@dataclass(frozen=True, slots=True)
class Report:
    """The last look, and what was found amiss in it and in the one before."""

    look: Look
    findings: tuple[Finding, ...] = ()


class Auditor:
    """Finds the processes through the coordinators' views. `known` are clients that are believed, not asked."""

    def __init__(
        self,
        network: Network,
        coordinators: Sequence[str],
        *,
        known: frozenset[Incarnation] = frozenset(),
        answer_s: float = ANSWER_S,
        clock: Clock | None = None,
    ) -> None:
        self._network = network
        self._coordinators = tuple(coordinators)
        self._incarnation = Incarnation(new_id())
        self._known = known | {self._incarnation}
        self._answer_s = answer_s
        self._clock: Clock = clock or SystemClock()
        self._seen: dict[Incarnation, Member] = {}
        """In the last look's views."""

    async def audit(self, *, idle: bool = False, wait_s: float = 0.0, interval_s: float = INTERVAL_S) -> Report:
        """Looks until nothing is amiss, at least twice before it says that something is, and for `wait_s` if it is.

        UnavailableError if no coordinator answers.
        """
        give_up_s = self._clock.now_s() + wait_s
        look = await self.look()
        found = self.check(look, idle=idle)
        while found:
            await asyncio.sleep(interval_s)
            before, look = look, await self.look()
            earlier, found = found, self.check(look, idle=idle)
            sure = persisting(earlier, found, apart_s=look.started_s - before.ended_s)
            if not sure:
                break
            if self._clock.now_s() >= give_up_s:
                return Report(look, tuple(sure))
        return Report(look)

    def check(self, look: Look, *, idle: bool = False) -> list[Finding]:
        return cross_check(look, known=self._known, idle=idle)

    async def look(self) -> Look:
        """Ask all at once. UnavailableError if no coordinator answers."""
        started_s = self._clock.now_s()
        # A fresh client each time: a link that waits for a silent process would make it look like one that has gone.
        client = self._network.client(node=NodeId("audit"), incarnation=self._incarnation)
        try:
            members = await self._members(client)
            answers = await asyncio.gather(*(self._ask(client, member) for member in members))
        finally:
            await client.close()
        holdings = [answer for answer in answers if isinstance(answer, Holdings)]
        silent = [answer for answer in answers if isinstance(answer, Silent)]
        return Look(started_s, self._clock.now_s(), tuple(sorted(holdings, key=order_of)), tuple(silent))

    async def _members(self, client: Client) -> list[Member]:
        views = await asyncio.gather(*(self._view(client, coordinator) for coordinator in self._coordinators))
        if all(isinstance(view, BatonError) for view in views):
            raise UnavailableError("; ".join(view.message for view in views if isinstance(view, BatonError)))
        seen: dict[Incarnation, Member] = {}
        for view in views:
            if isinstance(view, View):
                for node in view.nodes:
                    card = node.card
                    seen[card.incarnation] = Member(card.role, card.node, card.incarnation, card.address)
                for gateway in view.gateways:
                    seen[gateway.incarnation] = Member(GATEWAY, gateway.node, gateway.incarnation, gateway.address)
        # Who was there a moment ago may be frozen, and still hold what it held.
        before, self._seen = self._seen, seen
        coordinators = [Member(COORDINATOR, COORDINATOR, Incarnation(""), address) for address in self._coordinators]
        return [*coordinators, *{**before, **seen}.values()]

    async def _view(self, client: Client, coordinator: str) -> View | BatonError:
        try:
            async with client.open(coordinator, Watch(), timeout_s=self._answer_s) as call:
                async for item in call:
                    assert isinstance(item, View)
                    return item
        except BatonError as error:
            return error
        return UnavailableError(f"{coordinator} answered nothing")

    async def _ask(self, client: Client, member: Member) -> Holdings | Silent | None:
        """None for a process that has gone: the coordinator no longer lists it, and nobody is there."""
        to = member.incarnation or None
        try:
            async with client.open(member.address, Audit(), incarnation=to, timeout_s=self._answer_s) as call:
                async for item in call:
                    assert isinstance(item, Holdings)
                    return item
        except DeadlineError:
            return Silent(member, f"no answer within {self._answer_s:g} s")
        except BatonError as error:
            has_gone = member.kind != COORDINATOR and member.incarnation not in self._seen
            return None if has_gone else Silent(member, error.message)
        return Silent(member, "it ended the call without a word")

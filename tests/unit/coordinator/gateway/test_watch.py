"""Which coordinator is asked for a route."""

from collections.abc import AsyncIterator

import pytest

from common.clock import SystemClock
from common.errors import BatonError, DeadlineError, PeerLostError, UnavailableError
from common.messages import Incarnation, RequestBody, Route, Routed, View, Watch
from coordinator.gateway.watch import ClusterWatch
from tests.unit.coordinator.gateway.cluster import MODEL, ScriptedCall, ScriptedClient, address, node_view

FIRST, SECOND = "tcp://first", "tcp://second"


class Coordinators(ScriptedClient):
    """Two of them; each answers, refuses or lets the time run out as `answers` says."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.answers: dict[str, BatonError | None] = {FIRST: None, SECOND: None}

    def open(
        self,
        address: str,
        body: RequestBody,
        *,
        incarnation: Incarnation | None = None,
        timeout_s: float | None = None,
    ) -> ScriptedCall:
        assert isinstance(body, Watch) or timeout_s, "a route has a deadline"
        if isinstance(body, Route):
            self.asked.append(address)
        return CoordinatorCall(self, address, body)


class CoordinatorCall(ScriptedCall):
    def __aiter__(self) -> AsyncIterator[Routed]:  # type: ignore[override]
        return self._routes()

    async def _routes(self) -> AsyncIterator[Routed]:
        assert isinstance(self._client, Coordinators)
        error = self._client.answers[self._address]
        if error is not None:
            raise error
        yield Routed(address("d1"))


@pytest.fixture
def coordinators() -> Coordinators:
    return Coordinators()


@pytest.fixture
def watch(coordinators: Coordinators) -> ClusterWatch:
    watch = ClusterWatch(coordinators, (FIRST, SECOND), model=MODEL, clock=SystemClock())
    watch.view = View((node_view("d1"),))
    watch.coordinator = FIRST
    return watch


ROUTE = Route(MODEL, 3)


@pytest.mark.parametrize("silence", [DeadlineError("frozen"), PeerLostError("gone")])
async def test_a_silent_coordinator_is_asked_last_until_it_is_heard_again(
    coordinators: Coordinators, watch: ClusterWatch, silence: BatonError
) -> None:
    coordinators.answers[FIRST] = silence
    await watch.route(ROUTE)
    await watch.route(ROUTE)
    assert coordinators.asked == [FIRST, SECOND, SECOND], "only one request waits for it"
    coordinators.answers[FIRST] = None
    watch.shown(FIRST, watch.view)
    await watch.route(ROUTE)
    assert coordinators.asked[3:] == [FIRST]


async def test_a_refusal_is_an_answer(coordinators: Coordinators, watch: ClusterWatch) -> None:
    refusal = coordinators.answers[FIRST] = UnavailableError("no node")
    with pytest.raises(UnavailableError) as raised:
        await watch.route(ROUTE)
    assert raised.value is refusal
    assert coordinators.asked == [FIRST]


async def test_without_any_coordinator_the_request_may_wait(coordinators: Coordinators, watch: ClusterWatch) -> None:
    coordinators.answers = dict.fromkeys(coordinators.answers, PeerLostError("gone"))
    with pytest.raises(UnavailableError, match="no coordinator answers"):
        await watch.route(ROUTE)
    assert coordinators.asked == [FIRST, SECOND]


async def test_loads_are_no_change_and_what_is_missed_is_made_up_for(watch: ClusterWatch) -> None:
    seen = watch.num_changes
    watch.shown(FIRST, View((node_view("d1"),)))
    assert not await watch.changes_after(seen, within_s=0)
    watch.shown(FIRST, View((node_view("d1"), node_view("d2"))))
    assert await watch.changes_after(seen, within_s=0)
    assert not await watch.changes_after(watch.num_changes, within_s=0)
    watch.shown(None, watch.view)
    assert await watch.changes_after(seen + 1, within_s=0)

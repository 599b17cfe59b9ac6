"""Nodes come, go, stall, hang and are replaced in any order: what holds of every answer and every view."""

import itertools

import msgspec
from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from common.errors import ErrorCode
from common.messages import (
    CacheNews,
    GatewayCard,
    Incarnation,
    NodeAddress,
    NodeCard,
    NodeId,
    NodeLoad,
    NodeState,
    Role,
    Route,
    View,
)
from coordinator.core.events import (
    AnswerRoute,
    AskId,
    ClusterEvent,
    ConnectionId,
    NodeLost,
    NodeRegistered,
    NodeReported,
    PublishView,
    RefuseRoute,
    RouteAsked,
    Ticked,
    WatchClosed,
    WatcherId,
    WatchOpened,
)
from coordinator.core.membership import longest_prompt, longest_shared_prompt, pair_mismatch
from coordinator.core.policy import PrefillUnavailable
from coordinator.core.record import Patience
from coordinator.core.state import ClusterState
from tests.unit.coordinator.core.cards import LAYOUT, OTHER_LAYOUT, make_card, offers

PATIENCE = Patience(silence_s=2, progress_s=2, pause_s=1, state_gap_s=0.125, load_gap_s=0.5, model_memory_s=20)

names = strategies.sampled_from(["decode-0", "decode-1", "decode-2", "prefill-0", "prefill-1"])
connections = strategies.integers(0, 12).map(ConnectionId)
loads = strategies.builds(
    NodeLoad,
    num_waiting=strategies.integers(0, 3),
    num_running=strategies.integers(0, 3),
    num_waiting_tokens=strategies.integers(0, 50),
    free_blocks=strategies.integers(0, 10),
    progress_age_s=strategies.sampled_from([0.0, 1.0, 3.0]),
    prompt_tokens_per_s=strategies.sampled_from([0.0, 10.0]),
    is_draining=strategies.sampled_from([False, False, True]),
)
cards = strategies.builds(
    make_card,
    names,
    layout=strategies.sampled_from([LAYOUT, LAYOUT, OTHER_LAYOUT]),
    offers=strategies.sampled_from([offers("tcp"), offers("ucx")]),
    max_model_len=strategies.sampled_from([20, 40]),
)
# Full blocks of any prompt here, in order: a prompt of 45 tokens has two.
BLOCKS = [b"block--0", b"block--1"]
some_blocks = strategies.lists(strategies.sampled_from(BLOCKS), unique=True).map(b"".join)
caches = strategies.none() | strategies.builds(CacheNews, some_blocks, whole=strategies.booleans())
caches |= strategies.builds(CacheNews, dropped=some_blocks)
gateways = strategies.none() | strategies.sampled_from(["gateway-0", "gateway-1"]).map(
    lambda name: GatewayCard(NodeId(name), Incarnation(name), f"tcp://{name}", f"http://{name}")
)


class AnyOrder(RuleBasedStateMachine):
    """The model kept beside the state: who holds which connection and name, and when each reported last."""

    @initialize(
        policy=strategies.sampled_from(["local", "wait", "fail"]),
        home_after_s=strategies.sampled_from([0.0, 0.5]),
        cards=strategies.lists(cards, max_size=5),
    )
    def start(self, policy: PrefillUnavailable, home_after_s: float, cards: list[NodeCard]) -> None:
        self.now_s = 0.0
        self.state = ClusterState(now_s=0.0, prefill_unavailable=policy, home_after_s=home_after_s, patience=PATIENCE)
        self.policy = policy
        self.home_after_s = home_after_s
        self.numbers = itertools.count()
        self.seen: list[NodeCard] = []
        self.alive: dict[str, tuple[ConnectionId, NodeCard]] = {}
        self.used: set[ConnectionId] = set()
        self.replaced: set[Incarnation] = set()
        self.hanging: dict[Incarnation, bool] = {}
        self.reported_s: dict[Incarnation, float] = {}
        self.draining: dict[Incarnation, bool] = {}
        self.caches: dict[Incarnation, set[bytes]] = {}
        self.watched: dict[WatcherId, View] = {}
        self.watching: dict[WatcherId, GatewayCard | None] = {}
        for card in cards:
            self.a_process_starts(card)

    def feed(self, event: ClusterEvent) -> list[object]:
        commands = self.state.handle(event, now_s=self.now_s)
        for command in commands:
            if isinstance(command, PublishView):
                assert command.view == self.state.view()
                assert set(command.watchers) <= set(self.watched)
                self.watched.update(dict.fromkeys(command.watchers, command.view))
        return list(commands)

    @rule(card=cards)
    def a_process_starts(self, card: NodeCard) -> None:
        card = msgspec.structs.replace(card, incarnation=Incarnation(f"{card.node}/{next(self.numbers)}"))
        self.seen.append(card)
        self._register(card)

    @rule(index=strategies.integers(0, 20))
    def a_process_registers_again(self, index: int) -> None:
        if self.seen:
            self._register(self.seen[index % len(self.seen)])

    def _register(self, card: NodeCard) -> None:
        connection = ConnectionId(next(self.numbers))
        self.feed(NodeRegistered(connection, card))
        if card.incarnation in self.replaced:
            return
        before = self.alive.get(card.node)
        if before is not None and before[1].incarnation != card.incarnation:
            self.replaced.add(before[1].incarnation)
        if before is None or before[1].incarnation != card.incarnation:
            self.reported_s[card.incarnation] = self.now_s
            self.hanging[card.incarnation] = False
            self.draining[card.incarnation] = False
            self.caches[card.incarnation] = set()
        self.alive[card.node] = (connection, card)

    @rule(name=names, load=loads, cache=caches)
    def a_node_reports(self, name: str, load: NodeLoad, cache: CacheNews | None = None) -> None:
        if name in self.alive:
            connection, card = self.alive[name]
            self.reported_s[card.incarnation] = self.now_s
            self.hanging[card.incarnation] = load.progress_age_s > PATIENCE.progress_s
            self.draining[card.incarnation] = load.is_draining
            if cache is not None:
                known = set() if cache.whole else self.caches[card.incarnation]
                self.caches[card.incarnation] = (known | _blocks(cache.added)) - _blocks(cache.dropped)
            self.feed(NodeReported(connection, load, cache))

    @rule(connection=connections, load=loads)
    def somebody_reports(self, connection: ConnectionId, load: NodeLoad) -> None:
        """Mostly late news: a connection that no node has any more."""
        if all(connection != held for held, _ in self.alive.values()):
            before = self.state.view()
            self.feed(NodeReported(connection, load, CacheNews(b"".join(BLOCKS))))
            assert self.state.view() == before

    @rule(connection=connections)
    def a_connection_ends(self, connection: ConnectionId) -> None:
        self.feed(NodeLost(connection))
        self.alive = {name: held for name, held in self.alive.items() if held[0] != connection}

    @rule(name=names)
    def a_node_dies(self, name: str) -> None:
        if name in self.alive:
            self.feed(NodeLost(self.alive.pop(name)[0]))

    @rule(passed_s=strategies.sampled_from([0.125, 0.5, 1.0]))
    def time_passes(self, passed_s: float) -> None:
        self.now_s += passed_s
        self.feed(Ticked())

    @rule(reporting=strategies.sets(names), num_ticks=strategies.integers(2, 6))
    def some_report_while_time_passes(self, reporting: set[str], num_ticks: int) -> None:
        for _ in range(num_ticks):
            for name in sorted(reporting):
                self.a_node_reports(name, NodeLoad(free_blocks=5))
            self.time_passes(0.5)
            self.the_view_shows_who_is_alive_and_how()

    @rule(slept_s=strategies.sampled_from([1.125, 30.0]))
    def the_coordinator_sleeps(self, slept_s: float) -> None:
        before = self.state.view()
        self.now_s += slept_s
        self.reported_s = {incarnation: then + slept_s for incarnation, then in self.reported_s.items()}
        self.feed(Ticked())
        assert self.state.view() == before

    @rule(gateway=gateways)
    def a_watcher_comes(self, gateway: GatewayCard | None) -> None:
        watcher = WatcherId(next(self.numbers))
        self.watched[watcher] = View()
        self.watching[watcher] = gateway
        self.feed(WatchOpened(watcher, gateway))
        assert self.watched[watcher] == self.state.view()

    @rule()
    def a_watcher_leaves(self) -> None:
        if self.watched:
            watcher = next(iter(self.watched))
            del self.watched[watcher], self.watching[watcher]
            self.feed(WatchClosed(watcher))

    @rule(
        num_tokens=strategies.integers(1, 45),
        excluded=strategies.sets(names, max_size=1),
        first_token_s=strategies.sampled_from([None, 1.0]),
    )
    def a_request_is_routed(self, num_tokens: int, excluded: set[str], first_token_s: float | None) -> None:
        exclude = tuple(self.alive[name][1].incarnation for name in sorted(excluded) if name in self.alive)
        prefix = b"".join(BLOCKS[: num_tokens // 16])
        route = Route("tiny", num_tokens, exclude, prefix=prefix, first_token_s=first_token_s)
        commands = self.feed(RouteAsked(AskId(0), route))
        [answer] = [command for command in commands if isinstance(command, AnswerRoute | RefuseRoute)]
        usable = [
            card
            for _, card in self.alive.values()
            if card.incarnation not in exclude
            and self._listed_state(card) is NodeState.READY
            and num_tokens <= longest_prompt(card)
        ]
        decodes = [card for card in usable if card.role is Role.DECODE]
        prefills = [card for card in usable if card.role is Role.PREFILL]
        if isinstance(answer, RefuseRoute):
            codes = [ErrorCode.UNAVAILABLE, ErrorCode.CONTEXT_LENGTH]
            if decodes and self.policy == "fail":
                codes = [ErrorCode.NO_PREFILL, ErrorCode.CONTEXT_LENGTH]
            if answer.error.code is ErrorCode.OVERLOADED:
                assert first_token_s is not None and (answer.error.retry_after_s or 0) >= 1
            else:
                assert answer.error.code in codes
                assert not decodes or self.policy != "local"
            return
        decode = self._card_of(answer.routed.decode, decodes)
        if answer.routed.prefill is not None:
            prefill = self._card_of(answer.routed.prefill, prefills)
            assert pair_mismatch(prefill, decode) is None
        elif answer.routed.why == "cached-at-home":
            assert BLOCKS[0] in self.caches[decode.incarnation]
        elif answer.routed.why == "home-faster":
            assert self.home_after_s > 0
            assert self.policy == "local"
            assert prefills
        else:
            assert self.policy == "local"
            assert not any(
                pair_mismatch(prefill, decode) is None and num_tokens <= longest_shared_prompt(prefill, decode)
                for prefill in prefills
                for decode in decodes
            )

    def _card_of(self, address: NodeAddress, usable: list[NodeCard]) -> NodeCard:
        [card] = [card for card in usable if card.incarnation == address.incarnation]
        assert (address.node, address.address, address.offers) == (card.node, card.address, card.offers)
        return card

    def _listed_state(self, card: NodeCard) -> NodeState:
        [state] = [node.state for node in self.state.view().nodes if node.card.incarnation == card.incarnation]
        return state

    @invariant()
    def the_view_shows_who_is_alive_and_how(self) -> None:
        view = self.state.view()
        assert {node.card.node: node.card for node in view.nodes} == {
            name: card for name, (_, card) in self.alive.items()
        }
        layouts = {node.card.layout for node in view.nodes if node.state is not NodeState.INCOMPATIBLE}
        assert len(layouts) <= 1
        for node in view.nodes:
            incarnation = node.card.incarnation
            is_stalled = self.hanging[incarnation] or self.now_s - self.reported_s[incarnation] > PATIENCE.silence_s
            if node.state is not NodeState.INCOMPATIBLE:
                assert (node.state is NodeState.STALLED) == is_stalled
                assert (node.state is NodeState.DRAINING) == (self.draining[incarnation] and not is_stalled)
        assert set(view.gateways) == {card for card in self.watching.values() if card is not None}
        if view.nodes:
            assert any(node.state is not NodeState.INCOMPATIBLE for node in view.nodes)

    @invariant()
    def of_each_node_the_cache_is_known(self) -> None:
        for name, (_, card) in self.alive.items():
            assert self.state._nodes[NodeId(name)].cached == self.caches[card.incarnation]

    @invariant()
    def the_state_is_sound(self) -> None:
        self.state.check_invariants()

    def teardown(self) -> None:
        if not hasattr(self, "state"):
            return
        # Whatever happened, watchers know all of it once things are quiet, and nothing is left at the end.
        self.now_s += 1
        self.feed(Ticked())
        for view in self.watched.values():
            assert _without_progress(view) == _without_progress(self.state.view())
        for connection, _ in self.alive.values():
            self.feed(NodeLost(connection))
        while self.watched:
            self.a_watcher_leaves()
        assert self.state.view() == View()


def _blocks(joined: bytes) -> set[bytes]:
    return {joined[start : start + 8] for start in range(0, len(joined), 8)}


def _without_progress(view: View) -> list[object]:
    replace = msgspec.structs.replace
    return [replace(node, load=replace(node.load, progress_age_s=0.0)) for node in view.nodes]


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

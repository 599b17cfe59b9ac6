"""A coordinator that is told well-formed nonsense refuses it or lives with it; it never breaks on it."""

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.messages import (
    CallerFrame,
    CallId,
    KVLayout,
    NodeState,
    NodeView,
    Open,
    Register,
    Report,
    Route,
    Send,
    View,
    Watch,
    decode_from_caller,
    encode,
)
from coordinator.core.events import (
    AskId,
    ClusterEvent,
    ConnectionId,
    NodeRegistered,
    NodeReported,
    RouteAsked,
    Ticked,
    WatcherId,
    WatchOpened,
)
from coordinator.core.state import ClusterState
from tests.hostile import Words, pack
from tests.unit.coordinator.core.cards import make_card

VIEW = View((NodeView(make_card("decode-0"), NodeState.READY),))
FRAMES = Words(VIEW, well_formed=True).caller_frames()


def event_of(frame: CallerFrame, number: int) -> ClusterEvent:
    match frame:
        case Open(body=Register(card=card)):
            return NodeRegistered(ConnectionId(number), card)
        case Open(body=Route() as route):
            return RouteAsked(AskId(number), route)
        case Open(body=Watch(gateway=gateway)):
            return WatchOpened(WatcherId(number), gateway)
        case Send(body=Report(load=load, cache=cache)):
            return NodeReported(ConnectionId(number - 1), load, cache)
        case _:
            return Ticked()


@pytest.mark.filterwarnings("ignore:Generating overly large repr")
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.lists(FRAMES, min_size=5, max_size=15))
def test_nonsense_breaks_nothing(frames: list[object]) -> None:
    state = ClusterState(now_s=0.0, home_after_s=1.0)
    for number, packed in enumerate(frames):
        try:
            [frame] = decode_from_caller(pack([packed]))
        except msgspec.MsgspecError:
            continue
        state.handle(event_of(frame, number), now_s=number / 100)
        state.check_invariants()


@pytest.mark.parametrize(
    "body",
    [
        Register(make_card("decode-0", layout=KVLayout(0, "float32", 4, ()))),
        Register(make_card("decode-0", num_blocks=-1)),
        Register(make_card("decode-0", max_model_len=-1)),
        Route("tiny", -1),
    ],
)
def test_what_nothing_can_be_divided_by_or_added_to_does_not_come_in(body: Register | Route) -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_from_caller(encode([Open(CallId(1), body)]))

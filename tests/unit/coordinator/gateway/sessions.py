"""Sessions at the points from which their tests go on."""

from common.errors import BatonError
from common.messages import Incarnation, NodeAddress, NodeId, RequestId, Routed, Sampling
from coordinator.gateway.session import Session
from coordinator.gateway.session_events import Fail, Prepared, RouteArrived

PROMPT = [11, 12, 13]


def address(name: str) -> NodeAddress:
    return NodeAddress(NodeId(name), Incarnation(f"incarnation of {name}"), f"tcp://{name}")


D1, D2, P1 = address("d1"), address("d2"), address("p1")


def new_session(*, max_tokens: int = 8, max_attempts: int = 3) -> Session:
    return Session(
        id=RequestId("r"),
        model="m",
        prompt=PROMPT,
        sampling=Sampling(max_tokens=max_tokens, seed=42, stop_token_ids=(2,)),
        created_s=100.0,
        deadline_s=200.0,
        max_attempts=max_attempts,
        patience_s=5.0,
        stream_patience_s=60.0,
        exclusion_s=2.0,
    )


def running(decode: NodeAddress = D1, prefill: NodeAddress | None = P1, **limits: int) -> Session:
    session = new_session(**limits)
    session.handle(Prepared(101.0))
    session.handle(RouteArrived(102.0, 1, Routed(decode, prefill, "least-loaded"), "digest"))
    return session


def error_of(commands: list[object]) -> BatonError:
    (failure,) = [command for command in commands if isinstance(command, Fail)]
    return failure.error

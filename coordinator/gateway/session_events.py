"""What a session is told (events) and what it wants done (commands). See `session` for the rules."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

from common.errors import BatonError
from common.messages import FinishReason, Generate, NodeAddress, Route, Routed, Tokens

# --- what a session is and was ---------------------------------------------------------------------------


class SessionStatus(StrEnum):
    PREPARING = "preparing"
    ROUTING = "routing"
    PARKED = "parked"
    WAITING = "waiting"
    STREAMING = "streaming"
    ENDED = "ended"


class Outcome(StrEnum):
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Transition(NamedTuple):
    at_s: float
    status: SessionStatus
    why: str


def seconds_by_status(history: Sequence[Transition]) -> dict[str, float]:
    """In order of first appearance; they add up to the whole time that it covers."""
    seconds: dict[str, float] = {}
    for earlier, later in pairwise(history):
        seconds[earlier.status.value] = seconds.get(earlier.status.value, 0.0) + later.at_s - earlier.at_s
    return seconds


class Exclusion(NamedTuple):
    at_s: float
    why: str


# --- events -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prepared:
    """The prompt is tokenised and within limits."""

    at_s: float


@dataclass(frozen=True, slots=True)
class RouteArrived:
    """`model_digest` is that of the routed decode node."""

    at_s: float
    attempt: int
    routed: Routed
    model_digest: str


@dataclass(frozen=True, slots=True)
class RouteRefused:
    at_s: float
    attempt: int
    error: BatonError


@dataclass(frozen=True, slots=True)
class WaitEnded:
    """The cluster changed, or the time to wait for that is over."""

    at_s: float
    attempt: int


@dataclass(frozen=True, slots=True)
class TokensArrived:
    at_s: float
    attempt: int
    item: Tokens


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    at_s: float
    attempt: int
    error: BatonError


@dataclass(frozen=True, slots=True)
class AttemptEnded:
    """The call ended well, though its last item named no finish reason."""

    at_s: float
    attempt: int


@dataclass(frozen=True, slots=True)
class StopStringFound:
    at_s: float
    choice: int = 0


@dataclass(frozen=True, slots=True)
class ClientGone:
    at_s: float


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    at_s: float


@dataclass(frozen=True, slots=True)
class GatewayStopping:
    """This gateway ends, and has waited for the request as long as it may."""

    at_s: float


SessionEvent = (
    Prepared
    | RouteArrived
    | RouteRefused
    | WaitEnded
    | TokensArrived
    | AttemptFailed
    | AttemptEnded
    | StopStringFound
    | ClientGone
    | DeadlinePassed
    | GatewayStopping
)

# --- commands ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AskRoute:
    attempt: int
    body: Route


@dataclass(frozen=True, slots=True)
class WaitForCluster:
    """Until the cluster has changed since the route was asked for, but at most so long."""

    attempt: int
    at_most_s: float


@dataclass(frozen=True, slots=True)
class OpenAttempt:
    attempt: int
    node: NodeAddress
    body: Generate


@dataclass(frozen=True, slots=True)
class CancelAttempt:
    """Stop asking or waiting for this attempt's route, or end its call."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Deliver:
    tokens: list[int]
    choice: int = 0


@dataclass(frozen=True, slots=True)
class StopAtNode:
    """This attempt need not go on with one of its choices."""

    choice: int


@dataclass(frozen=True, slots=True)
class Finish:
    reason: FinishReason
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Fail:
    error: BatonError


SessionCommand = AskRoute | WaitForCluster | OpenAttempt | CancelAttempt | Deliver | StopAtNode | Finish | Fail

"""What a Generate call is told (events) and what it wants done (commands). See `role` for the rules."""

from dataclasses import dataclass
from enum import StrEnum

from common.engine.events import Admit, Failed, Release, Reserve, Reserved
from common.engine.request import Progress
from common.errors import BatonError
from common.messages import (
    BlockId,
    BlockRef,
    BlocksReady,
    HandedOver,
    Handover,
    Incarnation,
    Leaving,
    NodeAddress,
    Prefill,
    PrefillDone,
    StopChoice,
    Tokens,
    WireError,
)


class State(StrEnum):
    RESERVING = "reserve"
    PREFILLING = "prefill"
    PULLING = "transfer"
    TAKING = "takeover"
    SETTLING = "settle"
    DECODING = "decode"
    ENDED = "ended"


class Path(StrEnum):
    """Who computes the prompt, as far as is known yet."""

    PREFILL = "prefill"
    HOME = "home"
    FALLBACK = "fallback"
    HANDOVER = "handover"


# --- events that only this role knows ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PullEnded:
    """One read is settled: `count` blocks from index `first` are in place, or `error` says why not."""

    first: int
    count: int
    error: BatonError | None = None


@dataclass(frozen=True, slots=True)
class PrefillEnded:
    """The Prefill or Handover call is over, with its error if it had one."""

    error: BatonError | None = None


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """Running requests need this reservation's blocks."""


@dataclass(frozen=True, slots=True)
class LeaveAsked:
    """This node is being drained."""


@dataclass(frozen=True, slots=True)
class Evicted:
    """Another node goes on with the request, or the time to leave is over."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The call is over for its caller: cancelled, lost, or out of time."""


Event = (
    Reserved
    | BlocksReady
    | PrefillDone
    | HandedOver
    | PullEnded
    | PrefillEnded
    | Progress
    | StopChoice
    | Failed
    | Reclaimed
    | LeaveAsked
    | Evicted
    | Cancelled
)

# --- commands --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AskPrefill:
    address: NodeAddress
    body: Prefill


@dataclass(frozen=True, slots=True)
class AskHandover:
    address: NodeAddress
    body: Handover


@dataclass(frozen=True, slots=True)
class StopSource:
    """Tell the node that runs the request to stop it and say how far it came."""


@dataclass(frozen=True, slots=True)
class Pull:
    """Read `refs` of `owner` into `into`; answered by exactly one PullEnded(first, ...)."""

    owner: Incarnation
    first: int
    refs: tuple[BlockRef, ...]
    into: tuple[BlockId, ...]
    secret: bytes


@dataclass(frozen=True, slots=True)
class StopPulls:
    """Post no more reads and let those in flight settle; each still answers."""


@dataclass(frozen=True, slots=True)
class ClosePrefill:
    """The prefill node may free the blocks: say Pulled if `done`, else cancel the call. Likewise a Handover call."""

    done: bool


@dataclass(frozen=True, slots=True)
class Emit:
    item: Tokens | Leaving


@dataclass(frozen=True, slots=True)
class EndCall:
    error: WireError | None = None


Command = (
    Reserve | Admit | Release | AskPrefill | AskHandover | StopSource | Pull | StopPulls | ClosePrefill | Emit | EndCall
)

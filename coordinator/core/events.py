"""What is said between the coordinator's shell and `state.ClusterState`: events past tense in, commands out."""

from dataclasses import dataclass
from typing import NewType

from common.messages import CacheNews, GatewayCard, NodeCard, NodeLoad, Registered, Route, Routed, View, WireError

ConnectionId = NewType("ConnectionId", int)
WatcherId = NewType("WatcherId", int)
AskId = NewType("AskId", int)

# --- events ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NodeRegistered:
    connection: ConnectionId
    card: NodeCard


@dataclass(frozen=True, slots=True)
class NodeReported:
    connection: ConnectionId
    load: NodeLoad
    cache: CacheNews | None = None


@dataclass(frozen=True, slots=True)
class NodeLost:
    connection: ConnectionId


@dataclass(frozen=True, slots=True)
class WatchOpened:
    watcher: WatcherId
    gateway: GatewayCard | None = None


@dataclass(frozen=True, slots=True)
class WatchClosed:
    watcher: WatcherId


@dataclass(frozen=True, slots=True)
class RouteAsked:
    """Answered at once, by one AnswerRoute or RefuseRoute."""

    ask: AskId
    route: Route


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed. Comes several times in `load_gap_s`."""


ClusterEvent = NodeRegistered | NodeReported | NodeLost | WatchOpened | WatchClosed | RouteAsked | Ticked

# --- commands ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AnswerRoute:
    ask: AskId
    routed: Routed


@dataclass(frozen=True, slots=True)
class RefuseRoute:
    ask: AskId
    error: WireError


@dataclass(frozen=True, slots=True)
class PublishView:
    watchers: tuple[WatcherId, ...]
    view: View


@dataclass(frozen=True, slots=True)
class TellNode:
    connection: ConnectionId
    item: Registered


ClusterCommand = AnswerRoute | RefuseRoute | PublishView | TellNode

"""The event loop's side of an engine: each event goes to whoever owns its request."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import assert_never

from common import telemetry
from common.engine.events import Announced, CacheChanged, Counted, Event, Failed, Reserved, Starved, Stepped
from common.engine.request import Progress
from common.messages import BlockHash, RequestId

log = telemetry.logger(__name__)

Listener = Callable[[Reserved | Progress | Failed | Announced], None]


class EnginePort:
    """`deliver` is the engine's; everything else belongs to the loop that made the port."""

    def __init__(
        self,
        *,
        on_starved: Callable[[], None] = lambda: None,
        on_cache_changed: Callable[[Sequence[tuple[BlockHash, bool]]], None] = lambda changes: None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_starved = on_starved
        self._on_cache_changed = on_cache_changed
        self._listeners: dict[RequestId, Listener] = {}
        self._counts: deque[asyncio.Future[Counted]] = deque()
        self.owners: dict[RequestId, RequestId] = {}
        """The request of the call that listens, for those that said it."""

    def deliver(self, events: Sequence[Event]) -> None:
        """Called on the engine thread; wakes the loop once per step."""
        try:
            self._loop.call_soon_threadsafe(self._dispatch, events)
        except RuntimeError:  # the loop is closed: nobody is left to listen
            log.debug("engine events after the loop closed", count=len(events))

    @contextmanager
    def listen(self, request: RequestId, listener: Listener, *, owner: RequestId | None = None) -> Iterator[None]:
        """`request` is the engine's id, `owner` the id of the request whose call holds it."""
        assert request not in self._listeners
        self._listeners[request] = listener
        if owner is not None:
            self.owners[request] = owner
        try:
            yield
        finally:
            del self._listeners[request]
            self.owners.pop(request, None)

    def next_count(self) -> "asyncio.Future[Counted]":
        """The answer to the Count that is posted next, in the same turn of the loop."""
        count: asyncio.Future[Counted] = self._loop.create_future()
        self._counts.append(count)
        return count

    def _dispatch(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case Stepped(progress=progress):
                    for one in progress:
                        self._tell(one)
                case Reserved() | Failed() | Announced():
                    self._tell(event)
                case Counted():
                    count = self._counts.popleft()
                    if not count.done():
                        count.set_result(event)
                case Starved():
                    self._on_starved()
                case CacheChanged(changes=changes):
                    self._on_cache_changed(changes)
                case _:
                    assert_never(event)

    def _tell(self, event: Reserved | Progress | Failed | Announced) -> None:
        listener = self._listeners.get(event.request)
        if listener is None:
            return  # released while the step ran
        try:
            listener(event)
        except Exception:  # one request's bug must not silence the others
            log.exception("a request's listener failed", request=event.request)

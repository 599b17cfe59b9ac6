"""The call that takes a running request over from a node that is being drained, opened while that node goes on.

The next attempt is routed and opened before it is needed. Its node pulls the request's blocks from the one that
leaves and then stops it there, which ends the attempt in progress with MovedError; the session then asks for its next
attempt and is given this one. Whatever goes wrong before costs nothing: the old attempt goes on, and if it must end
all the same, the request is routed like any other.
"""

import asyncio
from contextlib import AsyncExitStack
from typing import NamedTuple

from common import telemetry
from common.clock import Clock
from common.errors import BatonError
from common.messages import Routed
from common.rpc.base import Client, OutgoingCall
from coordinator.gateway.session import Session
from coordinator.gateway.watch import ClusterWatch

log = telemetry.logger(__name__)


class PreparedAttempt(NamedTuple):
    attempt: int
    routed: Routed
    digest: str
    call: OutgoingCall
    """Entered."""


class Successor:
    """Prepares from the moment it is made until `close`. Belongs to the task that relays the session."""

    def __init__(self, session: Session, *, cluster: ClusterWatch, client: Client, clock: Clock) -> None:
        self.attempt = session.attempt + 1
        self._session = session
        self._cluster = cluster
        self._client = client
        self._clock = clock
        self._life = AsyncExitStack()
        self._preparing = asyncio.create_task(self._prepare())

    def prepared(self) -> PreparedAttempt | None:
        """The call, if it is open. It stays this object's to close."""
        task = self._preparing
        return task.result() if task.done() and not task.cancelled() and task.exception() is None else None

    async def close(self) -> None:
        """Leaves no call and no task. Idempotent."""
        self._preparing.cancel()
        await asyncio.wait([self._preparing])
        await self._life.aclose()

    async def _prepare(self) -> PreparedAttempt | None:
        session = self._session
        try:
            routed, digest = await self._cluster.route(session.takeover_route())
            body = session.takeover(routed, digest)
            if body is None:
                return None
            node = routed.decode
            left_s = max(0.0, session.deadline_s - self._clock.now_s())
            call = self._client.open(node.address, body, incarnation=node.incarnation, timeout_s=left_s)
            return PreparedAttempt(self.attempt, routed, digest, await self._life.enter_async_context(call))
        except BatonError as error:
            log.info("nobody takes over", request=session.id, attempt=self.attempt, error=error.message)
            return None
        except Exception:
            log.exception("takeover broke", request=session.id)
            return None

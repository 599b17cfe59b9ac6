"""Ending tasks of one's own."""

import asyncio
from typing import Any

from common import telemetry

log = telemetry.logger(__name__)


async def ended(*tasks: "asyncio.Task[Any]") -> None:
    """Cancel `tasks` and return when they have ended; an error of their own is logged.

    Unlike `with suppress(CancelledError): await task` this never takes a cancellation of the caller for the task's:
    who is cancelled while waiting here is cancelled.
    """
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a background task had failed", task=task.get_name(), error=repr(error))

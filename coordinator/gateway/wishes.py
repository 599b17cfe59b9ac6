"""What a client may ask for in Baton's own request headers. InvalidField names the header that is wrong."""

import math
from collections.abc import Mapping

from common.messages import Priority
from coordinator.gateway.openai import InvalidField

PRIORITY = "x-baton-priority"
FIRST_TOKEN = "x-baton-first-token-s"
TIMEOUT = "x-baton-timeout-s"


def priority_of(headers: Mapping[str, str]) -> Priority | None:
    value = headers.get(PRIORITY)
    if value is None:
        return None
    try:
        return Priority(value.strip().lower())
    except ValueError as error:
        raise InvalidField(PRIORITY, f"'{PRIORITY}' is {value!r}: one of {', '.join(Priority)}") from error


def seconds_of(headers: Mapping[str, str], name: str) -> float | None:
    """More than 0 and finite."""
    value = headers.get(name)
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidField(name, f"'{name}' is {value!r}: a number of seconds above 0")
    return seconds

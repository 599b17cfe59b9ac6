"""Where the simulation replaces the outside world: chance, the engine's thread, what costs time for nothing."""

import logging
import os
import random
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from common import node
from tests.simulation.engine import SteppedEngine

_ROOMS = ("common", "kv_transfer", "prefill_node", "decode_node", "coordinator", "asyncio")


class LogKeeper(logging.Handler):
    """Keeps errors, which no fault of the outside world may cause; tells everything to `tell`, if anybody listens."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[str] = []
        self.tell: Callable[[str], None] | None = None
        self._format = logging.Formatter("%(name)s %(levelname)s %(message)s")

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.ERROR and self.tell is None:
            return
        line = f"{self._format.format(record)} {getattr(record, 'facts', {})}"
        if record.levelno >= logging.ERROR:
            self.errors.append(line)
        if self.tell is not None:
            self.tell(line)


@contextmanager
def simulated_edges(seed: int, keeper: LogKeeper) -> Iterator[None]:
    """While inside, everything random is drawn from `seed`."""
    chance = random.Random(seed)
    before = random.getstate()
    random.seed(seed)
    try:
        with (
            patch.object(os, "urandom", chance.randbytes),
            patch.object(secrets, "token_bytes", lambda size=32: chance.randbytes(size)),
            patch.object(node, "Engine", SteppedEngine),
            patch.object(node, "_version", lambda: "simulated"),
            _logs_to(keeper),
        ):
            yield
    finally:
        random.setstate(before)


@contextmanager
def _logs_to(keeper: LogKeeper) -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in _ROOMS]
    before = [(logger, logger.level, logger.propagate, logger.handlers) for logger in loggers]
    for logger in loggers:
        logger.handlers, logger.propagate = [keeper], False
        if keeper.tell is not None:
            logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        for logger, level, propagate, handlers in before:
            logger.handlers, logger.propagate = handlers, propagate
            if keeper.tell is not None:
                logger.setLevel(level)

"""Log events with facts, one line an event: readable in a terminal, JSON for machines.

    log = telemetry.logger(__name__)
    log.info("node registered", node="prefill-0", role="prefill")

prints `15:37:29.123 INFO  coordinator  node registered  node=prefill-0 role=prefill`. It rides on the
standard library's logging, so what libraries log comes out the same way. BATON_LOG_FORMAT (text, json) and
BATON_LOG_LEVEL (debug, info, warning, error) apply to every process; flags of the same names win.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from math import inf
from typing import Any, TextIO

from common.errors import ConfigError

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "facts"}
_COLOURS = {"DEBUG": "\x1b[2m", "INFO": "", "WARNING": "\x1b[33m", "ERROR": "\x1b[31m", "CRITICAL": "\x1b[31m"}
_DIM = "\x1b[2m"
_RESET = "\x1b[0m"


class EventLog:
    """Logs events by name; facts may have any name, unlike logging's `extra`."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def debug(self, event: str, /, **facts: object) -> None:
        self._log(logging.DEBUG, event, facts)

    def info(self, event: str, /, **facts: object) -> None:
        self._log(logging.INFO, event, facts)

    def warning(self, event: str, /, **facts: object) -> None:
        self._log(logging.WARNING, event, facts)

    def error(self, event: str, /, **facts: object) -> None:
        self._log(logging.ERROR, event, facts)

    def exception(self, event: str, /, **facts: object) -> None:
        """An error with the traceback of the exception being handled."""
        self._log(logging.ERROR, event, facts, traceback=True)

    def _log(self, level: int, event: str, facts: Mapping[str, object], *, traceback: bool = False) -> None:
        if self._logger.isEnabledFor(level):
            # "%s": an event's name is never a format string.
            self._logger.log(level, "%s", event, extra={"facts": facts}, exc_info=traceback, stacklevel=3)


class Sparing:
    """Warns of what strangers can cause at any rate: once in `every_s`, and then says how many were held back."""

    def __init__(self, log: EventLog, *, every_s: float = 1.0, now_s: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._every_s = every_s
        self._now_s = now_s
        self._next_s = -inf
        self._num_held_back = 0

    def warning(self, event: str, /, **facts: object) -> None:
        now_s = self._now_s()
        if now_s < self._next_s:
            self._num_held_back += 1
            return
        held_back = {"held_back": self._num_held_back} if self._num_held_back else {}
        self._next_s, self._num_held_back = now_s + self._every_s, 0
        self._log.warning(event, **facts, **held_back)


def logger(name: str) -> EventLog:
    return EventLog(logging.getLogger(name))


def configure(
    process: str,
    *,
    log_format: str | None = None,
    level: str | None = None,
    env: Mapping[str, str] | None = None,
    stream: TextIO | None = None,
) -> None:
    """Send everything that is logged to `stream` (stderr), as this process. ConfigError for a wrong format or level."""
    env = os.environ if env is None else env
    stream = sys.stderr if stream is None else stream
    log_format = _choice("log format", "BATON_LOG_FORMAT", log_format or env.get("BATON_LOG_FORMAT", "text"), FORMATS)
    level = _choice("log level", "BATON_LOG_LEVEL", level or env.get("BATON_LOG_LEVEL", "info"), LEVELS)
    target = logging.StreamHandler(stream)
    target.setFormatter(JsonLines(process) if log_format == "json" else TextLines(process, colours=stream.isatty()))
    root = logging.getLogger()
    root.handlers[:] = [target]
    root.setLevel(level.upper())


def facts_of(record: logging.LogRecord) -> dict[str, object]:
    """The facts of one event: ours, and whatever a library passed as `extra`."""
    facts: dict[str, object] = {key: value for key, value in vars(record).items() if key not in _STANDARD}
    return facts | dict(getattr(record, "facts", {}))


class TextLines(logging.Formatter):
    def __init__(self, process: str, *, colours: bool) -> None:
        super().__init__()
        self._process = process
        self._colours = colours

    def format(self, record: logging.LogRecord) -> str:
        clock = f"{datetime.fromtimestamp(record.created):%H:%M:%S}.{int(record.msecs):03d}"
        facts = " ".join(f"{key}={_word(value)}" for key, value in facts_of(record).items())
        level = f"{record.levelname:<7}"
        if self._colours:
            clock, facts = f"{_DIM}{clock}{_RESET}", f"{_DIM}{facts}{_RESET}"
            level = f"{_COLOURS.get(record.levelname, '')}{level}{_RESET}"
        event = record.getMessage().replace("\n", "\\n")
        line = f"{clock} {level} {self._process}  {event}  {facts}".rstrip()
        if record.exc_info and record.exc_info[0] is not None:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonLines(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "event": record.getMessage(),
            "facts": facts_of(record),
        }
        if record.exc_info and record.exc_info[0] is not None:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def _choice(what: str, variable: str, value: str, known: tuple[str, ...]) -> str:
    if value.lower() not in known:
        raise ConfigError(f"{what} {value!r} ({variable} or its flag): expected one of {', '.join(known)}")
    return value.lower()


def _word(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if not text or any(c.isspace() or c in '"=' for c in text) else text

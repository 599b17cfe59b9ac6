import io
import json
import logging
from collections.abc import Iterator

import pytest

from common import telemetry
from common.errors import ConfigError

log = telemetry.logger("baton.test")


@pytest.fixture
def output() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield io.StringIO()
    root.handlers[:], _ = before
    root.setLevel(before[1])


def test_an_event_is_one_readable_line(output: io.StringIO) -> None:
    telemetry.configure("gateway", env={}, stream=output)
    log.info("node lost", node="decode-0", after_s=0.123456, reason="hung up", name="any fact may be called name")
    [line] = output.getvalue().splitlines()
    assert line.partition(" ")[2] == (
        'INFO    gateway  node lost  node=decode-0 after_s=0.1235 reason="hung up" name="any fact may be called name"'
    )


def test_an_event_is_one_json_document(output: io.StringIO) -> None:
    telemetry.configure("gateway", env={"BATON_LOG_FORMAT": "json"}, stream=output)
    log.warning("node lost", node="decode-0", tokens=3, error=ConfigError("no"))
    line = json.loads(output.getvalue())
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "warning",
        "process": "gateway",
        "logger": "baton.test",
        "event": "node lost",
        "facts": {"node": "decode-0", "tokens": 3, "error": "no"},
    }


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_line_break_in_an_event_or_fact_makes_no_second_line(output: io.StringIO, log_format: str) -> None:
    telemetry.configure("x", log_format=log_format, env={}, stream=output)
    log.info("two\nlines", text="a\nb")
    assert len(output.getvalue().splitlines()) == 1


def test_what_libraries_log_has_its_extras_as_facts(output: io.StringIO) -> None:
    telemetry.configure("x", log_format="json", env={}, stream=output)
    logging.getLogger("library").info("served %d", 3, extra={"path": "/health"})
    line = json.loads(output.getvalue())
    assert (line["event"], line["facts"]) == ("served 3", {"path": "/health"})


def test_an_event_with_a_percent_sign_is_no_format(output: io.StringIO) -> None:
    telemetry.configure("x", env={}, stream=output)
    log.info("100 % done %s")
    assert "100 % done %s" in output.getvalue()


def test_an_exception_brings_its_traceback(output: io.StringIO) -> None:
    telemetry.configure("x", log_format="json", env={}, stream=output)
    try:
        raise ValueError("broken")
    except ValueError:
        log.exception("call failed", call=7)
    line = json.loads(output.getvalue())
    assert line["facts"] == {"call": 7}
    assert line["traceback"].endswith("ValueError: broken")


def test_events_below_the_level_are_not_written(output: io.StringIO) -> None:
    telemetry.configure("x", env={"BATON_LOG_LEVEL": "info"}, level="error", stream=output)
    log.warning("unimportant")
    log.error("important")
    assert output.getvalue().count("\n") == 1


@pytest.mark.parametrize("env", [{"BATON_LOG_LEVEL": "loud"}, {"BATON_LOG_FORMAT": "xml"}])
def test_a_wrong_setting_says_what_would_be_right(env: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="expected one of"):
        telemetry.configure("x", env=env, stream=io.StringIO())


def test_what_strangers_cause_is_logged_once_a_while_with_the_number_held_back(output: io.StringIO) -> None:
    telemetry.configure("x", log_format="json", env={}, stream=output)
    now_s = 0.0
    sparing = telemetry.Sparing(log, now_s=lambda: now_s)
    for number in range(1000):
        now_s = number / 400
        sparing.warning("malformed", by="a stranger")
    facts = [json.loads(line)["facts"] for line in output.getvalue().splitlines()]
    assert facts == [
        {"by": "a stranger"},
        {"by": "a stranger", "held_back": 399},
        {"by": "a stranger", "held_back": 399},
    ]

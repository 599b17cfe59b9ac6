"""The run itself is `make chaos`; here, that its judgement can be trusted."""

import asyncio
import json
import re
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest

from common.config import LinkConfig
from tests.chaos import traffic
from tests.chaos.faults import MOST_PAUSE_S, Kind, plan
from tests.chaos.proxy import Proxy
from tests.chaos.report import Tally
from tests.chaos.traffic import Ended, Outcome, Question, Text, Transcript

TARGETS = ("prefill-0", "decode-0", "decode-1", "coordinator-0", "gateway")
QUESTION = Question("completion 0", "/v1/completions", {})


def event(text: str = "", finish: str | None = None) -> str:
    return "data: " + json.dumps({"choices": [{"text": text, "finish_reason": finish}]})


def usage(tokens: int) -> str:
    return "data: " + json.dumps({"choices": [], "usage": {"completion_tokens": tokens}})


ERROR = 'data: {"error": {"message": "the node was lost"}}'
DONE = "data: [DONE]"
GOOD = [event("one "), ": alive", event("two"), event(finish="stop"), usage(2), DONE]


def ended(*lines: str) -> Ended:
    transcript = Transcript()
    for line in lines:
        transcript.read(line + "\n")
    return transcript.ended()


def test_a_whole_stream_is_an_answer() -> None:
    assert ended(*GOOD).answer == Text("one two", "stop", 2)


def test_a_stream_that_ends_in_an_error_event_is_broken_and_honest() -> None:
    assert ended(event("one "), ERROR).outcome is Outcome.BROKEN


@pytest.mark.parametrize(
    "lines",
    [
        GOOD[:-1],
        GOOD[:3],
        [*GOOD, DONE],
        [*GOOD, event("three")],
        [*GOOD[:4], *GOOD[3:]],
        [*GOOD[:4], DONE],
        [event("one "), ERROR, DONE],
        [*GOOD[:4], ERROR],
        [],
    ],
)
def test_a_stream_with_no_end_or_two_is_dishonest(lines: list[str]) -> None:
    assert ended(*lines).outcome is Outcome.DISHONEST


@pytest.mark.parametrize(
    "answer", [Text("one twa", "stop", 2), Text("one two", "length", 2), Text("one two", "stop", 3)]
)
def test_an_answer_that_differs_in_anything_is_wrong(answer: Text) -> None:
    oracle = Text("one two", "stop", 2)
    assert traffic.judged(Ended(Outcome.EQUAL, answer=answer), QUESTION, oracle).outcome is Outcome.WRONG
    assert traffic.judged(Ended(Outcome.EQUAL, answer=oracle), QUESTION, oracle).outcome is Outcome.EQUAL


@pytest.mark.parametrize(
    ("status", "headers", "body", "outcome"),
    [
        (503, {"Retry-After": "1"}, '{"error": {"message": "no node"}}', Outcome.REFUSED),
        (504, {}, '{"error": {"message": "too late"}}', Outcome.REFUSED),
        (503, {}, '{"error": {"message": "no node"}}', Outcome.DISHONEST),
        (500, {"Retry-After": "1"}, '{"error": {"message": "a bug"}}', Outcome.DISHONEST),
        (503, {"Retry-After": "1"}, "<html>", Outcome.DISHONEST),
    ],
)
def test_a_refusal_needs_an_honest_status(status: int, headers: dict[str, str], body: str, outcome: Outcome) -> None:
    assert traffic.refusal(status, headers, body).outcome is outcome


def test_a_run_fails_for_each_thing_that_is_not_right() -> None:
    tally = Tally(audit=(0, "clean"), remains=[])
    tally.count(Ended(Outcome.EQUAL, answer=Text("", "stop", 1)))
    tally.faults[Kind.KILL] += 1
    assert tally.failures() == []
    for outcome in traffic.FAILURES:
        tally.outcomes[outcome] += 1
        assert tally.failures()
        tally.outcomes[outcome] -= 1
    tally.audit = (1, "a call that only one side knows")
    assert tally.failures() == ["the audit is not clean"]
    tally.crashes.append("decode-0 ended with -11")
    assert tally.failures() == ["decode-0 ended with -11", "the audit is not clean"]


def test_a_seed_gives_one_plan_and_nobody_dies_twice_without_rest() -> None:
    first, second = (list(plan(7, 600.0, TARGETS, every_s=2.0, rest_s=30.0)) for _ in range(2))
    assert first == second
    assert {fault.kind for fault in first} == set(Kind)
    assert all(fault.for_s <= MOST_PAUSE_S for fault in first)
    kills = [fault.target for fault in first if fault.kind is Kind.KILL]
    assert sorted(kills[: len(TARGETS)]) == sorted(TARGETS)
    for target in TARGETS:
        deaths = [fault.at_s for fault in first if fault.target == target and fault.kind in (Kind.KILL, Kind.RESTART)]
        assert all(later - earlier >= 30.0 for earlier, later in pairwise(deaths))


def test_the_chaos_that_a_change_must_pass_hurts_everybody_in_every_way() -> None:
    arguments = re.search(r'make chaos ARGS="(.*)"', (Path(__file__).parents[2] / ".ci" / "run").read_text())
    assert arguments is not None
    asked = dict(pairwise(arguments[1].split()))
    targets = ("prefill-0", "prefill-1", "decode-0", "decode-1", "coordinator-0", "coordinator-1", "gateway")
    rest_s, every_s = 30.0, float(asked["--every"])
    faults = list(plan(int(asked["--seed"]), float(asked["--seconds"]), targets, every_s=every_s, rest_s=rest_s))

    def roles(*kinds: Kind, lasting_s: float = 0.0) -> set[str]:
        hurt = [fault for fault in faults if fault.kind in kinds and fault.for_s >= lasting_s]
        return {fault.target.partition("-")[0] for fault in hurt}

    assert {fault.kind for fault in faults} == set(Kind)
    assert {fault.target for fault in faults if fault.kind in (Kind.KILL, Kind.RESTART)} == set(targets)
    assert roles(Kind.KILL) == {"prefill", "decode", "coordinator", "gateway"}
    assert roles(Kind.STOP, lasting_s=LinkConfig().lost_after_s) >= {"prefill", "decode"}
    assert roles(Kind.CUT) >= {"prefill", "decode"}


async def test_a_proxy_cuts_and_swallows() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionResetError):
            while line := await reader.readline():
                writer.write(line)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    proxy = Proxy(server.sockets[0].getsockname()[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", await proxy.start())
    writer.write(b"one\n")
    assert await reader.readline() == b"one\n"
    proxy.swallow()
    writer.write(b"two\n")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await reader.readline()
    proxy.heal()
    assert await reader.readline() == b"two\n"
    assert proxy.cut() == 1
    with pytest.raises(ConnectionResetError):
        await reader.readline()
    writer.close()
    with suppress(ConnectionResetError):
        await writer.wait_closed()
    await proxy.close()
    server.close()
    await server.wait_closed()

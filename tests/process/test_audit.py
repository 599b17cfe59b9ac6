"""`baton audit` on a real cluster: clean when idle and at work, and not when a process is frozen."""

import asyncio
import json
from typing import Any

import pytest

from tests.process.cluster import BatonUp
from tests.process.parts import frozen

pytestmark = [pytest.mark.process, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="session")]

NUM_STREAMS = 6
NUM_AUDITS = 5


async def audit_document(up: BatonUp, *flags: str) -> tuple[int, dict[str, Any]]:
    status, output = await up.command("audit", "--json", *flags)
    return status, json.loads(output)


async def test_an_idle_cluster_holds_nothing(standing_pair: BatonUp) -> None:
    await standing_pair.complete()
    status, document = await audit_document(standing_pair, "--idle", "--wait", "30")
    assert (status, document["clean"], document["findings"]) == (0, True, [])
    coordinator, gateway, prefill, decode = document["processes"]
    assert [one["kind"] for one in document["processes"]] == ["coordinator", "gateway", "prefill", "decode"]
    assert [call["method"] for call in coordinator["incoming"]].count("Register") == 2
    assert [call["method"] for call in gateway["outgoing"]] == ["Watch"]
    [serving], [reading] = prefill["serving"], decode["reading"]
    assert (serving["peer"], reading["peer"]) == (decode["incarnation"], prefill["incarnation"])
    status, text = await standing_pair.command("audit")
    assert status == 0
    assert text.splitlines()[-1] == "Clean: everything that is held has a live owner."


async def test_a_cluster_at_work_is_clean(standing_pair: BatonUp) -> None:
    async def ask_on() -> None:
        while True:
            await standing_pair.complete("once upon a time " * 20, max_tokens=200)

    streams = [asyncio.create_task(ask_on()) for _ in range(NUM_STREAMS)]
    methods: list[str] = []
    try:
        for _ in range(NUM_AUDITS):
            status, document = await audit_document(standing_pair)
            assert (status, document["findings"]) == (0, [])
            methods += [call["method"] for process in document["processes"] for call in process["incoming"]]
        status, document = await audit_document(standing_pair, "--idle")
        assert status == 1, "it is not idle"
    finally:
        for stream in streams:
            stream.cancel()
        await asyncio.wait(streams)
    assert methods.count("Generate") > NUM_AUDITS
    assert (await audit_document(standing_pair, "--idle", "--wait", "30"))[0] == 0


async def test_a_frozen_node_is_a_finding_until_it_goes_on(standing_pair: BatonUp) -> None:
    up = standing_pair
    await up.complete()
    async with frozen(up.children()["decode-0"]):
        status, text = await up.command("audit")
    assert status == 1, text
    assert "does not answer: no answer within 2 s" in text
    status, text = await up.command("audit", "--idle", "--wait", "30")
    assert status == 0, text

"""The commands a user types beside a running cluster."""

import asyncio
import json

import pytest

from tests.process.cluster import BATON, BatonUp

pytestmark = [pytest.mark.process, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="session")]


async def baton(*arguments: str, stdin: str = "", within_s: float = 60.0) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    process = await asyncio.create_subprocess_exec(
        *(BATON, *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(within_s):
        out, err = await process.communicate(stdin.encode())
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_chat_prints_the_same_answer_for_the_same_seed_and_leaves(standing_pair: BatonUp) -> None:
    question = ("chat", "--url", standing_pair.url, "-m", "Say hello.", "--max-tokens", "12", "--seed", "3")
    answers = [await baton(*question) for _ in range(2)]
    assert answers[0] == answers[1]
    status, out, err = answers[0]
    assert (status, err) == (0, "")
    assert out.strip()


async def test_a_conversation_goes_on_until_ctrl_d(standing_pair: BatonUp) -> None:
    status, out, err = await baton(
        "chat", "--url", standing_pair.url, "--max-tokens", "4", stdin="Say hello.\nAnd again.\n"
    )
    assert (status, err) == (0, "")
    assert out.count("\n> ") == 3


async def test_chat_without_a_cluster_says_so(unused_tcp_port: int) -> None:
    status, out, err = await baton("chat", "--url", f"http://127.0.0.1:{unused_tcp_port}", "-m", "hello")
    assert (status, out) == (1, "")
    assert "`baton up` starts a cluster" in err
    assert "Traceback" not in err


async def test_status_as_json_names_every_node(standing_pair: BatonUp) -> None:
    status, out, err = await baton("status", "--coordinator", standing_pair.coordinator, "--json")
    assert (status, err) == (0, "")
    document = json.loads(out)
    assert {node["node"]: (node["role"], node["state"]) for node in document["nodes"]} == {
        "prefill-0": ("prefill", "ready"),
        "decode-0": ("decode", "ready"),
    }


async def test_status_for_people_names_every_node(standing_pair: BatonUp) -> None:
    status, out, _ = await baton("status", "--coordinator", standing_pair.coordinator)
    assert status == 0
    assert {"prefill-0", "decode-0"} <= set(out.split())

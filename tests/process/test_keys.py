"""A whole cluster with keys: it answers, its blocks travel encrypted, and who has none is told so."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.process.cluster import BATON, ENDS_WITHIN_S, BatonUp
from tests.process.parts import passing

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]


async def run(*command: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    out, _ = await process.communicate()
    return process.returncode, out.decode()


async def test_a_cluster_with_keys_answers_and_lets_nobody_else_in(
    baton_up: Callable[..., BatonUp], tmp_path: Path
) -> None:
    keys, others = str(tmp_path / "keys"), str(tmp_path / "others")
    for folder in (keys, others):
        status, out = await run(BATON, "keys", "new", folder)
        assert status == 0, out
    async with baton_up("--keys", keys, "--transport", "tcp") as up:
        first = await up.complete("once upon a time " * 20)
        assert first == await up.complete("once upon a time " * 20)
        status, out = await run(BATON, "status", "--coordinator", up.coordinator, "--keys", keys)
        assert status == 0, out
        assert "decode-0" in out
        for strangers in ((), ("--keys", others)):
            status, out = await run(BATON, "status", "--coordinator", up.coordinator, *strangers)
            assert status == 1
            assert "refused: " in out and "keys" in out
        # Who is told may hear it before it is written down.
        await is_logged(up, "coordinator", "stranger refused")
        await is_logged(up, "decode-0", "blocks will come over", "transport=tcp")


async def is_logged(up: BatonUp, name: str, *words: str) -> None:
    log = up.log_dir / "latest" / f"{name}.log"
    async with asyncio.timeout(ENDS_WITHIN_S):
        while not all(word in log.read_text() for word in words):
            await passing(0.05)

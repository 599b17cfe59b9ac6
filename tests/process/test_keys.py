"""A whole cluster with keys: it answers, its blocks travel encrypted, and who has none is told so."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.process.cluster import BATON, BatonUp

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


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
        log = (up.log_dir / "latest" / "coordinator.log").read_text()
        assert "stranger refused" in log
        log = (up.log_dir / "latest" / "decode-0.log").read_text()
        assert "blocks will come over" in log and "transport=tcp" in log

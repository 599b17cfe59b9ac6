"""Preparing a model, in its own process as in service. No network: the models are folders."""

import asyncio
import fcntl
import json
from pathlib import Path

import psutil
import pytest

from common.config import ModelConfig
from common.errors import ConfigError
from common.model import fetch
from coordinator.launcher.prepare import prepare, served_name


def ignore(stage: str, done: int | None, total: int | None) -> None:
    """No bars here."""


async def test_a_model_folder_is_ready_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    (tmp_path / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    assert await prepare(ModelConfig(model=str(tmp_path)), ignore) == tmp_path


async def test_what_is_wrong_with_a_model_is_said_in_the_words_of_the_store(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model: .*nothing-here.* does not exist"):
        await prepare(ModelConfig(model=str(tmp_path / "nothing-here")), ignore)


async def test_cancelling_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))
    (tmp_path / "models").mkdir()
    waits = asyncio.Event()
    with (tmp_path / "models" / f"{fetch.DEMO_NAME}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as another process that prepares the demo: ours blocks
        work = asyncio.create_task(prepare(ModelConfig(model="demo"), lambda stage, done, total: waits.set()))
        await asyncio.wait_for(waits.wait(), 60)
        [child] = psutil.Process().children()
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
    assert not child.is_running()


def test_the_name_for_clients_is_the_models_own_unless_another_is_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    (tmp_path / "tiny.Q4_1.gguf").touch()
    names = {
        served_name(ModelConfig(model="demo")),
        served_name(ModelConfig(model=str(folder))),
        served_name(ModelConfig(model=str(tmp_path / "tiny.Q4_1.gguf"))),
        served_name(ModelConfig(model="org/model")),
        served_name(ModelConfig(model="org/model", served_name="mine")),
    }
    assert names == {"SmolLM2-135M-Instruct", "tiny-llama", "tiny.Q4_1", "org/model", "mine"}

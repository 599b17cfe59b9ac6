"""`make chaos`: a real cluster under real traffic, hurt at random, and every answer checked.

    python -m tests.chaos [--seconds 180] [--seed 1] [--every 4] [--model demo|tiny] [--clients 6]

Two prefill and two decode nodes, two coordinators and a gateway, each behind a proxy; every few seconds one of them
is killed, stopped for a while, restarted, or its links are cut or swallowed. A seed gives the same faults and the
same order of questions, not the same timing. Exit 0 only if every request ended exactly once and honestly, every
answer that finished equals the one given before anything was hurt, and the audit at the end is clean.
"""

import argparse
import asyncio
import random
import re
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import aiohttp
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from coordinator.cli.progress import Bars
from tests.chaos import report, traffic
from tests.chaos.cluster import ChaosCluster
from tests.chaos.faults import Fault, plan
from tests.chaos.traffic import Client, Outcome, Question, Text

_METRIC = re.compile(r"^(baton_\w*(?:failover|moved|attempt|prompts)\w*(?:\{[^}]*\})?) ([\d.e+]+)$", re.MULTILINE)
_WHOLE_WITHIN_S = 240.0
_EMPTY_WITHIN_S = 60.0
TINY_MODEL = Path(__file__).parents[1] / "process" / "tiny_model.py"


def main() -> int:
    parser = argparse.ArgumentParser(prog="chaos", description="A real cluster, hurt at random; every answer checked.")
    parser.add_argument("--seconds", type=float, default=180.0, help="how long it is hurt [default: 180]")
    parser.add_argument("--seed", type=int, default=1, help="of faults and traffic [default: 1]")
    parser.add_argument("--every", type=float, default=4.0, help="seconds between faults, on average [default: 4]")
    parser.add_argument("--rest", type=float, default=30.0, help="a process lives at least this long [default: 30]")
    parser.add_argument("--model", default="demo", help="folder, name, or `tiny`: 1 MB of chance [default: demo]")
    parser.add_argument(
        "--kv", default="96MiB", help="KV pool of a node; small ones evict and pre-empt [default: 96MiB]"
    )
    parser.add_argument("--clients", type=int, default=6, help="requests at once [default: 6]")
    parser.add_argument("--longest", type=int, default=300, help="words of the longest prompt [default: 300]")
    options = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory(prefix="baton-chaos-") as folder:
        logs = Path(folder) / "logs"
        logs.mkdir()
        if options.model == "tiny":
            options.model = str(Path(folder) / "tiny")
            subprocess.run([sys.executable, str(TINY_MODEL), options.model], check=True, capture_output=True)
            options.kv = "2MiB"
        tally = asyncio.run(Chaos(options, console, logs).run())
        failures = tally.failures()
        report.show(tally, console)
        if failures:
            kept = Path(tempfile.mkdtemp(prefix="baton-chaos-failed-"))
            for log in logs.iterdir():
                (kept / log.name).write_bytes(log.read_bytes())
            console.print(f"\nFAILED: {'; '.join(failures)}\nThe logs are in {kept}.", markup=False)
            return 1
    console.print("\nEvery request ended exactly once, every answer is the right one, nothing is left behind.")
    return 0


class Chaos:
    """One run."""

    def __init__(self, options: argparse.Namespace, console: Console, logs: Path) -> None:
        self._options = options
        self._console = console
        self._logs = logs
        self._tally = report.Tally()
        self._oracle: dict[str, Text] = {}
        self._started_s = time.monotonic()
        self._num_open = 0

    async def run(self) -> report.Tally:
        options, tally = self._options, self._tally
        questions = traffic.questions(options.seed, longest=options.longest)
        cluster = ChaosCluster(options.model, options.kv, prefill=2, decode=2, log_dir=self._logs, on_event=self._say)
        self._say("starting the cluster")
        async with cluster, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            client = Client(http, cluster.url, "chaos", cluster.gateway_was_away_since)
            await self._learn(client, questions)
            self._started_s = time.monotonic()
            self._say(f"hurting it for {options.seconds:g} s, seed {options.seed}")
            end_s = self._started_s + options.seconds
            asking = [
                asyncio.create_task(self._keep_asking(client, questions, number, until_s=end_s))
                for number in range(options.clients)
            ]
            with self._bar() as bar:
                hurting = asyncio.create_task(self._hurt(cluster, end_s=end_s))
                await self._watch(bar, [hurting, *asking], end_s=end_s)
            await asyncio.gather(hurting, *asking)
            await self._settle(cluster, client, questions)
        tally.remains = cluster.remains()
        tally.crashes = cluster.crashes
        return tally

    # --- before, during, after ----------------------------------------------------------------------------

    async def _learn(self, client: Client, questions: list[Question]) -> None:
        left = list(reversed(questions))

        async def learn() -> None:
            while left:
                question = left.pop()
                ended = await client.ask(question, stream=False)
                if ended.answer is None:
                    raise SystemExit(f"the unhurt cluster does not answer {question.name}: {ended}")
                self._oracle[question.name] = ended.answer
                bars.report("asking each question once, unhurt", len(self._oracle), len(questions))

        with Bars(self._console) as bars:
            bars.report("asking each question once, unhurt", 0, len(questions))
            await asyncio.gather(*[learn() for _ in range(self._options.clients)])

    async def _keep_asking(self, client: Client, questions: list[Question], number: int, *, until_s: float) -> None:
        chance = random.Random(f"{self._options.seed}/{number}")
        while time.monotonic() < until_s:
            question = chance.choice(questions)
            stream, leave_after = chance.random() < 0.7, None
            if chance.random() < 0.15:
                stream, leave_after = True, chance.choice([0, 1, 3, 10])
            self._num_open += 1
            ended = await client.ask(question, stream=stream, leave_after=leave_after)
            self._num_open -= 1
            judged = traffic.judged(ended, question, self._oracle[question.name])
            self._tally.count(judged)
            if judged.outcome in traffic.FAILURES:
                self._say(f"{judged.outcome}: {judged.detail}")
            if judged.outcome in (Outcome.REFUSED, Outcome.CUT):
                await asyncio.sleep(0.5)  # as a client that was told to come again

    async def _hurt(self, cluster: ChaosCluster, *, end_s: float) -> None:
        options = self._options
        faults = plan(options.seed, options.seconds, cluster.targets, every_s=options.every, rest_s=options.rest)
        lasting: set[asyncio.Task[None]] = set()
        for fault in faults:
            await asyncio.sleep(max(0.0, self._started_s + fault.at_s - time.monotonic()))
            task = asyncio.create_task(self._hurt_once(cluster, fault))
            lasting.add(task)
            task.add_done_callback(lasting.discard)
        while lasting:
            await asyncio.wait(lasting)

    async def _hurt_once(self, cluster: ChaosCluster, fault: Fault) -> None:
        self._say(str(fault))
        if await cluster.hurt(fault):
            self._tally.hurt(fault)

    async def _settle(self, cluster: ChaosCluster, client: Client, questions: list[Question]) -> None:
        self._say("waiting for the cluster to be whole again")
        try:
            await cluster.whole(within_s=_WHOLE_WITHIN_S)
        except TimeoutError:
            self._tally.broke = f"the cluster is not whole {_WHOLE_WITHIN_S:g} s after the last fault"
        for question in questions[:6]:
            ended = await client.ask(question, stream=True)
            judged = traffic.judged(ended, question, self._oracle[question.name])
            self._tally.count(judged)
            if judged.outcome is not Outcome.EQUAL:
                self._tally.broke = f"healed, and {question.name} {judged.outcome}: {judged.detail}"
        with suppress(aiohttp.ClientError):
            async with client.http.get(f"{cluster.url}/metrics") as answer:
                found = _METRIC.findall(await answer.text())
                self._tally.gateway_metrics = {name: float(value) for name, value in found}
        self._tally.audit = await cluster.audit(within_s=_EMPTY_WITHIN_S)

    # --- what is shown -------------------------------------------------------------------------------------

    def _say(self, words: str) -> None:
        self._console.print(f"{time.monotonic() - self._started_s:7.1f} s  {words}", markup=False, highlight=False)

    def _bar(self) -> Progress:
        return Progress(
            TextColumn("  {task.description:<60}"),
            BarColumn(bar_width=30),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )

    async def _watch(self, bar: Progress, tasks: "list[asyncio.Task[None]]", *, end_s: float) -> None:
        task = bar.add_task("", total=self._options.seconds)
        pending = set(tasks)
        while pending:
            _, pending = await asyncio.wait(pending, timeout=0.5)
            counts = self._tally.outcomes
            words = f"{counts[Outcome.EQUAL]} equal, {counts.total()} ended, {self._num_open} open"
            done = self._options.seconds - max(0.0, end_s - time.monotonic())
            bar.update(task, completed=done, description=words)


if __name__ == "__main__":
    sys.exit(main())

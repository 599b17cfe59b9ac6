"""What a chaos run counted, and whether that is good enough."""

from collections import Counter
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from tests.chaos.faults import Fault, Kind
from tests.chaos.traffic import FAILURES, Ended, Outcome

_SHOWN = 5


@dataclass(slots=True)
class Tally:
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    details: dict[Outcome, list[str]] = field(default_factory=dict)
    faults: Counter[Kind] = field(default_factory=Counter)
    gateway_metrics: dict[str, float] = field(default_factory=dict)
    num_tokens: int = 0
    audit: tuple[int, str] | None = None
    remains: list[str] | None = None
    broke: str = ""
    crashes: list[str] = field(default_factory=list)

    def count(self, ended: Ended) -> None:
        self.outcomes[ended.outcome] += 1
        if ended.answer is not None:
            self.num_tokens += ended.answer.num_tokens
        if ended.detail:
            self.details.setdefault(ended.outcome, []).append(ended.detail)

    def hurt(self, fault: Fault) -> None:
        self.faults[fault.kind] += 1

    def failures(self) -> list[str]:
        """Why the run is no success; empty if it is one."""
        found = [f"{self.outcomes[kind]} requests: {kind}" for kind in FAILURES if self.outcomes[kind]]
        if not self.outcomes[Outcome.EQUAL]:
            found.append("no request finished")
        if not self.faults:
            found.append("nothing was hurt")
        if self.broke:
            found.append(self.broke)
        found += self.crashes
        if self.audit is None or self.audit[0] != 0:
            found.append("the audit is not clean" if self.audit else "there was no audit")
        if self.remains is None or self.remains:
            found.append(f"left on this machine: {self.remains}")
        return found


def show(tally: Tally, console: Console) -> None:
    table = Table(title="Chaos", title_justify="left", show_header=False)
    for outcome in Outcome:
        table.add_row(str(outcome), str(tally.outcomes[outcome]))
    table.add_row("requests", str(tally.outcomes.total()), style="bold")
    table.add_row("tokens in finished answers", str(tally.num_tokens))
    for kind in Kind:
        table.add_row(str(kind), str(tally.faults[kind]))
    for name, value in tally.gateway_metrics.items():
        table.add_row(name, f"{value:g}")
    console.print(table)
    for outcome, details in tally.details.items():
        for detail, number in Counter(details).most_common(_SHOWN):
            console.print(f"  {outcome}, {number}x: {detail[:500]}", markup=False, highlight=False)
    if tally.audit is not None:
        console.print(tally.audit[1], markup=False, highlight=False, soft_wrap=True)

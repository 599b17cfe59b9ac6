"""What an audit brought, for people and for programs. Pure."""

from typing import Any

import msgspec

from common.messages import Holdings
from coordinator.auditor import Report
from coordinator.cli.table import BOLD, columns, paint
from coordinator.core.audit import Finding, num_working_calls

_RED, _GREEN = "\x1b[31m", "\x1b[32m"


def as_document(report: Report) -> dict[str, Any]:
    return {
        "clean": not report.findings,
        "processes": [_whole(holdings) for holdings in report.look.holdings],
        "silent": [
            {"node": silent.member.node, "address": silent.member.address, "why": silent.why}
            for silent in report.look.silent
        ],
        "findings": [
            {
                "process": finding.process,
                "incarnation": finding.incarnation,
                "thing": finding.thing,
                "count": finding.count,
                "owner": finding.owner,
                "wrong": finding.wrong,
                "age_s": finding.age_s,
            }
            for finding in report.findings
        ],
    }


def as_text(report: Report, *, colours: bool) -> str:
    """A table of what each process holds, standing calls left out, and one of what is amiss."""
    heads = ("PROCESS", "KIND", "REQUESTS", "CALLS IN", "OUT", "SEQUENCES", "BLOCKS", "GRANTS", "SERVING", "READING")
    heading, *body = columns([heads, *(_row(holdings) for holdings in report.look.holdings)], right_from=2)
    lines = [paint(heading, BOLD, colours), *body]
    lines += [f"{silent.member.node}  {silent.why}" for silent in report.look.silent]
    lines.append("")
    if not report.findings:
        return "\n".join([*lines, paint("Clean: everything that is held has a live owner.", _GREEN, colours)])
    heading, *body = columns(
        [("PROCESS", "HOLDS", "OF", "AGE", "BUT"), *(_finding_row(finding) for finding in report.findings)],
        right_from=5,
    )
    one = len(report.findings) == 1
    title = f"{len(report.findings)} {'thing has' if one else 'things have'} no live owner:"
    return "\n".join([*lines, paint(title, _RED, colours), paint(heading, BOLD, colours), *body])


def _whole(held: Any) -> Any:
    """With its empty lists and zeros, which messages leave out."""
    if isinstance(held, msgspec.Struct):
        return {name: _whole(getattr(held, name)) for name in held.__struct_fields__}
    return [_whole(one) for one in held] if isinstance(held, tuple) else held


def _row(held: Holdings) -> tuple[str, ...]:
    return (
        held.node,
        held.kind,
        str(len(held.requests)),
        str(num_working_calls(held.incoming)),
        str(num_working_calls(held.outgoing)),
        str(len(held.sequences)),
        f"{held.used_blocks}/{held.num_blocks}"
        + (f" (+{held.host_blocks} in host memory)" if held.host_blocks else ""),
        str(len(held.grants)),
        str(len(held.serving)),
        str(len(held.reading)),
    )


def _finding_row(finding: Finding) -> tuple[str, ...]:
    age = "" if finding.age_s is None else f"{finding.age_s:.1f} s"
    thing = finding.thing if finding.count == 1 else f"{finding.count} {finding.thing}"
    return finding.process, thing, finding.owner, age, finding.wrong

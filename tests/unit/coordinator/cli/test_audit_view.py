import msgspec

from common.messages import HeldCall, HeldConnection, HeldSequence, Holdings, Incarnation, NodeId, RequestId
from coordinator.auditor import Report
from coordinator.cli.audit_view import as_document, as_text
from coordinator.core.audit import Finding, Look, Member, Silent

DECODE, PREFILL, GATEWAY = (Incarnation(letter * 32) for letter in "dea")
REQUEST = RequestId("1" * 32)

HOLDINGS = (
    Holdings("gateway", NodeId("gateway-1"), GATEWAY, requests=(REQUEST,)),
    Holdings(
        "decode",
        NodeId("decode-0"),
        DECODE,
        incoming=(HeldCall("Generate", GATEWAY, REQUEST, 1, 2.5),),
        outgoing=(HeldCall("Register", Incarnation("c" * 32)),),
        sequences=(HeldSequence("4", "running", REQUEST, 3),),
        num_blocks=100,
        used_blocks=5,
        owned_blocks=3,
        reading=(HeldConnection("shm", PREFILL),),
    ),
)
FINDINGS = (
    Finding(DECODE, "decode-0", "Generate call from gateway-1", "request 11111111", "gateway-1 does not list it", 2.5),
    Finding(DECODE, "decode-0", "blocks", "", "in use, and in no block table", count=2),
)
SILENT = Silent(Member("prefill", "prefill-0", PREFILL, "tcp://there"), "no answer within 2 s")


def test_a_clean_cluster_shows_what_each_process_holds() -> None:
    assert as_text(Report(Look(0.0, 0.1, HOLDINGS)), colours=False).splitlines() == [
        "PROCESS    KIND     REQUESTS  CALLS IN  OUT  SEQUENCES  BLOCKS  GRANTS  SERVING  READING",
        "gateway-1  gateway         1         0    0          0     0/0       0        0        0",
        "decode-0   decode          0         1    0          1   5/100       0        0        1",
        "",
        "Clean: everything that is held has a live owner.",
    ]


def test_findings_and_silent_processes_follow_the_table() -> None:
    text = as_text(Report(Look(0.0, 0.1, HOLDINGS, (SILENT,)), FINDINGS), colours=False)
    assert text.splitlines()[3:] == [
        "prefill-0  no answer within 2 s",
        "",
        "2 things have no live owner:",
        "PROCESS   HOLDS                         OF                AGE    BUT",
        "decode-0  Generate call from gateway-1  request 11111111  2.5 s  gateway-1 does not list it",
        "decode-0  2 blocks                                               in use, and in no block table",
    ]


def test_colours_add_nothing_but_colours() -> None:
    for report in (Report(Look(0.0, 0.1, HOLDINGS)), Report(Look(0.0, 0.1, HOLDINGS), FINDINGS)):
        coloured = as_text(report, colours=True)
        assert "\x1b[1m" in coloured
        for code in ("\x1b[1m", "\x1b[31m", "\x1b[32m", "\x1b[0m"):
            coloured = coloured.replace(code, "")
        assert coloured == as_text(report, colours=False)


def test_the_document_holds_all_of_it() -> None:
    document = as_document(Report(Look(0.0, 0.1, HOLDINGS, (SILENT,)), FINDINGS))
    assert document["clean"] is False
    assert [msgspec.convert({"type": "Holdings", **one}, Holdings) for one in document["processes"]] == list(HOLDINGS)
    assert document["processes"][0]["incoming"] == [], "what is empty is there too"
    assert document["silent"] == [{"node": "prefill-0", "address": "tcp://there", "why": "no answer within 2 s"}]
    assert [(one["thing"], one["count"], one["age_s"]) for one in document["findings"]] == [
        ("Generate call from gateway-1", 1, 2.5),
        ("blocks", 2, None),
    ]

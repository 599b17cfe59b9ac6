from typing import Any

from common.messages import NodeLoad, NodeState, NodeView, View
from coordinator.cli.cluster_view import as_document, as_text
from tests.unit.coordinator.core.cards import make_card, offers


def node(name: str, state: NodeState = NodeState.READY, reason: str = "", **fields: Any) -> NodeView:
    load = NodeLoad(num_running=2, num_waiting=1, free_blocks=60, tokens_per_s=12.34)
    return NodeView(make_card(name, **fields), state, reason, load)


def test_nodes_and_pairs_as_text() -> None:
    view = View(
        (
            node("decode-0", pid=17),
            node("decode-1", NodeState.STALLED, "no report for over 3 s"),
            node("prefill-0", offers=offers("tcp")),
        )
    )
    assert as_text(view, colours=False).splitlines() == [
        "NODE       ROLE     STATE    MODEL  RUNNING  WAITING  FREE BLOCKS  TOKENS/S  PID",
        "decode-0   decode   ready    tiny         2        1       60/100      12.3   17",
        "decode-1   decode   stalled  tiny         2        1       60/100      12.3",
        "  no report for over 3 s",
        "prefill-0  prefill  ready    tiny         2        1       60/100      12.3",
        "",
        "1 of 2 pairs work together",
        "  prefill-0 -> decode-0  over tcp",
        "  prefill-0 -> decode-1  decode-1 is stalled",
    ]


def test_colours_add_nothing_but_colours() -> None:
    view = View((node("ready", NodeState.INCOMPATIBLE, "does not fit", role=make_card("decode-0").role),))
    coloured = as_text(view, colours=True)
    for code in ("\x1b[1m", "\x1b[2m", "\x1b[31m", "\x1b[0m"):
        assert code in coloured
        coloured = coloured.replace(code, "")
    assert coloured == as_text(view, colours=False)


def test_an_empty_cluster_in_words() -> None:
    assert as_text(View(), colours=False) == "No node has registered yet."


def test_what_is_missing_in_words() -> None:
    assert as_text(View((node("decode-0"),)), colours=False).endswith(
        "No prefill node: decode nodes compute prompts themselves."
    )
    assert as_text(View((node("prefill-0"),)), colours=False).endswith("No decode node: nothing can be served.")
    strangers = View((node("decode-0"), node("prefill-0", model="other")))
    assert as_text(strangers, colours=False).endswith("No pairs: prefill and decode nodes serve different models.")


def test_of_many_pairs_only_those_that_do_not_work_are_listed() -> None:
    view = View(
        (
            *(node(f"decode-{n}") for n in range(5)),
            *(node(f"prefill-{n}") for n in range(3)),
            node("prefill-9", offers=offers("ucx")),
        )
    )
    lines = as_text(view, colours=False).splitlines()
    start = lines.index("15 of 20 pairs work together")
    assert [line.split()[0] for line in lines[start + 1 :]] == ["prefill-9"] * 5


def test_a_view_as_a_document_has_every_value_defaults_included() -> None:
    document = as_document(View((node("decode-0"), node("prefill-0", offers=offers("tcp")))))
    decode = document["nodes"][0]
    assert (decode["node"], decode["role"], decode["state"], decode["reason"]) == ("decode-0", "decode", "ready", "")
    assert decode["load"]["num_running"] == 2
    assert decode["load"]["leased_blocks"] == 0
    assert document["pairs"] == [
        {"prefill": "prefill-0", "decode": "decode-0", "works": True, "transports": ("tcp",), "reason": ""}
    ]

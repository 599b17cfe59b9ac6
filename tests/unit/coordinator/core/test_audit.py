"""What belongs to nobody is found, in plain lists of what processes hold."""

from dataclasses import replace

import msgspec
import pytest

from common.messages import HeldCall, HeldConnection, HeldSequence, Holdings, Incarnation, NodeId, RequestId
from coordinator.core.audit import Finding, Look, Member, Silent, cross_check, persisting

COORDINATOR, GATEWAY, PREFILL, DECODE = (Incarnation(name) for name in ("c" * 32, "a" * 32, "e" * 32, "d" * 32))
REQUEST, OTHER = RequestId("1" * 32), RequestId("2" * 32)
STRANGER = Incarnation("f" * 32)


def call(method: str, peer: Incarnation, request: RequestId | None = None, *, age_s: float = 5.0) -> HeldCall:
    return HeldCall(method, peer, request, 1 if request else 0, age_s)


def cluster() -> dict[Incarnation, Holdings]:
    """A request in the middle of its transfer: everything that can be held is."""
    return {
        COORDINATOR: Holdings(
            "coordinator",
            NodeId("coordinator"),
            COORDINATOR,
            incoming=(call("Watch", GATEWAY), call("Register", PREFILL), call("Register", DECODE)),
        ),
        GATEWAY: Holdings(
            "gateway",
            NodeId("gateway"),
            GATEWAY,
            outgoing=(call("Watch", COORDINATOR), call("Generate", DECODE, REQUEST)),
            requests=(REQUEST,),
        ),
        PREFILL: Holdings(
            "prefill",
            NodeId("prefill-0"),
            PREFILL,
            incoming=(call("Prefill", DECODE, REQUEST),),
            outgoing=(call("Register", COORDINATOR),),
            sequences=(HeldSequence("0", "lease", REQUEST, 3),),
            num_blocks=10,
            used_blocks=3,
            owned_blocks=3,
            serving=(HeldConnection("shm", DECODE),),
            grants=(REQUEST,),
        ),
        DECODE: Holdings(
            "decode",
            NodeId("decode-0"),
            DECODE,
            incoming=(call("Generate", GATEWAY, REQUEST),),
            outgoing=(call("Register", COORDINATOR), call("Prefill", PREFILL, REQUEST)),
            sequences=(HeldSequence("0", "lease", REQUEST, 3),),
            num_blocks=10,
            used_blocks=3,
            owned_blocks=3,
            reading=(HeldConnection("shm", PREFILL, 1),),
        ),
    }


def look_at(processes: dict[Incarnation, Holdings], *silent: Silent, at_s: float = 0.0) -> Look:
    return Look(at_s, at_s + 0.1, tuple(processes.values()), silent)


def without(processes: dict[Incarnation, Holdings], at: Incarnation, what: str, *names: str) -> None:
    """Strike calls of these methods, or without any named everything, from a list of what a process holds."""
    held = getattr(processes[at], what)
    kept = tuple(one for one in held if names and one.method not in names)
    processes[at] = msgspec.structs.replace(processes[at], **{what: kept})


def also(processes: dict[Incarnation, Holdings], at: Incarnation, what: str, one: object) -> None:
    held = getattr(processes[at], what)
    processes[at] = msgspec.structs.replace(processes[at], **{what: (*held, one)})


def set_to(processes: dict[Incarnation, Holdings], at: Incarnation, **fields: object) -> None:
    processes[at] = msgspec.structs.replace(processes[at], **fields)


def words(finding: Finding) -> str:
    return f"{finding.process}: {finding.thing} {finding.wrong}"


def test_a_cluster_in_which_everything_has_its_owner_is_clean() -> None:
    assert cross_check(look_at(cluster())) == []


def a_sequence_left_in_an_engine(held: dict[Incarnation, Holdings]) -> list[str]:
    also(held, DECODE, "sequences", HeldSequence("7", "running", None, 2))
    set_to(held, DECODE, used_blocks=5, owned_blocks=5)
    return ["decode-0: running 7 belongs to no call"]


def a_lease_whose_call_has_ended(held: dict[Incarnation, Holdings]) -> list[str]:
    also(held, PREFILL, "sequences", HeldSequence("7", "lease", OTHER, 2))
    return ["prefill-0: lease 7 its call has ended"]


def a_reference_too_many(held: dict[Incarnation, Holdings]) -> list[str]:
    set_to(held, PREFILL, used_blocks=5)
    return ["prefill-0: blocks in use, and in no block table"]


def a_reference_too_few(held: dict[Incarnation, Holdings]) -> list[str]:
    set_to(held, PREFILL, used_blocks=2)
    return ["prefill-0: blocks in a block table, and free"]


def a_prefill_call_whose_caller_is_gone(held: dict[Incarnation, Holdings]) -> list[str]:
    also(held, PREFILL, "incoming", call("Prefill", STRANGER, OTHER))
    return ["prefill-0: Prefill call from process ffffffff its caller is no process of this cluster"]


def a_prefill_call_that_only_its_callee_knows(held: dict[Incarnation, Holdings]) -> list[str]:
    without(held, DECODE, "outgoing", "Prefill")
    return ["prefill-0: Prefill call from decode-0 decode-0 does not list it"]


def a_prefill_call_that_only_its_caller_knows(held: dict[Incarnation, Holdings]) -> list[str]:
    also(held, DECODE, "incoming", call("Generate", GATEWAY, OTHER))
    also(held, GATEWAY, "outgoing", call("Generate", DECODE, OTHER))
    set_to(held, GATEWAY, requests=(REQUEST, OTHER))
    also(held, DECODE, "outgoing", call("Prefill", PREFILL, OTHER))
    return ["decode-0: Prefill call to prefill-0 prefill-0 does not list it"]


def a_prefill_call_without_a_generate(held: dict[Incarnation, Holdings]) -> list[str]:
    also(held, DECODE, "outgoing", call("Prefill", PREFILL, OTHER))
    also(held, PREFILL, "incoming", call("Prefill", DECODE, OTHER))
    return ["decode-0: Prefill call to prefill-0 decode-0 has no Generate call for it"]


def a_generate_without_a_request(held: dict[Incarnation, Holdings]) -> list[str]:
    set_to(held, GATEWAY, requests=())
    return ["gateway: Generate call to decode-0 the gateway serves no such request"]


def another_attempt_than_the_caller_means(held: dict[Incarnation, Holdings]) -> list[str]:
    without(held, DECODE, "incoming")
    also(held, DECODE, "incoming", HeldCall("Generate", GATEWAY, REQUEST, 2, 5.0))
    return [
        "gateway: Generate call to decode-0 decode-0 does not list it",
        "decode-0: Generate call from gateway gateway does not list it",
    ]


def a_generate_of_a_stranger(held: dict[Incarnation, Holdings]) -> list[str]:
    also(held, DECODE, "incoming", call("Generate", STRANGER, OTHER))
    return ["decode-0: Generate call from process ffffffff its caller is no process of this cluster"]


def a_node_that_the_coordinator_forgot(held: dict[Incarnation, Holdings]) -> list[str]:
    set_to(held, COORDINATOR, incoming=(call("Watch", GATEWAY), call("Register", DECODE)))
    return ["prefill-0: Register call to coordinator coordinator does not list it"]


def a_call_that_nobody_answers(held: dict[Incarnation, Holdings]) -> list[str]:
    also(held, DECODE, "outgoing", call("Register", Incarnation("")))
    return ["decode-0: Register call to nobody yet nobody has answered it"]


def a_reader_of_a_dead_owner(held: dict[Incarnation, Holdings]) -> list[str]:
    also(held, DECODE, "reading", HeldConnection("shm", STRANGER))
    return ["decode-0: shm reader of process ffffffff its owner is no process of this cluster"]


def a_connection_whose_reader_died(held: dict[Incarnation, Holdings]) -> list[str]:
    also(held, PREFILL, "serving", HeldConnection("tcp", STRANGER))
    return ["prefill-0: tcp connection of process ffffffff its reader is no process of this cluster"]


def a_reader_whose_owner_hung_up(held: dict[Incarnation, Holdings]) -> list[str]:
    without(held, PREFILL, "serving")
    return ["decode-0: shm reader of prefill-0 prefill-0 does not list it"]


def a_connection_that_its_reader_has_left(held: dict[Incarnation, Holdings]) -> list[str]:
    also(held, PREFILL, "serving", HeldConnection("shm", DECODE))
    return ["prefill-0: shm connection of decode-0 decode-0 does not list it"]


def a_grant_that_outlived_its_call(held: dict[Incarnation, Holdings]) -> list[str]:
    set_to(held, PREFILL, grants=(REQUEST, OTHER))
    return ["prefill-0: grant to read blocks its call has ended"]


PLANTED = [
    a_sequence_left_in_an_engine,
    a_lease_whose_call_has_ended,
    a_reference_too_many,
    a_reference_too_few,
    a_prefill_call_whose_caller_is_gone,
    a_prefill_call_that_only_its_callee_knows,
    a_prefill_call_that_only_its_caller_knows,
    a_prefill_call_without_a_generate,
    a_generate_without_a_request,
    another_attempt_than_the_caller_means,
    a_generate_of_a_stranger,
    a_node_that_the_coordinator_forgot,
    a_call_that_nobody_answers,
    a_reader_of_a_dead_owner,
    a_connection_whose_reader_died,
    a_reader_whose_owner_hung_up,
    a_connection_that_its_reader_has_left,
    a_grant_that_outlived_its_call,
]


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__.replace("_", " "))
def test_what_belongs_to_nobody_is_found_and_nothing_else(plant) -> None:  # type: ignore[no-untyped-def]
    held = cluster()
    expected = plant(held)
    first, second = cross_check(look_at(held)), cross_check(look_at(held, at_s=1.0))
    assert [words(finding) for finding in first] == expected
    assert persisting(first, second, apart_s=1.0) == second, "it is there in both looks"


def test_whoever_is_known_is_believed() -> None:
    held = cluster()
    also(held, DECODE, "incoming", call("Generate", STRANGER, OTHER))
    assert cross_check(look_at(held), known=frozenset({STRANGER})) == []


@pytest.mark.parametrize("method", ["Watch", "Drain"])
def test_anybody_may_watch_and_drain(method: str) -> None:
    held = cluster()
    also(held, COORDINATOR, "incoming", call(method, STRANGER))
    assert cross_check(look_at(held)) == []
    also(held, COORDINATOR, "incoming", call(method, DECODE))
    assert [words(found) for found in cross_check(look_at(held))] == [
        f"coordinator: {method} call from decode-0 decode-0 does not list it"
    ]


def test_a_silent_process_is_one_finding_and_nothing_is_held_against_its_peers() -> None:
    held = cluster()
    del held[DECODE]
    member = Member("decode", "decode-0", DECODE, "tcp://decode-0")
    [finding] = cross_check(look_at(held, Silent(member, "no answer within 2 s")))
    assert words(finding) == "decode-0: process does not answer: no answer within 2 s"


def test_nothing_is_known_of_calls_to_a_coordinator_that_is_silent() -> None:
    held = cluster()
    del held[COORDINATOR]
    member = Member("coordinator", "coordinator", Incarnation(""), "tcp://coordinator")
    assert [found.thing for found in cross_check(look_at(held, Silent(member, "away")))] == ["process"]


def test_what_is_there_in_one_look_only_is_on_its_way() -> None:
    held = cluster()
    also(held, GATEWAY, "outgoing", call("Route", COORDINATOR, age_s=0.01))
    first = cross_check(look_at(held))
    assert [found.thing for found in first] == ["Route call to coordinator"]
    assert persisting(first, cross_check(look_at(cluster())), apart_s=1.0) == []
    assert persisting([], first, apart_s=1.0) == []


def test_a_younger_call_of_the_same_name_is_another_one() -> None:
    held = cluster()
    also(held, GATEWAY, "outgoing", call("Route", COORDINATOR, age_s=0.01))
    also(held, GATEWAY, "outgoing", call("Route", COORDINATOR, age_s=3.0))
    also(held, COORDINATOR, "incoming", call("Route", GATEWAY, age_s=0.02))
    [leaked] = cross_check(look_at(held))
    assert leaked.age_s == 3.0, "calls of one name are told apart by their age"
    assert persisting([leaked], [leaked], apart_s=1.0) == [leaked]
    assert persisting([leaked], [replace(leaked, age_s=0.5)], apart_s=1.0) == []


def test_an_idle_cluster_holds_nothing_but_standing_calls_and_idle_connections() -> None:
    held = cluster()
    found = cross_check(look_at(held), idle=True)
    assert [(one.process, one.thing, one.count) for one in found] == [
        ("gateway", "Generate calls out", 1),
        ("gateway", "requests", 1),
        ("prefill-0", "Prefill calls in", 1),
        ("prefill-0", "lease sequences", 1),
        ("prefill-0", "blocks in use", 3),
        ("prefill-0", "grants to read blocks", 1),
        ("decode-0", "Generate calls in", 1),
        ("decode-0", "Prefill calls out", 1),
        ("decode-0", "lease sequences", 1),
        ("decode-0", "blocks in use", 3),
        ("decode-0", "reads of blocks", 1),
    ]
    without(held, GATEWAY, "outgoing", "Generate")
    without(held, DECODE, "outgoing", "Prefill")
    for at in (PREFILL, DECODE):
        set_to(held, at, incoming=(), sequences=(), used_blocks=0, owned_blocks=0, grants=())
    set_to(held, DECODE, reading=(HeldConnection("shm", PREFILL),))
    assert [words(one) for one in cross_check(look_at(held), idle=True)] == [
        "gateway: requests held in a cluster that should be idle"
    ], "a request that never ends"
    set_to(held, GATEWAY, requests=())
    assert cross_check(look_at(held), idle=True) == []

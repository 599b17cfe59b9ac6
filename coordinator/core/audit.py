"""Does everything that is held belong to something that lives? Pure.

Every process lists what it holds (`Holdings`). Nothing of it stands alone:

    request ── Generate ──> decode node ── Prefill, Handover ──> owner of the blocks
    (gateway)                 sequences ── data connection ────>   sequences, grants

1. Both ends of a call list it. Whoever watches or drains is asked nothing: those calls come from anybody.
2. A gateway's Generate belongs to one of its live requests, a Prefill or Handover to a Generate for the same request
   at the node that opened it.
3. A sequence in an engine belongs to an open call of its node, and so does a grant to read blocks.
4. As many blocks are in use as lie in the block tables of sequences.
5. Both ends of a data connection list it. That it is idle is no fault: readers close it after a while.
6. Who should answer and does not is a finding; what hangs on its word is not held against anybody else. Whoever is
   `known` is believed.
7. Processes are not asked at the same moment. So a finding counts if it was there in two looks running: the same
   thing, and if it has an age, one that was there at the first (`persisting`).
8. With `idle` nothing may be held at all, standing calls (Register, Watch) and idle connections apart.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from common.messages import HeldCall, HeldConnection, Holdings, Incarnation, RequestId, Role

STANDING = frozenset({"Register", "Watch"})
"""Held open for a process's life; not for any request."""
_FROM_ANYBODY = frozenset({"Watch", "Drain"})
_FOR_A_REQUEST = frozenset({"Generate", "Prefill", "Handover"})
_FOR_BLOCKS = frozenset({"Prefill", "Handover"})

COORDINATOR, GATEWAY = "coordinator", "gateway"


@dataclass(frozen=True, slots=True)
class Member:
    """A process that should answer. A coordinator's incarnation is only known once it does."""

    kind: str
    node: str
    incarnation: Incarnation
    address: str


@dataclass(frozen=True, slots=True)
class Silent:
    """A member that did not."""

    member: Member
    why: str


@dataclass(frozen=True, slots=True)
class Look:
    """What one round of questions brought, asked between `started_s` and `ended_s`."""

    started_s: float
    ended_s: float
    holdings: tuple[Holdings, ...]
    silent: tuple[Silent, ...] = ()


@dataclass(frozen=True, slots=True)
class Finding:
    """A held thing that nobody alive owns, or `count` equal ones. `age_s` None where nobody knows how old it is."""

    incarnation: Incarnation
    process: str
    thing: str
    owner: str
    wrong: str
    age_s: float | None = None
    count: int = 1

    @property
    def key(self) -> tuple[str, ...]:
        """Equal for the same thing in two looks."""
        return self.incarnation, self.process, self.thing, self.owner, self.wrong


def persisting(earlier: Sequence[Finding], later: Sequence[Finding], *, apart_s: float) -> list[Finding]:
    """Findings of the later look that count (rule 7). `apart_s` lies between the end of one look and the next."""
    before = Counter(finding.key for finding in earlier)
    found = []
    for finding in later:
        if before[finding.key] and (finding.age_s is None or finding.age_s >= apart_s):
            before[finding.key] -= 1
            found.append(finding)
    return found


def cross_check(look: Look, *, known: frozenset[Incarnation] = frozenset(), idle: bool = False) -> list[Finding]:
    """Everything in a look that has no live owner; by process, in the order of the look."""
    audit = _Audit(look, known)
    found = [*audit.silences(), *audit.calls(), *audit.connections()]
    for holdings in look.holdings:
        found += audit.requests(holdings)
        found += audit.sequences(holdings)
        if idle:
            found += audit.idleness(holdings)
    order = {incarnation: number for number, incarnation in enumerate(audit.names)}
    return sorted(found, key=lambda finding: order[finding.incarnation])


_CallKey = tuple[Incarnation, Incarnation, str, RequestId | None, int]
"""Caller, callee, method, request, attempt."""


class _Audit:
    def __init__(self, look: Look, known: frozenset[Incarnation]) -> None:
        self._look = look
        self._holdings = {one.incarnation: one for one in look.holdings}
        silent = [one.member for one in look.silent]
        self._believed = known | {member.incarnation for member in silent if member.incarnation}
        # Who it is that a silent coordinator's calls would be with, nobody can tell.
        self._lacks_a_coordinator = any(member.kind == COORDINATOR for member in silent)
        self.names: dict[Incarnation, str] = {
            **{one.incarnation: one.node for one in look.holdings},
            **{member.incarnation: member.node for member in silent},
        }

    def _name(self, incarnation: Incarnation) -> str:
        return self.names.get(incarnation) or (f"process {incarnation[:8]}" if incarnation else "nobody yet")

    def _finding(
        self,
        at: Incarnation,
        thing: str,
        owner: str,
        wrong: str,
        *,
        age_s: float | None = None,
        count: int = 1,
    ) -> Finding:
        return Finding(at, self.names[at], thing, owner, wrong, age_s, count)

    # --- rule 6 --------------------------------------------------------------------------------------------

    def silences(self) -> Iterator[Finding]:
        for silent in self._look.silent:
            member = silent.member
            yield Finding(member.incarnation, member.node, "process", member.address, f"does not answer: {silent.why}")

    def _missing(self, other: Incarnation, what: str) -> str | None:
        """What is wrong with a thing that the other end does not list; None if it cannot be told, or need not."""
        if other in self._holdings:
            return f"{self._name(other)} does not list it"
        return None if other in self._believed else f"its {what} is no process of this cluster"

    # --- rule 1 --------------------------------------------------------------------------------------------

    def calls(self) -> Iterator[Finding]:
        ends: dict[_CallKey, tuple[list[float], list[float]]] = {}
        for here in self._look.holdings:
            for call in here.outgoing:
                ends.setdefault(_key(here.incarnation, call.peer, call), ([], []))[0].append(call.age_s)
            for call in here.incoming:
                ends.setdefault(_key(call.peer, here.incarnation, call), ([], []))[1].append(call.age_s)
        for key, (opened, served) in ends.items():
            caller, callee, method, request, _ = key
            for age_s in _unmatched(opened, served):
                if wrong := self._callee_missing(callee, method):
                    thing, owner = f"{method} call to {self._name(callee)}", _of(request)
                    yield self._finding(caller, thing, owner, wrong, age_s=age_s)
            for age_s in _unmatched(served, opened):
                if wrong := self._caller_missing(caller, method):
                    thing, owner = f"{method} call from {self._name(caller)}", _of(request)
                    yield self._finding(callee, thing, owner, wrong, age_s=age_s)

    def _callee_missing(self, callee: Incarnation, method: str) -> str | None:
        if callee not in self._holdings and method in (*STANDING, "Route") and self._lacks_a_coordinator:
            return None
        return self._missing(callee, "callee") if callee else "nobody has answered it"

    def _caller_missing(self, caller: Incarnation, method: str) -> str | None:
        if caller not in self._holdings and method in _FROM_ANYBODY:
            return None
        return self._missing(caller, "caller")

    # --- rules 2 and 3 -------------------------------------------------------------------------------------

    def requests(self, here: Holdings) -> Iterator[Finding]:
        generates = {call.request for call in here.incoming if call.method == "Generate"}
        for call in here.outgoing:
            if here.kind == GATEWAY and call.method == "Generate":
                wrong = "" if call.request in here.requests else "the gateway serves no such request"
            elif call.method in _FOR_BLOCKS:
                wrong = "" if call.request in generates else f"{here.node} has no Generate call for it"
            else:
                continue
            if wrong:
                thing = f"{call.method} call to {self._name(call.peer)}"
                yield self._finding(here.incarnation, thing, _of(call.request), wrong, age_s=call.age_s)
        readers = {call.request for call in here.incoming if call.method in _FOR_BLOCKS}
        for request in here.grants:
            if request not in readers:
                yield self._finding(here.incarnation, "grant to read blocks", _of(request), "its call has ended")

    def sequences(self, here: Holdings) -> Iterator[Finding]:
        calls = {call.request for call in here.incoming if call.method in _FOR_A_REQUEST}
        for sequence in here.sequences:
            if sequence.request is None or sequence.request not in calls:
                wrong = "belongs to no call" if sequence.request is None else "its call has ended"
                thing = f"{sequence.kind} {sequence.id}"
                yield self._finding(here.incarnation, thing, _of(sequence.request), wrong)
        # Rule 4. The engine counted both at the same moment.
        if leaked := here.used_blocks - here.owned_blocks:
            wrong = "in use, and in no block table" if leaked > 0 else "in a block table, and free"
            yield self._finding(here.incarnation, "blocks", "", wrong, count=abs(leaked))

    # --- rule 5 --------------------------------------------------------------------------------------------

    def connections(self) -> Iterator[Finding]:
        read: Counter[tuple[Incarnation, Incarnation, str]] = Counter()  # owner, reader, transport
        served: Counter[tuple[Incarnation, Incarnation, str]] = Counter()
        for here in self._look.holdings:
            read.update((one.peer, here.incarnation, one.transport) for one in here.reading)
            served.update((here.incarnation, one.peer, one.transport) for one in here.serving)
        for owner, reader, transport in (read - served).elements():
            if wrong := self._missing(owner, "owner"):
                thing = f"{transport} reader of {self._name(owner)}"
                yield self._finding(reader, thing, "", wrong)
        for owner, reader, transport in (served - read).elements():
            if wrong := self._missing(reader, "reader"):
                thing = f"{transport} connection of {self._name(reader)}"
                yield self._finding(owner, thing, "", wrong)

    # --- rule 8 --------------------------------------------------------------------------------------------

    def idleness(self, here: Holdings) -> Iterator[Finding]:
        """One for each kind of thing, however many there are: they come and go, but there are always some."""
        held = Counter(f"{call.method} calls in" for call in here.incoming if call.method not in STANDING)
        held.update(f"{call.method} calls out" for call in here.outgoing if call.method not in STANDING)
        held.update(f"{sequence.kind} sequences" for sequence in here.sequences)
        held["blocks in use"] = here.used_blocks
        held["grants to read blocks"] = len(here.grants)
        held["requests"] = len(here.requests)
        held["reads of blocks"] = sum(one.num_reads for one in _connections(here))
        for kind, count in held.items():
            if count:
                yield self._finding(here.incarnation, kind, "", "held in a cluster that should be idle", count=count)


def num_working_calls(calls: Sequence[HeldCall]) -> int:
    return sum(call.method not in STANDING for call in calls)


def order_of(holdings: Holdings) -> tuple[int, str]:
    """How processes are listed: coordinator, gateways, prefill nodes, decode nodes, each by name."""
    kinds = [COORDINATOR, GATEWAY, *Role]
    return kinds.index(holdings.kind) if holdings.kind in kinds else len(kinds), holdings.node


def _connections(holdings: Holdings) -> tuple[HeldConnection, ...]:
    return (*holdings.serving, *holdings.reading)


def _key(caller: Incarnation, callee: Incarnation, call: HeldCall) -> _CallKey:
    return caller, callee, call.method, call.request, call.attempt


def _of(request: RequestId | None) -> str:
    return f"request {request[:8]}" if request else ""


def _unmatched(ages_s: Sequence[float], others_s: Sequence[float]) -> list[float]:
    """Calls of equal names have nothing but their age to tell them apart: the nearest belong together."""
    left = sorted(ages_s)
    for other_s in sorted(others_s):
        if left:
            left.remove(min(left, key=lambda age_s: abs(age_s - other_s)))
    return left

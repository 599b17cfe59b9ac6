"""Leaks planted in a running cluster are found by its audit."""

import asyncio

import pytest

from common.clock import new_id
from common.engine.events import Release, Reserve
from common.messages import NodeId, RequestId, Role
from coordinator.auditor import Auditor, Report
from tests.cluster.cluster import TIMES, Cluster
from tests.cluster.test_one_request import prompt

INTERVAL_S = 0.05
ANSWER_S = 10.0
"""Long: all are here and answer, however busy the machine is."""


async def audit(
    cluster: Cluster,
    *,
    idle: bool = False,
    known: bool = True,
    interval_s: float = INTERVAL_S,
    answer_s: float = ANSWER_S,
) -> Report:
    auditor = Auditor(
        cluster.network,
        cluster.coordinators,
        known=frozenset({cluster.caller.client.incarnation}) if known else frozenset(),  # type: ignore[attr-defined]
        answer_s=answer_s,
        clock=cluster.clock,
    )
    return await auditor.audit(idle=idle, interval_s=interval_s)


def found(report: Report) -> list[tuple[str, str, str]]:
    return [(one.process, one.thing, one.wrong) for one in report.findings]


async def test_a_cluster_at_work_is_clean_and_shows_what_it_holds(cluster: Cluster) -> None:
    await cluster.start_pools()
    cluster.faults.hold()
    asking = asyncio.create_task(cluster.asks_rightly(prompt(120)))
    await cluster.until(lambda: cluster.faults.num_reads == 1)
    report = await audit(cluster)
    assert report.findings == ()
    held = {one.node: one for one in report.look.holdings}
    prefill, decode = held[NodeId("prefill-0")], held[NodeId("decode-0")]
    assert [call.method for call in decode.incoming] == ["Generate"]
    assert {call.method for call in decode.outgoing} == {"Prefill", "Register"}
    assert [one.kind for one in (*prefill.sequences, *decode.sequences)] == ["lease", "lease"]
    assert prefill.used_blocks == prefill.owned_blocks == 8
    assert [one.peer for one in prefill.serving] == [decode.incarnation]
    assert [(one.peer, one.num_reads) for one in decode.reading] == [(prefill.incarnation, 1)]
    assert {one.request for one in (*prefill.sequences, *decode.sequences)} == set(prefill.grants)
    idle = await audit(cluster, idle=True)
    assert ("decode-0", "Generate calls in", "held in a cluster that should be idle") in found(idle)
    cluster.faults.release()
    await asking


async def test_a_caller_that_nobody_knows_is_found(cluster: Cluster) -> None:
    await cluster.start_pools()
    cluster.faults.hold()
    asking = asyncio.create_task(cluster.asks_rightly(prompt(40)))
    await cluster.until(lambda: cluster.faults.num_reads == 1)
    [finding] = (await audit(cluster, known=False)).findings
    assert finding.wrong == "its caller is no process of this cluster"
    assert finding.thing.startswith("Generate call from ")
    cluster.faults.release()
    await asking


@pytest.mark.parametrize("role", list(Role))
async def test_a_lease_that_no_call_owns_is_found(cluster: Cluster, role: Role) -> None:
    node = await cluster.start(role, "node")
    node.host.engine.post(Reserve(RequestId("planted"), prompt(20)))
    await cluster.until(lambda: node.load.leased_blocks == 2)  # until then it is a reservation: another thing
    assert found(await audit(cluster)) == [("node", "lease planted", "belongs to no call")]
    assert await cluster.audit() == [
        "node: 1 lease planted belongs to no call",
        "node: 1 lease sequences held in a cluster that should be idle",
        "node: 2 blocks in use held in a cluster that should be idle",
    ]
    node.host.engine.post(Release(RequestId("planted")))


async def test_a_reference_too_many_is_found(cluster: Cluster) -> None:
    await cluster.start_pools()
    await cluster.asks_rightly(prompt(40))
    pool = cluster.nodes["decode-0"].host.engine._pool  # idle: nobody else touches it
    [block] = pool.allocate(1) or []
    assert found(await audit(cluster)) == [("decode-0", "blocks", "in use, and in no block table")]
    pool.free([block])


async def test_a_reader_of_a_dead_owner_is_found(cluster: Cluster) -> None:
    """As it would be if the loss of the link were not told to the readers."""
    await cluster.start_pools()
    await cluster.asks_rightly(prompt(40))
    decode = cluster.nodes["decode-0"].host
    lose, decode.client.on_lost = decode.client.on_lost, lambda peer: None
    owner = cluster.nodes["prefill-0"].incarnation
    await cluster.kill("prefill-0")
    [(process, thing, wrong)] = found(await audit(cluster))
    assert (process, wrong) == ("decode-0", "its owner is no process of this cluster")
    assert thing == f"memory reader of process {owner[:8]}"
    lose(owner)


async def test_a_grant_that_was_not_revoked_is_found(cluster: Cluster) -> None:
    node = await cluster.start(Role.PREFILL, "prefill-0")
    await cluster.start(Role.DECODE, "decode-0")
    node.host.memory.grants.grant(b"secret", [], request=RequestId(new_id()))
    assert found(await audit(cluster)) == [("prefill-0", "grant to read blocks", "its call has ended")]
    node.host.memory.grants.revoke(b"secret")


@pytest.mark.parametrize("interval_s", [INTERVAL_S, 1.5 * TIMES.lost_after_s], ids=["before", "after"])
async def test_a_frozen_node_is_found_before_and_after_it_is_given_up(cluster: Cluster, interval_s: float) -> None:
    await cluster.start_pools()
    frozen = cluster.nodes["decode-0"].incarnation
    cluster.network.freeze(frozen)
    [(process, thing, wrong)] = found(await audit(cluster, interval_s=interval_s, answer_s=TIMES.connect_timeout_s / 2))
    assert (process, thing) == ("decode-0", "process")
    assert wrong.startswith("does not answer: no answer within")
    cluster.network.unfreeze(frozen)


async def test_a_node_that_was_killed_is_no_finding_and_leaves_none(cluster: Cluster) -> None:
    await cluster.start_pools(prefill=2)
    for salt in range(4):
        await cluster.asks_rightly(prompt(40, salt))
    auditor = Auditor(cluster.network, cluster.coordinators, answer_s=ANSWER_S, clock=cluster.clock)
    before = await auditor.look()
    await cluster.kill("prefill-0")
    await cluster.until(lambda: len(cluster.coordinator.state.view().nodes) == 2)
    after = await auditor.look()
    assert [one.node for one in before.holdings] == ["coordinator", "prefill-0", "prefill-1", "decode-0"]
    assert [one.node for one in after.holdings] == ["coordinator", "prefill-1", "decode-0"]
    assert after.silent == ()
    assert auditor.check(after, idle=True) == []

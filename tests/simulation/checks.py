"""What must be true of every process at any time, and what must be gone from all of them in the end."""

from collections.abc import Iterator

from common.rpc.server import ServerEndpoint
from coordinator.auditor import Auditor
from tests.simulation.processes import CoordinatorProcess, NodeProcess, Running, Surroundings


def check_invariants(running: Running) -> None:
    """AssertionError if a core of this process contradicts its own rules."""
    for endpoint in running.process.endpoints:
        for link in list(endpoint._links.values()):
            link.core.check_invariants()
    if isinstance(running, CoordinatorProcess):
        running.coordinator.state.check_invariants()
    if isinstance(running, NodeProcess) and running.node is not None:
        running.engine.check_invariants()
        for shell in running.calls:
            shell._role.check_invariants()


async def left_behind(world: Surroundings, processes: list[Running]) -> list[str]:
    """What idle processes hold, as `baton audit --idle` finds it, and what they have no words for."""
    auditor = Auditor(world.network, world.coordinators, clock=world.clock)
    look = await auditor.look()
    found = [
        f"{finding.process}: {finding.thing} {finding.owner}: {finding.wrong}"
        for finding in auditor.check(look, idle=True)
    ]
    silent = {one.incarnation for one in processes} - {one.incarnation for one in look.holdings}
    found += [f"{one.name} was not audited" for one in processes if one.incarnation in silent]
    for running in processes:
        found += [f"{running.name}: {what}" for what in _unsaid(running)]
    return found


def _unsaid(running: Running) -> Iterator[str]:
    """What no Audit lists."""
    for endpoint in running.process.endpoints:
        if isinstance(endpoint, ServerEndpoint) and endpoint._ending:
            yield f"{len(endpoint._ending)} links that end"
    if isinstance(running, CoordinatorProcess) and running.coordinator._asks:
        yield f"routes {list(running.coordinator._asks)}"
    if not isinstance(running, NodeProcess):
        return
    assert running.host is not None
    if running.host.port._listeners:
        yield f"listeners {list(running.host.port._listeners)}"
    if running.engine._scheduler.ids:
        yield f"sequences {running.engine._scheduler.ids}"
    readers = running.readers
    if readers is not None and (readers._opening or readers._reads or readers._closing or readers._expiring):
        yield f"readers {len(readers._opening)}, reads {dict(readers._reads)}, closing {len(readers._closing)}"

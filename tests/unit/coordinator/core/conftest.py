"""An empty cluster before each test, and again after it."""

from collections.abc import Iterator

import pytest

from common.messages import View
from tests.unit.coordinator.core.rig import Cluster


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    for connection in range(10):
        cluster.lose(connection)
    assert cluster.state.view() == View()

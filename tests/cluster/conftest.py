"""A running coordinator in this process; tests start the nodes they want."""

from collections.abc import AsyncIterator

import pytest

from tests.cluster.cluster import Cluster


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with Cluster() as cluster:
        yield cluster

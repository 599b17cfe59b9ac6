"""The cluster of tests/cluster, here to be hurt."""

from tests.cluster.conftest import cluster

__all__ = ["cluster"]

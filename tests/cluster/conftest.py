"""A cluster for all tests of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.control_plane import TOOLS, Cluster, running_cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Run a cluster with the priority class that an example uses."""
    assert TOOLS is not None
    priority = {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": "messaging"},
        "value": 1000,
    }
    with running_cluster(Path(TOOLS)) as cluster:
        cluster.create(priority)
        yield cluster

"""A driver of a Ray cluster in a process of its own, so that Ray leaves nothing in the tests'."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.schemes import _driver


class Driver(_driver.Driver):
    """Its process is connected to Ray."""

    def __init__(self) -> None:
        super().__init__(cluster)


@contextlib.contextmanager
def cluster() -> Iterator[None]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])  # of actors
    import ray
    from ray.cluster_utils import Cluster

    # It notes the cluster's address there, whichever directory it is given, and makes none.
    Path("/tmp/ray").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as temp:
        started = Cluster()
        started.add_node(
            num_cpus=4,
            object_store_memory=640 * 2**20,
            include_dashboard=False,
            temp_dir=temp,
        )
        ray.init(address=started.address, configure_logging=False)
        try:
            yield
        finally:
            ray.shutdown()
            started.shutdown()

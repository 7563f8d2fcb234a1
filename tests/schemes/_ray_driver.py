"""A driver of a Ray cluster in a process of its own, so that Ray leaves nothing in the tests'."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]
PATIENCE = float(os.environ.get("PATIENCE", "40"))
START_SECONDS = 60.0
STORE_NBYTES = 640 * 2**20


class ScenarioError(AssertionError):
    """A scenario failed; the text is its traceback."""


class Driver:
    """Runs coroutine functions of importable modules in a process that is connected to Ray.

    Args:
        nodes: Nodes of the cluster, all on this host.
    """

    def __init__(self, nodes: int = 1) -> None:
        ours, theirs = Pipe()
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self._log = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"from tests.schemes import _ray_driver as d; d.serve({theirs.fileno()}, {nodes})",
            ],
            pass_fds=[theirs.fileno()],
            cwd=ROOT,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
            env={
                **os.environ,
                "PYTHONPATH": path.rstrip(os.pathsep),
                "RAY_USAGE_STATS_ENABLED": "0",
                "PATIENCE": str(PATIENCE),
            },
        )
        theirs.close()
        self._conn = ours
        self._count = 0
        try:
            self._answer(START_SECONDS)
        except BaseException:
            self.close()
            raise

    def run(self, scenario: Callable[..., Any], *args: Any, loop: str = "asyncio") -> Any:
        """Run ``scenario(*args)`` to its end, and return what it does."""
        self._count += 1
        self._conn.send_bytes(pickle.dumps((self._count, scenario, args, loop)))
        return self._answer(PATIENCE + 15)

    def _answer(self, seconds: float) -> Any:
        count = -1
        while count != self._count:  # an interrupted test may have left its answer behind
            if not self._conn.poll(seconds):
                raise ScenarioError(f"no answer within {seconds:g} s\n{self._tail()}")
            try:
                count, good, result = pickle.loads(self._conn.recv_bytes())
            except EOFError:
                raise ScenarioError(f"the driver ended\n{self._tail()}") from None
        if not good:
            raise ScenarioError(f"{result}\n{self._tail()}")
        return result

    def _tail(self) -> str:
        self._log.seek(0)
        return self._log.read()[-4000:]

    def close(self) -> None:
        """End the driver and its cluster."""
        self._conn.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):  # what did not end with it
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._log.close()


# -- in the driver ----------------------------------------------------------------------------

cluster: Any = None


def serve(fd: int, nodes: int) -> None:
    """Start Ray, and run what is asked for until the test closes its end."""
    global cluster
    import ray

    conn = Connection(fd)
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as temp:
        common = {"include_dashboard": False, "object_store_memory": STORE_NBYTES}
        if nodes == 1:
            ray.init(num_cpus=8, _temp_dir=temp, configure_logging=False, **common)
        else:
            from ray.cluster_utils import Cluster

            arguments = {"num_cpus": 4, "resources": {"node0": 1}, **common}
            cluster = Cluster(initialize_head=True, head_node_args=arguments)
            for index in range(1, nodes):
                cluster.add_node(
                    num_cpus=4, resources={f"node{index}": 1}, object_store_memory=STORE_NBYTES
                )
            ray.init(address=cluster.address, configure_logging=False)
        conn.send_bytes(pickle.dumps((0, True, None)))
        try:
            with contextlib.suppress(EOFError, OSError):
                while True:
                    conn.send_bytes(pickle.dumps(_run(conn.recv_bytes())))
        finally:
            ray.shutdown()
            if cluster is not None:
                cluster.shutdown()


def _run(data: bytes) -> tuple[int, bool, Any]:
    from tests.schemes._harness import loop_factory

    count, scenario, args, loop = pickle.loads(data)
    try:
        with asyncio.Runner(loop_factory=loop_factory(loop)) as runner:
            result = runner.run(_limited(scenario(*args)))
        return count, True, result
    except BaseException:  # noqa: BLE001 - the test sees it
        return count, False, traceback.format_exc()


async def _limited(coroutine: Any) -> Any:
    async with asyncio.timeout(PATIENCE):
        return await coroutine

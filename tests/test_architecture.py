"""The layers of docs/topics/design.md, and the absence of side effects when aiosync is imported."""

from __future__ import annotations

import ast
import compileall
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import aiosync

ROOT = Path(aiosync.__file__).parent

# A part imports only parts that stand above it (and itself). Parts on one line do not know each
# other. `aiosync` is the package's own __init__, which re-exports the async API.
LAYERS: list[set[str]] = [
    {"_exports", "_interrupts", "_repr", "_version", "errors"},
    {"device_memory", "events", "spans", "types"},
    {"_log", "_tasks"},
    {"wire"},
    {"_meter", "protocol"},
    {"tensors", "transports"},
    {"strategy"},
    {"rendezvous"},
    {"receiver", "sender"},
    {"schemes"},
    {"_run"},
    {"aiosync"},
    {"server", "serving"},
    {"sync"},
    {"legacy"},
    {"metrics"},
    {"integrations", "testing"},
    {"bench"},
    {"cli"},
    {"__main__"},
]
RANK = {part: rank for rank, parts in enumerate(LAYERS) for part in parts}

# These imports are forbidden, although the order of the layers would allow them.
NOT_KNOWN = {"strategy": {"transports"}}

LOOPS = {"anyio", "asyncio", "trio", "uvloop"}
TENSOR_LIBRARIES = {"tensordict", "torch"}
WEB = {"fastapi", "httpx", "starlette", "uvicorn"}
OPTIONAL = {"gymnasium", "matplotlib", "ray", "rich", "torchrl", "transformers", "typer", "vllm"}
OPTIONAL |= WEB | {"opentelemetry", "prometheus_client", "verl"}
UNPICKLERS = {"cloudpickle", "dill", "marshal", "pickle", "shelve"}
FORBIDDEN = {
    "_version": LOOPS | TENSOR_LIBRARIES | OPTIONAL,
    "errors": LOOPS | TENSOR_LIBRARIES | OPTIONAL,
    "device_memory": LOOPS | TENSOR_LIBRARIES | OPTIONAL | UNPICKLERS,
    "events": LOOPS | TENSOR_LIBRARIES | OPTIONAL,
    "spans": LOOPS | TENSOR_LIBRARIES | OPTIONAL,
    "types": LOOPS | TENSOR_LIBRARIES | OPTIONAL,
    "_meter": TENSOR_LIBRARIES | OPTIONAL | UNPICKLERS,
    "wire": LOOPS | TENSOR_LIBRARIES | OPTIONAL | UNPICKLERS,
    "protocol": LOOPS | TENSOR_LIBRARIES | OPTIONAL | UNPICKLERS,
    "tensors": LOOPS | OPTIONAL | UNPICKLERS,
    "strategy": LOOPS | OPTIONAL | UNPICKLERS,
    "transports": TENSOR_LIBRARIES | OPTIONAL | UNPICKLERS,
    "rendezvous": TENSOR_LIBRARIES | OPTIONAL | UNPICKLERS,
    "receiver": OPTIONAL | UNPICKLERS,
    "schemes": OPTIONAL | UNPICKLERS,
    "legacy": OPTIONAL | UNPICKLERS,
    "server": OPTIONAL | UNPICKLERS,
    "serving": OPTIONAL | UNPICKLERS | TENSOR_LIBRARIES,
    "sync": OPTIONAL | UNPICKLERS,
    "testing": OPTIONAL | {"pytest", "hypothesis"},
}
# Each module is one backend: it exists to drive the library that it may import.
ALLOWED = {
    "transports.distributed": {"torch"},
    "transports.rpc": {"torch"},
    # This module runs in the processes of actors without aiosync.
    "transports._ray_actor": {"torch"},
}


@dataclass(frozen=True)
class Import:
    # The dotted name below aiosync; "" for the package itself.
    module: str
    line: int
    # The absolute dotted name.
    target: str

    def __str__(self) -> str:
        return f"aiosync.{self.module}:{self.line} imports {self.target}"

    @property
    def part(self) -> str:
        return self.module.partition(".")[0] or "aiosync"


def _module_name(path: Path, root: Path) -> str:
    parts = list(path.relative_to(root).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


def _imports(source: str, module: str) -> list[Import]:
    """Return every import of a module, lazy ones and those for type checkers included."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [Import(module, node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"aiosync.{module}:{node.lineno}: relative import"
            assert node.module is not None
            found += [
                Import(module, node.lineno, f"{node.module}.{alias.name}") for alias in node.names
            ]
    return found


def _sources() -> dict[str, str]:
    return {_module_name(path, ROOT): path.read_text() for path in sorted(ROOT.rglob("*.py"))}


def _target_part(target: str) -> str:
    """Return the part of aiosync that an absolute name belongs to."""
    second = target.removeprefix("aiosync").removeprefix(".").partition(".")[0]
    return second if second in RANK else "aiosync"


def _faults(imports: list[Import]) -> list[str]:
    faults = []
    for item in imports:
        top = item.target.partition(".")[0]
        if top == "aiosync":
            target = _target_part(item.target)
            if target == item.part:
                continue
            if RANK[target] >= RANK[item.part]:
                faults.append(f"{item}: {target!r} does not stand above {item.part!r}")
            elif target in NOT_KNOWN.get(item.part, ()):
                faults.append(f"{item}: {item.part!r} must not know {target!r}")
        elif top in FORBIDDEN.get(item.part, set()) - ALLOWED.get(item.module, set()):
            faults.append(f"{item}: not allowed in {item.part!r}")
    return faults


def test_every_module_has_its_layer() -> None:
    parts = {name.partition(".")[0] for name in _sources()} - {""}
    assert parts <= set(RANK), "give the new part its place in LAYERS and in the design page"


def test_a_layer_imports_only_what_stands_above_it() -> None:
    imports = [item for name, source in _sources().items() for item in _imports(source, name)]
    assert len(imports) > 50
    assert not _faults(imports), "\n".join(_faults(imports))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("wire.frames", "import asyncio"),
        ("wire.frames", "def f():\n    import torch.nn"),
        ("protocol.version_order", "from anyio import Event"),
        ("protocol.version_order", "from aiosync.transports import Transport"),
        ("tensors.buffer", "from aiosync.transports.base import Transport"),
        ("transports.framed_link", "from aiosync.tensors import Layout"),
        ("transports.framed_link", "from aiosync import schemes"),
        ("transports.framed_link", "from aiosync.schemes.base import WeightSyncScheme"),
        ("transports.framed_link", "from pickle import loads"),
        ("transports.framed_link", "import torch"),
        ("schemes.base", "from aiosync import SendReport"),
        ("schemes.base", "import aiosync.sync"),
        ("", "from aiosync.sync import portal"),
        ("testing.suite", "import pytest"),
    ],
)
def test_a_forbidden_import_is_found(module: str, source: str) -> None:
    assert _faults(_imports(source, module))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("wire.frames", "from aiosync.errors import ProtocolError"),
        ("wire.frames", "from aiosync.wire.messages import Ack"),
        ("transports.distributed", "import torch.distributed"),
        ("schemes.base", "from aiosync.transports import Transport\nimport torch"),
        ("sync", "from aiosync import WeightSyncScheme"),
        ("", "from aiosync.schemes import WeightSyncScheme"),
    ],
)
def test_an_allowed_import_is_not_a_fault(module: str, source: str) -> None:
    assert not _faults(_imports(source, module))


def _run(code: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_wire_and_protocol_run_without_a_loop_or_torch() -> None:
    """The rule of the layers holds at run time, too, for everything that third parties import."""
    code = f"""
import importlib, json, pkgutil, sys, types
package = types.ModuleType("aiosync")
package.__path__ = [{str(ROOT)!r}]
sys.modules["aiosync"] = package
names = []
for part in ("wire", "protocol"):
    module = importlib.import_module(f"aiosync.{{part}}")
    for info in pkgutil.walk_packages(module.__path__, f"aiosync.{{part}}."):
        importlib.import_module(info.name)
        names.append(info.name)
forbidden = {sorted(LOOPS | TENSOR_LIBRARIES | {"numpy"})!r}
print(json.dumps({{"names": names, "loaded": [n for n in forbidden if n in sys.modules]}}))
"""
    result = _run(code)
    assert result["names"]
    assert result["loaded"] == []


IMPORT_PROBE = """
import gc, json, logging, os, sys, threading, time
start = time.process_time()
import torch
between = time.process_time()
gc.collect()  # a pass over all that torch has made is due soon, and would count for the next import
environment = dict(os.environ)
handlers = list(logging.getLogger().handlers), logging.getLogger().level
names = set(logging.Logger.manager.loggerDict)
threads = threading.active_count(), len(os.listdir("/proc/self/task"))
descriptors = len(os.listdir("/proc/self/fd"))
signals = __import__("signal").getsignal(2)
before = time.process_time()
import aiosync
aiosync.WeightSyncScheme  # what needs torch is imported with the first of its names
cost = time.process_time() - before
import asyncio
from asyncio import events
print(json.dumps({
    "ratio": cost / (between - start),
    "environment": dict(os.environ) == environment,
    "logging": (list(logging.getLogger().handlers), logging.getLogger().level) == handlers,
    "own_logging": not any(
        getattr(logging.Logger.manager.loggerDict[name], "level", 0)
        or [
            handler
            for handler in getattr(logging.Logger.manager.loggerDict[name], "handlers", ())
            if not isinstance(handler, logging.NullHandler)
        ]
        for name in logging.Logger.manager.loggerDict
        if name.startswith("aiosync")
    ),
    "threads": (threading.active_count(), len(os.listdir("/proc/self/task"))) == threads,
    "descriptors": len(os.listdir("/proc/self/fd")) == descriptors,
    "signals": __import__("signal").getsignal(2) == signals,
    "no_loop": events._get_running_loop() is None
    and getattr(getattr(events._event_loop_policy, "_local", None), "_loop", None) is None,
    "no_children": __import__("multiprocessing").active_children() == [],
    "loaded": sorted(
        name
        for name in ("gymnasium", "matplotlib", "pytest", "ray", "rich", "tensordict", "torchrl",
                     "typer", "uvloop", "verl", "vllm", "aiosync.sync", "aiosync.testing",
                     "aiosync.cli")
        if name in sys.modules
    ),
}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the probe reads /proc")
def test_import_has_no_side_effects_and_costs_little() -> None:
    # The test measures the import of compiled modules, so it compiles them first.
    compileall.compile_dir(str(ROOT), quiet=1)
    result = _run(IMPORT_PROBE)
    ratio = result.pop("ratio")
    assert result == {
        "environment": True,
        "logging": True,
        "own_logging": True,
        "threads": True,
        "descriptors": True,
        "signals": True,
        "no_loop": True,
        "no_children": True,
        "loaded": [],
    }
    # The ratio is CPU time beside that of torch, which a user of aiosync imports anyway. A busy
    # machine can spoil one measurement, but hardly three.
    for _ in range(2):
        if ratio >= 0.1:
            ratio = min(ratio, _run(IMPORT_PROBE)["ratio"])
    assert ratio < 0.1


TENSORDICT_PROBE = """
import json, sys, torch
import aiosync.sync, aiosync.testing, aiosync.integrations.asgi
source, target = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
flat = aiosync.WeightStrategy("state_dict")
flat.apply_weights(target, flat.extract_weights(source))
with aiosync.sync.NoWeightSyncScheme() as scheme:
    scheme.init_on_sender(model=source, num_workers=1)
    scheme.connect()
    scheme.send()
early = "tensordict" in sys.modules
strategy = aiosync.WeightStrategy("tensordict")
weights = strategy.extract_weights(source)
import tensordict
target = torch.nn.Linear(2, 3)
strategy.apply_weights(target, weights)
print(json.dumps({
    "early": early,
    "web": [name for name in ("fastapi", "httpx", "starlette", "uvicorn") if name in sys.modules],
    "kind": type(weights) is tensordict.TensorDict,
    "applied": torch.equal(source.weight, target.weight) and torch.equal(source.bias, target.bias),
}))
"""


@pytest.mark.slow
def test_tensordict_is_imported_when_weights_of_its_kind_are_asked_for(fresh: Any) -> None:
    """Importing the ASGI adapter also imports no web framework."""
    done = fresh.script(TENSORDICT_PROBE)
    assert json.loads(done.stdout or "{}") == {
        "early": False,
        "web": [],
        "kind": True,
        "applied": True,
    }, done.stderr

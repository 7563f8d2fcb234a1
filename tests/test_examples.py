"""Examples: each runs by itself and prints what its page shows; the files of a container work."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import aiosync

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
DOCS = ROOT / "docs" / "examples"
CONTAINER = EXAMPLES / "container"
LARGER = [
    "distributed_trainer",
    "four_phase_server",
    "generation_server",
    "lora_adapters",
    "ray_serve_policy",
    "rpc_trainer",
    "transformers_batching",
    "two_models",
]
NEEDS = {"fastapi_server": "fastapi", "ray_actors": "ray", "torchrl_collector": "torchrl"}

_script = runpy.run_path(str(DOCS / "outputs.py"))
masked, run_shown = _script["masked"], _script["run"]
SHOWN = [
    pytest.param(
        page, what, text, id=what if what.startswith("examples/") else f"{page.name}-commands"
    )
    for page in _script["pages"]()
    for what, text in _script["outputs"](page)
]


def programs() -> list[str]:
    return sorted(path.stem for path in EXAMPLES.glob("*.py"))


# -- the pages --------------------------------------------------------------------------------


def test_every_short_program_has_a_page_and_every_larger_one_is_named() -> None:
    gallery = (DOCS / "index.md").read_text()
    for name in programs():
        text = (EXAMPLES / f"{name}.py").read_text()
        assert text.startswith('"""Shows ')
        if name in LARGER:
            assert f"`{name}.py`" in gallery
            continue
        assert len(text.splitlines()) <= 60, name
        page = f"{name.replace('_', '-')}.md"
        assert f"]({page})" in gallery
        shown = (DOCS / page).read_text()
        assert f"```{{literalinclude}} ../../examples/{name}.py\n" in shown
        assert f"<!-- output of examples/{name}.py -->\n" in shown
    assert set(LARGER) < set(programs())


def test_every_page_is_in_the_gallery() -> None:
    pages = {page.stem for page in DOCS.glob("*.md")} - {"index"}
    gallery = (DOCS / "index.md").read_text()
    assert set(re.findall(r"\]\(([a-z-]+)\.md\)", gallery)) == pages


@pytest.mark.parametrize(
    ("text", "other", "same"),
    [
        ("version 2 of epoch 00ff00ff00ff00ff", "version 2 of epoch 0123456789abcdef", True),
        ("took 1.25 ms", "took 3 ms", True),
        ("reward 0.51", "reward 0.93", True),
        ("version 2 is applied by [0]", "version 3 is applied by [0]", False),
        ("applied by [0, 1]", "applied by [0]", False),
    ],
)
def test_only_what_differs_from_run_to_run_is_masked(text: str, other: str, same: bool) -> None:
    assert (masked(text) == masked(other)) is same


@pytest.fixture(scope="module")
def printed(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Run the examples of the chosen tests, two at a time on two cores; return what each prints."""
    calls = [getattr(item, "callspec", None) for item in request.session.items]
    wanted = {
        call.params["what"]: call.params["page"] for call in calls if call and "what" in call.params
    }

    def run(item: tuple[str, Path]) -> str | Exception:
        what, page = item
        try:
            return run_shown(page, what)
        except (RuntimeError, subprocess.TimeoutExpired) as exc:
            return exc

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(wanted, pool.map(run, wanted.items()), strict=True))


@pytest.mark.apart
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("page", "what", "text"), SHOWN)
def test_a_page_shows_what_is_printed(
    page: Path, what: str, text: str, printed: dict[str, Any]
) -> None:
    pytest.importorskip(NEEDS.get(Path(what).stem, "typer"))
    assert isinstance(printed[what], str), printed[what]
    assert masked(printed[what]) == masked(text)


# -- larger programs --------------------------------------------------------------------------


def run(name: str, *, quiet: bool = True, timeout: float = 55) -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not (quiet and done.stderr)
    return done.stdout


@pytest.mark.slow
def test_two_models() -> None:
    # Three processes write this output, so lines may be mixed.
    out = run("two_models.py")
    assert re.findall(r"trainer: (\w+) version (\d+) applied by \[0, 1\]", out) == [
        ("policy", "2"),
        ("policy", "3"),
        ("value", "2"),
    ]
    number = r"-?\d+\.\d{4}"
    pattern = rf"worker (\d): (policy version 3 sum {number}, value version 2 sum {number})"
    matches = re.findall(pattern, out)
    assert sorted(worker for worker, _ in matches) == ["0", "1"]
    # Both workers have the same weights.
    assert len({text for _, text in matches}) == 1


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "workers"),
    [
        ("distributed_trainer.py", 2),
        # tests/schemes/test_rpc.py runs the same on a group that is up already.
        pytest.param("rpc_trainer.py", 3, marks=pytest.mark.heavy),
    ],
)
def test_a_trainer_in_a_cluster(name: str, workers: int) -> None:
    # Several processes write this output, so lines may be mixed.
    out = run(name)
    everybody = re.escape(str(list(range(workers))))
    versions = re.findall(rf"trainer: version (\d+) applied by {everybody}", out)
    assert versions == ["2", "3", "4"]
    seen = re.findall(r"worker (\d): version 4, sum (-?\d+\.\d{4})", out)
    assert sorted(idx for idx, _ in seen) == [str(idx) for idx in range(workers)]
    # All workers have the same weights.
    assert len({total for _, total in seen}) == 1


@pytest.mark.slow
@pytest.mark.apart
def test_generation_server() -> None:
    pytest.importorskip("uvicorn")
    # An answer takes about as long as the trainer does for a version, so some runs have no answer
    # with tokens of several versions.
    for _ in range(4):
        out = run("generation_server.py")
        answers = re.findall(
            r"^24 tokens from (\d+), of versions (\d+) to (\d+): \[(.*)\] \.\.\.$", out, re.M
        )
        assert len(answers) == 5, out
        if any(int(end) > int(begin) for _, begin, end, _ in answers):
            break
    else:
        pytest.fail("no answer has tokens of several versions")
    assert answers[-1][0] == "7"
    # The model has learned to count.
    assert answers[-1][3] == "8, 9, 10, 11, 12, 13, 14, 15"


@pytest.mark.heavy
@pytest.mark.timeout(120)
def test_a_policy_in_ray_serve() -> None:
    pytest.importorskip("ray.serve")
    out = run("ray_serve_policy.py", quiet=False)
    assert "version 21 applied by [0, 1]" in out
    assert "got an answer of version 21" in out


@pytest.mark.slow
def test_a_server_with_the_contract_of_vllm() -> None:
    pytest.importorskip("uvicorn")
    out = run("four_phase_server.py")
    assert "version 20 is active" in out
    answers, right = re.findall(r"(\d+) (?:answers|of them)", out)
    assert answers == right


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_continuous_batching_of_transformers() -> None:
    pytest.importorskip("transformers")
    out = run("transformers_batching.py", quiet=False, timeout=110)
    assert "the manager has version 21" in out
    assert "the same weights on both sides: True" in out


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_adapters_of_peft() -> None:
    pytest.importorskip("peft")
    out = run("lora_adapters.py", quiet=False, timeout=110)
    names = [line.split(":")[0] for line in out.splitlines() if line.startswith("policy-")]
    versions = [int(name.rsplit("-", 1)[1]) for name in names]
    # A worker that prints slowly skips some.
    assert versions == sorted(set(versions)) and versions[-1] == 5
    assert "each update had" in out


# -- a weight server in a container -----------------------------------------------------------


def container_file(name: str) -> str:
    """Return the text of a file, with its folded lines joined."""
    return (CONTAINER / name).read_text().replace("\\\n", " ")


def image() -> dict[str, list[str]]:
    """Return the commands of the image, by instruction."""
    found = re.findall(
        r"^(\w+)(?: +--\S+)*(?: +CMD)? +(\[.*\])$", container_file("Containerfile"), re.M
    )
    return {name: json.loads(command) for name, command in found}


def manifest() -> dict[str, Any]:
    """Return the specs of the objects of the manifest, by kind."""
    yaml = pytest.importorskip("yaml")
    text = container_file("kubernetes.yaml")
    return {part["kind"]: part["spec"] for part in yaml.safe_load_all(text)}


def unit_command() -> list[str]:
    found = re.search(r"^ExecStart=(.*)$", container_file("aiosync-serve.service"), re.M)
    assert found is not None
    return shlex.split(found[1])


def serve_options(kind: str) -> dict[str, str]:
    """Return the options of `aiosync serve` in a container, a pod or a unit."""
    if kind == "unit":
        program, command, *args = unit_command()
        assert (Path(program).name, command) == ("aiosync", "serve")
    else:
        assert image()["ENTRYPOINT"] == ["aiosync", "serve"]
        args = image()["CMD"]
        if kind == "pod":
            (container,) = manifest()["StatefulSet"]["template"]["spec"]["containers"]
            args = [part for arg in container["args"] for part in arg.split("=", 1)]
    return dict(zip(args[::2], args[1::2], strict=True))


@pytest.mark.slow
@pytest.mark.apart
@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", ["container", "pod", "unit"])
def test_the_weight_server_of_a_file_starts_is_healthy_and_ends(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    pytest.importorskip("typer")
    token, wrong = tmp_path / "token", tmp_path / "wrong"
    for path in (token, wrong):
        path.touch(0o600)
        path.write_text(f"a {path.name} of this test\n")
    here = {
        "--listen": "tcp://127.0.0.1:0",
        "--token-file": str(token),
        "--store": str(tmp_path / "store"),
        "--metrics": "127.0.0.1:0",
    }
    options = serve_options(kind)
    assert here.keys() <= options.keys()
    command = [sys.executable, "-m", "aiosync"]
    args = [arg for option in (options | here).items() for arg in option]
    server = subprocess.Popen(
        [*command, "serve", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with server:
        try:
            assert server.stdout is not None and server.stderr is not None
            told = re.fullmatch(r"Metrics at (http://.*)/metrics\n", server.stderr.readline())
            assert told is not None
            url = server.stdout.readline().strip()
            for path in ("/readyz", "/healthz"):
                with urllib.request.urlopen(told[1] + path, timeout=30) as answer:
                    assert answer.status == 200
            if kind == "container":
                _, *check = image()["HEALTHCHECK"]
                check[check.index("tcp://127.0.0.1:7000")] = url
                for file, healthy in ((token, True), (wrong, False)):
                    check[check.index("--token-file") + 1] = str(file)
                    asked = subprocess.run([*command, *check], capture_output=True, check=False)
                    assert (asked.returncode == 0) is healthy
        finally:
            server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0


def test_the_image_has_the_pinned_torch_and_its_extras_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    (torch,) = [each for each in extras["demo"] if each.startswith("torch==")]
    found = re.search(r"pip install \S+ (\S+) '/src\[(.*)\]'", container_file("Containerfile"))
    assert found is not None
    assert found[1] == torch
    assert set(found[2].split(",")) <= extras.keys()


def test_the_parts_of_the_manifest_and_the_image_fit_together() -> None:
    parts, options = manifest(), serve_options("pod")
    states = parts["StatefulSet"]
    pod, labels = states["template"]["spec"], states["template"]["metadata"]["labels"]
    (container,) = pod["containers"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert options["--listen"].endswith(f":{ports['weights']}")
    assert options["--metrics"].endswith(f":{ports['metrics']}")
    assert f"EXPOSE {ports['weights']} {ports['metrics']}\n" in container_file("Containerfile")
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] == "metrics"
    assert labels == parts["Service"]["selector"] == states["selector"]["matchLabels"]
    assert labels == parts["NetworkPolicy"]["podSelector"]["matchLabels"]
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert options["--token-file"] == f"{mounts['token']}/token"
    assert options["--store"] == mounts["store"]
    assert options == serve_options("container")
    assert container["image"] == f"aiosync:{aiosync.__version__}"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not there")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    text = (CONTAINER / "aiosync-serve.service").read_text()
    unit = tmp_path / "aiosync-serve.service"
    # The check needs the path of a program that exists on this machine.
    unit.write_text(text.replace(unit_command()[0], sys.executable))
    verify = ["systemd-analyze", "verify", str(unit)]
    done = subprocess.run(verify, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "aiosync-serve" not in done.stderr

"""Every example runs by itself, shows what its first line says, and is quick."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, *, quiet: bool = True) -> str:
    pytest.importorskip("gymnasium")
    done = subprocess.run(
        [sys.executable, EXAMPLES / name],
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not (quiet and done.stderr)
    return done.stdout


def test_every_example_is_tested_and_says_what_it_shows() -> None:
    names = sorted(path.name for path in EXAMPLES.glob("*.py"))
    assert names == [
        "async_trainer.py",
        "bare_schemes.py",
        "classic_trainer.py",
        "distributed_trainer.py",
        "generation_server.py",
        "policy_server.py",
        "ray_serve_policy.py",
        "ray_trainer.py",
        "rpc_trainer.py",
        "tcp_trainer.py",
        "tcp_worker.py",
        "torchrl_collector.py",
    ]
    for name in names:
        first_line = (EXAMPLES / name).read_text(encoding="utf-8").splitlines()[0]
        assert first_line.startswith('"""Shows ')


@pytest.mark.slow
@pytest.mark.parametrize("name", ["async_trainer.py", "classic_trainer.py"])
def test_trainer(name: str) -> None:
    out = run(name)
    versions = re.search(r"^(\d+) versions", out)
    assert versions is not None
    assert int(versions[1]) > 10
    rise = re.search(r"mean return (\d+) -> (\d+)", out)
    assert rise is not None
    assert int(rise[2]) > int(rise[1])


@pytest.mark.slow
def test_bare_schemes() -> None:
    out = run("bare_schemes.py")  # three processes write to it: lines may be mixed
    assert re.findall(r"trainer: (\w+) version (\d+) applied by \[0, 1\]", out) == [
        ("policy", "2"),
        ("policy", "3"),
        ("value", "2"),
    ]
    number = r"-?\d+\.\d{4}"
    pattern = rf"worker (\d): (policy version 3 sum {number}, value version 2 sum {number})"
    matches = re.findall(pattern, out)
    assert sorted(worker for worker, _ in matches) == ["0", "1"]
    assert len({text for _, text in matches}) == 1  # the same weights in both


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
    out = run(name)  # several processes write to it: lines may be mixed
    everybody = re.escape(str(list(range(workers))))
    versions = re.findall(rf"trainer: version (\d+) applied by {everybody}", out)
    assert versions == ["2", "3", "4"]
    seen = re.findall(r"worker (\d): version 4, sum (-?\d+\.\d{4})", out)
    assert sorted(idx for idx, _ in seen) == [str(idx) for idx in range(workers)]
    assert len({total for _, total in seen}) == 1  # the same weights in all of them


# -- a trainer and workers that know nothing of each other but an address and a token ---------


@contextmanager
def started(name: str, *args: str, token: str | None = None) -> Iterator[subprocess.Popen[str]]:
    env = {key: value for key, value in os.environ.items() if key != "AIOSYNC_TOKEN"}
    process = subprocess.Popen(
        [sys.executable, EXAMPLES / name, *args],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env if token is None else env | {"AIOSYNC_TOKEN": token},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(process: subprocess.Popen[str], pattern: str) -> tuple[re.Match[str], list[str]]:
    """The first line of stdout that matches, and those before it."""
    assert process.stdout is not None
    before: list[str] = []
    for line in process.stdout:
        match = re.search(pattern, line)
        if match is not None:
            return match, before
        before.append(line)
    assert process.stderr is not None
    raise AssertionError(f"no line like {pattern!r} in {before}; stderr: {process.stderr.read()}")


def free_port() -> int:
    """Below those that the system gives to clients, so that it stays free between two trainers."""
    for port in range(20000 + os.getpid() % 10000, 32000):
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.apart
def test_tcp_workers_outlive_the_trainer(tmp_path: Path) -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    token_file = tmp_path / "token"
    token_file.write_text("a token of this test\n")
    worker = ["tcp_worker.py", url, "--patience", "100"]
    trainer = ["--listen", url, "--workers", "2", "--pause", "0", "--steps"]
    with (
        started(*worker, token="a token of this test") as one,  # they dial before it listens
        started(*worker, "--token-file", str(token_file)) as two,
    ):
        trainers = set()
        for steps in (3, 5):
            with started(
                "tcp_trainer.py", *trainer, str(steps), token="a token of this test"
            ) as process:
                out, err = process.communicate(timeout=100)
            assert (process.returncode, err) == (0, "")
            assert out.startswith(f"listening on {url}\n")
            last = rf"step {steps}: loss \d+\.\d+, version {steps + 1} applied by \[0, 1\]\n$"
            assert re.search(last, out)
            # The pipe keeps what they said; both say the same of the same weights.
            seen = rf"^trainer (\w{{4}}), version {steps + 1}: (policy\(1\) = .*)$"
            matches = [wait_for(each, seen)[0] for each in (one, two)]
            assert matches[0].groups() == matches[1].groups()
            trainers.add(matches[0][1])
        assert len(trainers) == 2
        assert one.poll() is None and two.poll() is None


@pytest.mark.slow
@pytest.mark.apart
def test_policy_server() -> None:
    pytest.importorskip("uvicorn")
    out = run("policy_server.py")
    answers = re.search(
        r"^(\d+) answers by versions (\d+) to (\d+), for each client in order: True$", out, re.M
    )
    assert answers is not None, out
    assert int(answers[1]) > 20
    assert int(answers[3]) > int(answers[2])
    asked = re.search(r"^version (\d+) was asked for: (\d+) answered$", out, re.M)
    assert asked is not None, out
    assert int(asked[2]) >= int(asked[1])
    assert re.search(r"^the trainer has left: .*lost", out, re.M)
    assert re.search(r"^the server goes on: 200 by version \d+$", out, re.M)


@pytest.mark.slow
@pytest.mark.apart
def test_generation_server() -> None:
    pytest.importorskip("uvicorn")
    for _ in range(4):  # an answer takes about as long as the trainer does for a version
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
    assert answers[-1][3] == "8, 9, 10, 11, 12, 13, 14, 15"  # it has learned to count


@pytest.mark.heavy
@pytest.mark.timeout(120)
def test_a_policy_in_ray_serve() -> None:
    pytest.importorskip("ray.serve")
    out = run("ray_serve_policy.py", quiet=False)
    assert "version 21 applied by [0, 1]" in out
    assert "got an answer of version 21" in out

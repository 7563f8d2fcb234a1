"""``aiosync serve``, ``push``, ``pull`` and ``status``: their effects and their messages.

The servers are processes, started once for all tests. Most clients run in this process through
``aiosync.cli.main()``, since an interpreter with torch takes seconds to start.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("safetensors")

import torch

import aiosync
import aiosync.cli
from aiosync.cli.files import load_weights, save_weights
from aiosync.server import StoreError, WeightClient, WeightServer, WeightStore
from aiosync.testing import FaultProxy, Faults, Plan
from tests._certificates import certificates
from tests.cli._serving import (
    SECRET,
    Command,
    Terminal,
    assert_same,
    refused,
    run,
    serving,
    write_weights,
    written,
)
from tests.schemes._harness import PATIENCE, until
from tests.server._tools import URL, described, trainer
from tests.support.waiting import free_address, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.one_loop


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("commands")


@pytest.fixture(scope="module")
def token_file(folder: Path) -> str:
    return written(folder / "token", f"{SECRET}\n")


TLS_SERVER = ("--tls-cert", "good.pem", "--tls-ca", "ca.pem", "--tls-verify-clients")
TLS_CLIENT = ("--tls-ca", "ca.pem", "--tls-cert", "good.pem")


def with_files(options: tuple[str, ...]) -> list[str]:
    """Return the options, with file names replaced by those of the test's certificates."""
    at = certificates().folder
    return [str(at / each) if each.endswith(".pem") else each for each in options]


@pytest.fixture(scope="module")
def servers(folder: Path, token_file: str) -> Iterator[dict[str, Command]]:
    """Start three servers at the same time: a plain one, one with a token, and one with TLS."""
    unix = f"unix://{folder / 'socket'}"
    tcp = "tcp://127.0.0.1:0"
    with (
        serving(folder / "plain", "--listen", tcp) as plain,
        serving(folder / "with-token", "--listen", unix, "--with-token") as token,
        serving(
            folder / "tls", "--listen", tcp, "--model-id", "a b", *with_files(TLS_SERVER)
        ) as tls,
    ):
        yield {"plain": plain, "token": token, "tls": tls}


@pytest.fixture
def weights(tmp_path: Path) -> tuple[str, dict[str, torch.Tensor]]:
    return write_weights(tmp_path)


# -- round trips ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_push_pull_and_status_as_processes(
    servers: dict[str, Command],
    weights: tuple[str, dict[str, torch.Tensor]],
    tmp_path: Path,
) -> None:
    path, tensors = weights
    url = servers["plain"].url
    assert re.fullmatch(r"tcp://127\.0\.0\.1:[1-9][0-9]*", url)
    pushed = run("push", path, url)
    # There is no progress bar without a terminal.
    assert (pushed.returncode, pushed.stderr) == (0, "")
    line = re.fullmatch(
        r"Pushed policy: version 1 of epoch ([0-9a-f]{16}), "
        r"240\.\d kB \(240\d+ bytes\) in [\d.]+ s, [\d.]+ MB/s\n",
        pushed.stdout,
    )
    assert line, pushed.stdout
    # Both commands start at the same time.
    with ThreadPoolExecutor(2) as pool:
        pulling = pool.submit(run, "pull", url, str(tmp_path / "copy.safetensors"))
        telling = pool.submit(run, "status", url, "--json", NO_COLOR="1")
        pulled, told = pulling.result(), telling.result()
    assert (pulled.returncode, pulled.stderr) == (0, "")
    assert pulled.stdout.startswith(f"Pulled policy: version 1 of epoch {line[1]}, ")
    assert_same(load_weights(tmp_path / "copy.safetensors"), tensors)
    assert (told.returncode, told.stderr) == (0, "")
    values = json.loads(told.stdout)
    (model,) = values["models"]
    assert (model["model_id"], model["strategy"], model["version"]) == ("policy", "any", 1)
    assert f"{model['epoch']:016x}" == line[1]
    # The tied tensor counts once.
    assert model["tensors"] == 4
    assert f"policy: version 1 of epoch {line[1]}" in servers["plain"].log.read_text()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_server_behind_another_one(
    servers: dict[str, Command],
    weights: tuple[str, dict[str, torch.Tensor]],
    tmp_path: Path,
) -> None:
    path, tensors = weights
    upstream = servers["plain"].url
    pushed = run("push", path, upstream, "--model-id", "far")
    assert pushed.returncode == 0
    here = f"unix://{tmp_path / 'here'}"
    given = ("--upstream", upstream, "--model-id", "far", "--delta", "always")
    with serving(tmp_path, "--listen", here, *given) as server:
        pulled = run("pull", server.url, str(tmp_path / "copy.safetensors"), "--model-id", "far")
        assert (pulled.returncode, pulled.stderr) == (0, "")
        assert pulled.stdout.split(",")[0].split()[2:] == pushed.stdout.split(",")[0].split()[2:]
        assert_same(load_weights(tmp_path / "copy.safetensors"), tensors)
        refused = run("push", path, server.url, "--model-id", "far")
        assert refused.returncode == 1
        assert f"follows {upstream}" in refused.stderr
    limited = run("serve", "--listen", here, "--limit-rate", "1Mbit")
    assert limited.returncode == 2
    assert "limit_rate= is for tcp://host:port" in limited.stderr


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("of_the_system", [False, True])
def test_a_server_behind_one_that_asks_for_certificates(
    servers: dict[str, Command],
    weights: tuple[str, dict[str, torch.Tensor]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    of_the_system: bool,
) -> None:
    path, tensors = weights
    upstream, model, copy = servers["tls"].url, ("--model-id", "a b"), tmp_path / "copy.pt"
    assert aiosync.cli.main(["push", path, upstream, *model, *with_files(TLS_CLIENT)]) == 0
    ca, good = with_files(("ca.pem", "good.pem"))
    trusted = ("--upstream-tls-ca", ca)
    if of_the_system:
        monkeypatch.setenv("SSL_CERT_FILE", ca)
        trusted = ("--upstream-tls",)
    shown = ("--upstream-tls-cert", good, "--upstream-tls-key", good)
    here = f"unix://{tmp_path / 'here'}"
    args = ("--listen", here, "--upstream", upstream, *model, *trusted, *shown)
    with serving(tmp_path / "below", *args) as server:
        assert aiosync.cli.main(["pull", server.url, str(copy), *model]) == 0
    assert_same(load_weights(copy), tensors)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_servers_form_a_tree(tmp_path: Path) -> None:
    def told() -> Any:
        (model,) = json.loads(run("status", root.url, "--json").stdout)["models"] or [None]
        return model and [(each["serves"], each["behind"]) for each in model["workers"]]

    with serving(tmp_path / "root", "--listen", URL, "--fanout", "1") as root:
        address = free_address()
        below = ("--listen", URL, "--upstream", root.url, "--model-id", "policy")
        with serving(tmp_path / "below", *below, "--advertise", address):
            wait_until(lambda: told() == [(address, None)])
    wrong = run("serve", *below, "--advertise", "unix:///tmp/here")
    assert wrong.returncode == 2
    assert "advertise= must be a tcp://host:port" in wrong.stderr


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_round_trip_with_tls(
    servers: dict[str, Command],
    weights: tuple[str, dict[str, torch.Tensor]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, tensors = weights
    url = servers["tls"].url
    options = [*with_files(TLS_CLIENT), "--model-id", "a b"]
    assert aiosync.cli.main(["push", path, url, *options]) == 0
    # Each push starts a new epoch.
    assert aiosync.cli.main(["push", path, url, *options]) == 0
    assert aiosync.cli.main(["pull", url, str(tmp_path / "copy.pt"), *options]) == 0
    assert_same(load_weights(tmp_path / "copy.pt"), tensors)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" of ")[0] for line in lines] == [
        "Pushed a b: version 1",
        "Pushed a b: version 1",
        "Pulled a b: version 1",
    ]
    epochs = [line.split()[7] for line in lines]
    assert epochs[0] != epochs[1] == epochs[2]
    newer = ("--min-version", "2", "--timeout", "3")
    status, text = refused(capsys, "pull", url, str(tmp_path / "x.pt"), *options, *newer)
    assert (status, "--min-version may be too high: each `aiosync push`" in text) == (1, True)
    assert text.endswith(
        " See reference/errors-updates#recvtimeout in the documentation of aiosync.\n"
    )
    # Wrong TLS options and model ids are refused in one line.
    status, text = refused(capsys, "status", url)
    assert (status, "TLS" in text) == (1, True)
    foreign = ("--tls-ca", str(certificates().folder / "other-ca.pem"))
    status, text = refused(capsys, "status", url, *foreign)
    assert (status, "certificate" in text) == (1, True)
    status, text = refused(capsys, "push", path, url, *with_files(TLS_CLIENT))
    assert status == 1
    assert "does not serve model 'policy'; it serves: a b" in text
    status, text = refused(
        capsys, "pull", url, str(tmp_path / "x.pt"), *with_files(TLS_CLIENT), "--model-id", "c"
    )
    assert status == 1
    assert "does not serve model 'c'; it serves: a b" in text


# -- failures ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_wrong_token_is_one_line(
    servers: dict[str, Command],
    weights: tuple[str, dict[str, torch.Tensor]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = servers["token"].url
    given = ("--token-file", written(tmp_path / "wrong", "something else entirely"))
    target = str(tmp_path / "copy.pt")
    for args in (("status", url), ("push", weights[0], url), ("pull", url, target)):
        status, text = refused(capsys, *args, *given)
        assert (status, "tokens are not the same" in text) == (1, True)
        assert "something else entirely" not in text
        status, text = refused(capsys, *args)
        assert (status, "give the dialer --token-file" in text) == (1, True)
    assert not Path(target).exists()
    monkeypatch.setenv("AIOSYNC_TOKEN", SECRET)
    assert aiosync.cli.main(["status", url]) == 0
    # The file counts, not the variable.
    status, text = refused(capsys, "status", url, *given)
    assert status == 1
    status, text = refused(capsys, "status", servers["plain"].url)
    assert (status, "the listener has none" in text) == (1, True)
    capsys.readouterr()
    assert aiosync.cli.main(["status", url, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["refused"] == {"AuthError": 7}


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_pull_token_pulls_and_does_not_push(
    folder: Path,
    token_file: str,
    weights: tuple[str, dict[str, torch.Tensor]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    readers = written(tmp_path / "readers", "another secret, for the workers")
    own, others = ("--token-file", token_file), ("--token-file", readers)
    args = ("--listen", f"unix://{folder / 'two'}", *own, "--pull-token-file", readers)
    with serving(folder / "two-tokens", *args) as server:
        assert aiosync.cli.main(["push", weights[0], server.url, *own]) == 0
        assert aiosync.cli.main(["pull", server.url, str(tmp_path / "x.pt"), *others]) == 0
        assert_same(load_weights(tmp_path / "x.pt"), weights[1])
        status, text = refused(capsys, "push", weights[0], server.url, *others)
        assert status == 1
        assert "AuthError: " in text and "may pull and subscribe, not push 'policy'" in text
        assert "--token-file" in text and "token=" not in text
        wait_until(lambda: "not push 'policy'" in server.log.read_text())
    status, text = refused(capsys, "serve", *args[:2], "--pull-token-file", readers)
    assert (status, "--pull-token-file needs another token beside it" in text) == (2, True)


FOLLOWING = ["serve", "--listen", URL, "--upstream", "tcp://127.0.0.1:1", "--model-id", "policy"]


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["serve", "--listen", "tcp://0.0.0.0:0"], "pass --token-file"),
        (
            ["serve", "--listen", "tcp://0.0.0.0:0", "--tls-ca", "{file}"],
            "needs --tls-cert and --tls-key",
        ),
        (["serve", "--listen", "nonsense"], "is not an address"),
        (["serve", "--listen", "tcp://127.0.0.1:0", "--token-file", "{no}"], "cannot be read"),
        (["serve", "--listen", "tcp://127.0.0.1:0", "--token-file", "{empty}"], "is empty"),
        (
            ["serve", "--listen", "tcp://127.0.0.1:0", "--tls-key", "{file}"],
            "--tls-key needs --tls-cert",
        ),
        (["serve", "--listen", "tcp://127.0.0.1:0", "--store", "{file}"], "cannot be used"),
        (["serve", "--listen", "tcp://127.0.0.1:{busy}"], "listens there"),
        (["push", "{no}.pt", "tcp://127.0.0.1:1"], "No such file"),
        (["push", "{folder}", "tcp://127.0.0.1:1"], "must end in one of"),
        (["push", "{damaged}.pt", "tcp://127.0.0.1:1"], "damaged"),
        (["push", "{file}.pt", "tcp://127.0.0.1:1", "--model-id", ""], "model is empty"),
        (["pull", "tcp://127.0.0.1:1", "copy.pt", "--model-id", ""], "model is empty"),
        (["serve", "--listen", "tcp://127.0.0.1:0", "--model-id", ""], "model is empty"),
        (["push", "{file}.xyz", "tcp://127.0.0.1:1"], "must end in one of"),
        (["push", "{file}.pt", "tcp://127.0.0.1:0"], "has no port"),
        (["push", "{file}.pt", "tcp://user:{secret}@127.0.0.1:1"], "must not contain credentials"),
        (["pull", "tcp://127.0.0.1:1", "{no}/copy.pt"], "there is no folder"),
        (["pull", "tcp://127.0.0.1:1", "{file}.pt/copy.pt"], "there is no folder"),
        (["pull", "tcp://127.0.0.1:1", "copy.xyz"], "must end in one of"),
        (["pull", "tcp://127.0.0.1:1", "copy.pt", "--tls-ca", "{no}"], "cannot be used"),
        (["status", "http://127.0.0.1:1"], "is not an address"),
        (["status", "tcp://127.0.0.1:1", "--token-file", "{no}"], "cannot be read"),
        (["status", "tcp://127.0.0.1:1", "--token-file", "/dev/zero"], "it is a device"),
        (["status", "tcp://127.0.0.1:1", "--token-file", "{socket}"], "cannot be read"),
        (["status", "tcp://127.0.0.1:1", "--tls-ca", "{fifo}"], "cannot be used"),
        (["status", "tcp://127.0.0.1:1", "--tls-cert", "{fifo}"], "cannot be used"),
        (["push", "{fifo}", "tcp://127.0.0.1:1"], "it is no regular file"),
        (["serve", "--listen", "tcp://127.0.0.1:0", "--store", "{fifo}"], "cannot be used"),
        (["serve", "--listen", "tcp://127.0.0.1:0", "--store", "/dev/null"], "cannot be used"),
        (["serve", "--listen", "tcp://127.0.0.1:0", "--store-deltas"], "-deltas needs --store"),
        (["serve", "--listen", "tcp://127.0.0.1:0", "--streams", "2"], "need --upstream"),
        (FOLLOWING[:-2], "follows named models: pass --model-id"),
        ([*FOLLOWING[:3], "--upstream-tls"], "--upstream-tls, --streams and --advertise need"),
        ([*FOLLOWING, "--upstream-tls-key", "{file}"], "-key needs --upstream-tls-cert"),
        ([*FOLLOWING, "--upstream-tls-ca", "{no}"], "cannot be used"),
        ([*FOLLOWING, "--upstream-tls-cert", "{fifo}"], "cannot be used"),
    ],
)
def test_wrong_usage_is_status_2(
    args: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, empty = tmp_path / "file.pt", tmp_path / "empty"
    torch.save({"a": torch.zeros(2)}, file)
    # An executable file is still no folder.
    file.chmod(0o755)
    (tmp_path / "damaged.pt").write_bytes(b"PK\x03\x04 and nothing that makes sense")
    empty.touch()
    os.mkfifo(tmp_path / "fifo.pt")
    with (
        socket.create_server(("127.0.0.1", 0)) as busy,
        contextlib.closing(socket.socket(socket.AF_UNIX)) as unix,
    ):
        unix.bind(str(tmp_path / "socket"))
        names = {
            "file": str(file.with_suffix("")),
            "no": str(tmp_path / "no"),
            "damaged": str(tmp_path / "damaged"),
            "empty": str(empty),
            "fifo": str(tmp_path / "fifo.pt"),
            "socket": str(tmp_path / "socket"),
            "folder": str(tmp_path),
            "busy": str(busy.getsockname()[1]),
            "secret": SECRET.replace(" ", "-"),
        }
        given = [arg.format(**names) for arg in args]
        if args[0] == "serve":
            file.with_suffix("").touch()
        status, shown = refused(capsys, *given)
    assert status == 2, shown
    assert text in shown
    assert names["secret"] not in shown
    assert shown.startswith(f"aiosync {args[0]}:")


def test_a_token_may_come_through_a_pipe_that_is_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def give() -> None:
        # open() returns once the command has opened the pipe, too.
        with pipe.open("w") as file:
            pipe.unlink()
            file.write(SECRET)

    giver = threading.Thread(target=give, daemon=True)
    giver.start()
    status, text = refused(capsys, "status", "tcp://127.0.0.1:1", "--token-file", str(pipe))
    giver.join()
    assert (status, "cannot be reached" in text) == (1, True)


@pytest.mark.slow
def test_a_pipe_into_which_nobody_writes_is_no_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    given = ("--token-file", str(tmp_path / "pipe"))
    status, text = refused(capsys, "status", "tcp://127.0.0.1:1", *given)
    assert (status, "nobody has written a token to it" in text) == (2, True)


def test_what_fails_on_the_way_is_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unix = f"unix://{tmp_path / 'nobody'}"
    good = tmp_path / "good.pt"
    torch.save({"a": torch.zeros(2)}, good)
    for args, text in (
        (("status", unix), "cannot be reached"),
        (("push", str(good), unix), "cannot be reached"),
        (("pull", unix, str(tmp_path / "copy.pt")), "cannot be reached"),
    ):
        status, shown = refused(capsys, *args)
        assert (status, text in shown) == (1, True), shown
    store = tmp_path / "store"
    store.mkdir()
    (store / "policy.safetensors").write_text("rubbish")
    status, shown = refused(capsys, "serve", "--listen", unix, "--store", str(store))
    assert (status, "StoreError" in shown) == (1, True)
    assert not (tmp_path / "nobody").exists()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_ctrl_c_ends_a_pull_that_waits(
    servers: dict[str, Command], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = servers["plain"].url

    def waits() -> bool:
        capsys.readouterr()
        assert aiosync.cli.main(["status", url, "--json"]) == 0
        models = json.loads(capsys.readouterr().out)["models"]
        return any(model["model_id"] == "never" and model["workers"] for model in models)

    args = ("pull", url, str(tmp_path / "copy.pt"), "--model-id", "never")
    with contextlib.closing(Command(tmp_path / "said", *args)) as pulling:
        wait_until(waits)
        pulling.send_signal(signal.SIGINT)
        assert pulling.ended() == (130, "", "Stopped by Ctrl-C.\n")
    assert os.listdir(tmp_path) == ["said"]


# -- effects of a push ------------------------------------------------------------------------


async def push(path: Path, url: str, *flags: str) -> int:
    args = ["push", str(path), url, "--timeout", "20", *flags]
    return await asyncio.to_thread(aiosync.cli.main, args)


@pytest.mark.asyncio
@pytest.mark.parametrize("old", [False, True], ids=["zip", "old"])
@pytest.mark.parametrize("inside", [False, True], ids=["plain", "inside of a value"])
async def test_what_a_file_does_not_hold_is_not_sent(
    old: bool, inside: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "w.pt"
    huge = torch.zeros(1).expand(2**20, 2**14)
    weights = {"a": torch.ones(1), "w": {"of": [huge]} if inside else huge}
    torch.save(weights, path, _use_new_zipfile_serialization=not old)
    views = torch.zeros(2**18).as_strided
    torch.save({str(at): views((2**17,), (1,), at) for at in range(100)}, tmp_path / "views.pt")
    torch.save({"a": torch.ones(1), "w": torch.ones(1).expand(9)}, tmp_path / "small.pt")
    async with WeightServer(URL) as server:
        for refused in (path, tmp_path / "views.pt"):
            assert await push(refused, server.url) == 1
            assert "than the file holds" in capsys.readouterr().err
        assert server.status()["models"] == []
        assert await push(tmp_path / "small.pt", server.url) == 0


@pytest.mark.asyncio
async def test_a_push_says_why_it_was_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, store = tmp_path / "w.pt", tmp_path / "store"
    torch.save({"w": torch.zeros(3)}, path)
    torch.save({"w": torch.eye(3).to_sparse()}, tmp_path / "sparse.pt")

    def said(text: str) -> bool:
        return text in capsys.readouterr().err

    async with WeightServer(URL, store=store) as server:
        assert await push(tmp_path / "sparse.pt", server.url) == 1
        assert said("cannot be sent")
        # The refused push has not registered a model.
        assert server.status()["models"] == []
        async with trainer(server):
            assert await push(path, server.url) == 1
            assert said("is already pushing model 'policy' to this server")

        def refuse(*_args: Any) -> None:
            raise StoreError("No space left on device")

        await until(lambda: described(server)["trainer"] is None)
        monkeypatch.setattr(WeightStore, "save", refuse)
        assert await push(path, server.url) == 1
        assert said("StoreError: No space left on device")
    source = aiosync.TCPWeightSyncScheme(URL)
    source.init_on_sender(weights={"w": torch.zeros(3)})
    async with source:
        await source.connect()
        assert await push(path, source.address) == 1
        assert said("is a trainer, not a weight server")


@pytest.mark.asyncio
@pytest.mark.parametrize("call", ["connect", "send"])
@pytest.mark.parametrize("renames", [False, True], ids=["in place", "renamed"])
@pytest.mark.parametrize("is_folder", [False, True], ids=["file", "folder"])
async def test_a_push_notices_that_its_file_is_written_to(
    is_folder: bool,
    renames: bool,
    call: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / ("model.safetensors" if is_folder else "w.pt")
    save_weights(path, {"w": torch.zeros(1000)})
    original = getattr(aiosync.TCPWeightSyncScheme, call)

    async def save_the_next_one(*args: Any, **options: Any) -> Any:
        if renames:
            save_weights(path, {"w": torch.ones(1000)})
        else:
            content = path.read_bytes()
            with path.open("r+b") as file:
                file.write(content)
        return await original(*args, **options)

    monkeypatch.setattr(aiosync.TCPWeightSyncScheme, call, save_the_next_one)
    async with WeightServer(URL) as server:
        status = await push(tmp_path if is_folder else path, server.url)
        error = capsys.readouterr().err
        if renames:
            assert (status, error) == (0, "")
            pulled = await WeightClient(server.url).pull()
            assert torch.equal(pulled.mapping()["w"], torch.zeros(1000))
        else:
            assert (status, error.count("\n")) == (1, 1)
            assert f"{path}: changed while it was read" in error
            # Noticed before the send, the change reaches no worker.
            assert described(server)["version"] == (0 if call == "connect" else 1)


@pytest.mark.asyncio
@pytest.mark.parametrize("removes", [True, False])
async def test_a_push_goes_on_with_the_old_file_from_its_first_wait_on(
    removes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "w.pt"
    save_weights(path, {"w": torch.zeros(1000)})
    original = WeightClient.status

    async def status(self: WeightClient, **options: Any) -> Any:
        if removes:
            path.unlink()
        else:
            save_weights(path, {"w": torch.ones(1)})
        return await original(self, **options)

    monkeypatch.setattr(WeightClient, "status", status)
    async with WeightServer(URL) as server:
        assert await push(path, server.url) == 0
        pulled = await WeightClient(server.url).pull()
        assert torch.equal(pulled.mapping()["w"], torch.zeros(1000))


@pytest.mark.asyncio
async def test_a_link_to_nothing_beside_the_weights_is_not_read(tmp_path: Path) -> None:
    save_weights(tmp_path, {"w": torch.zeros(3)})
    (tmp_path / "consolidated.safetensors").symlink_to(tmp_path / "nowhere")
    async with WeightServer(URL) as server:
        assert await push(tmp_path, server.url) == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("models", [1, [1], {"a": 1}])
async def test_a_status_of_another_release_is_one_line(
    models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def status(*_args: Any, **_options: Any) -> Any:
        return {"models": models}

    torch.save({"w": torch.zeros(3)}, tmp_path / "w.pt")
    monkeypatch.setattr(WeightClient, "status", status)
    assert await push(tmp_path / "w.pt", "tcp://127.0.0.1:1") == 1
    assert "sent a status of another release" in capsys.readouterr().err


@pytest.mark.asyncio
async def test_a_status_is_safe_to_print(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = "\x1b]0;x\x07"

    async def status(*_args: Any, **_options: Any) -> Any:
        return {
            "url": hostile,
            "aiosync": hostile,
            "uptime_seconds": 1.0,
            "connections": hostile,
            "accepted": hostile,
            "store": hostile,
            "models": [],
            "refused": {hostile: hostile},
            "ended": {hostile: [hostile]},
        }

    monkeypatch.setattr(WeightClient, "status", status)
    assert await asyncio.to_thread(aiosync.cli.main, ["status", "tcp://127.0.0.1:1"]) == 0
    shown = capsys.readouterr()
    assert (shown.err, "Refused" in shown.out) == ("", True)
    assert not {"\x1b", "\x07"} & set(shown.out)


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize("take_over", [False, True])
async def test_a_push_that_is_cut_does_not_undo_another(
    take_over: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first.pt", tmp_path / "second.pt"
    torch.save({"w": torch.zeros(2**18)}, first)
    torch.save({"w": torch.ones(2)}, second)
    async with WeightServer(URL) as server, FaultProxy(server.url) as proxy:
        gone = Plan(forward=Faults(cut_at=0))
        half = Plan(forward=Faults(cut_at=2**19))
        proxy.plan = lambda number: [None, half, gone][min(number, 2)]
        flags = ["--take-over"] if take_over else []
        pushing = asyncio.create_task(push(first, proxy.url, *flags))
        await until(lambda: proxy.connections > 2)
        assert await push(second, server.url) == 0
        proxy.plan = None
        assert await pushing == (0 if take_over else 1)
        nbytes = described(server)["nbytes"]
        if take_over:
            assert nbytes == 2**20
        else:
            assert nbytes == 64
            assert "push again, with --take-over to go on" in capsys.readouterr().err


# -- signals and kills ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_signals_end_a_server_in_order(
    folder: Path, weights: tuple[str, dict[str, torch.Tensor]]
) -> None:
    tcp = "tcp://127.0.0.1:0"
    unix = f"unix://{folder / 'ends'}"
    store = folder / "ends-store"
    with (
        serving(folder / "term", "--listen", unix, "--store", str(store), fresh=True) as term,
        serving(folder / "int", "--listen", tcp, fresh=True) as interrupted,
    ):
        assert aiosync.cli.main(["push", weights[0], term.url]) == 0
        assert term.end(signal.SIGTERM) == (0, "")
        assert interrupted.end(signal.SIGINT) == (130, "")
    log = term.log.read_text().splitlines()
    assert len(log) == 1 and "policy: version 1 of epoch" in log[0]
    assert interrupted.log.read_text() == "Stopped by Ctrl-C.\n"
    assert not (folder / "ends").exists()
    stored = WeightStore(store).load("policy")
    assert stored is not None and stored.version == 1


STUCK = """
import sys, time
from aiosync.server import WeightStore
WeightStore.save = lambda *args: time.sleep(600)
from aiosync.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_second_signal_ends_a_server_at_once(
    folder: Path,
    weights: tuple[str, dict[str, torch.Tensor]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    program = [sys.executable, "-c", STUCK]
    unix = f"unix://{folder / 'stuck'}"
    args = ("--listen", unix, "--store", str(folder / "stuck-store"))
    with serving(folder / "stuck-log", *args, program=program) as server:
        # The trainer gets an error, since the version is not on disk.
        status, text = refused(capsys, "push", weights[0], server.url, "--timeout", "5")
        assert (status, "AckTimeout" in text) == (1, True)
        server.send_signal(signal.SIGINT)
        # The server ends, but waits for the disk.
        wait_until(lambda: not (folder / "stuck").exists())
        assert server.poll() is None
        server.send_signal(signal.SIGINT)
        assert server.wait() == 130


def pushed(path: str, url: str) -> contextlib.closing[Command]:
    """Start a push, which goes on in the background."""
    args = ("push", path, url, "--timeout", "60")
    return contextlib.closing(Command(Path(f"{path}-pushed"), *args))


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_killed_server_has_the_last_complete_version(folder: Path, tmp_path: Path) -> None:
    # Each file has 32 MiB.
    big = [{"w": torch.full((8, 2**20), float(value))} for value in (1, 2)]
    for number, tensors in enumerate(big, 1):
        torch.save(tensors, tmp_path / f"{number}.pt")
    store = folder / "kill-store"
    args = ("--listen", f"unix://{folder / 'kill'}", "--store", str(store))
    copy = tmp_path / "copy.pt"
    with serving(folder / "kill-1", *args) as first:
        assert aiosync.cli.main(["push", str(tmp_path / "1.pt"), first.url]) == 0
        with pushed(str(tmp_path / "2.pt"), first.url) as pushing:
            before = os.stat(store / "policy.safetensors").st_ino
            wait_until(
                lambda: (
                    any(name.endswith(".tmp") for name in os.listdir(store))
                    or os.stat(store / "policy.safetensors").st_ino != before
                )
            )
            first.close()
            # load() checks every byte.
            stored = WeightStore(store).load("policy")
            assert stored is not None
            (name,) = [leaf.name for leaf in stored.layout.manifest.leaves]
            value = float(stored.buffer.views(stored.layout)[0][0, 0])
            assert (name, value in (1.0, 2.0)) == ("w", True)
            # The push goes on with the next server, and ends well.
            with serving(folder / "kill-2", *args) as second:
                assert second.url == args[1]
                status, out, err = pushing.ended()
                assert (status, err) == (0, "")
                assert out.startswith("Pushed policy: version 1 of epoch ")
                second.close()
    with serving(folder / "kill-3", *args) as third:
        assert aiosync.cli.main(["pull", third.url, str(copy)]) == 0
        assert_same(load_weights(copy), big[1])


# -- on a terminal ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_what_a_terminal_shows_is_true(folder: Path) -> None:
    url = f"unix://{folder / 'tty'}"
    with Terminal(160) as terminal:
        server = terminal.start("serve", "--listen", url)
        terminal.read_until(lambda shown: f"{url}\r\n" in shown)
        pulling = terminal.start("pull", url, str(folder / "x.pt"), quiet=True)
        # The progress bar shows these texts.
        for text in ("pull policy", f"waits for {url}"):
            terminal.read_until(lambda shown, text=text: text in shown)
        pulling.send_signal(signal.SIGINT)
        assert pulling.wait(PATIENCE) == 130
        server.send_signal(signal.SIGINT)
        terminal.read_until(lambda shown: shown.count("Stopped by Ctrl-C.") == 2)
        assert server.wait(PATIENCE) == 130
        # The command has shown the cursor again.
        assert b"\x1b[?25h" in terminal.raw


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_on_a_terminal_a_push_shows_how_much_there_is(
    servers: dict[str, Command], weights: tuple[str, dict[str, torch.Tensor]]
) -> None:
    with Terminal(80) as terminal:
        terminal.start("push", weights[0], servers["plain"].url, "--model-id", "shown", quiet=True)
        terminal.read_until(lambda shown: " of 240." in shown)

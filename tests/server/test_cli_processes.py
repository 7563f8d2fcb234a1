"""``aiosync serve`` as a process that is interrupted, ended, killed, and shown on a terminal."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("safetensors")

import torch

import aiosync.cli
from aiosync.server import WeightStore
from tests.cli._serving import (
    Command,
    Terminal,
    assert_same,
    refused,
    serving,
    wait_for,
    write_weights,
)
from tests.schemes._harness import PATIENCE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("commands")


@pytest.fixture
def weights(tmp_path: Path) -> tuple[str, dict[str, torch.Tensor]]:
    return write_weights(tmp_path)


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
        # The trainer is told that the version is not on disk.
        status, text = refused(capsys, "push", weights[0], server.url, "--timeout", "1")
        assert (status, "AckTimeout" in text) == (1, True)
        server.send_signal(signal.SIGINT)
        wait_for(lambda: not (folder / "stuck").exists())  # it ends, and waits for the disk
        assert server.poll() is None
        server.send_signal(signal.SIGINT)
        assert server.wait() == 130


def pushed(path: str, url: str) -> contextlib.closing[Command]:
    """A push that is under way."""
    args = ("push", path, url, "--timeout", "60")
    return contextlib.closing(Command(Path(f"{path}-pushed"), *args))


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_killed_server_has_the_last_complete_version(folder: Path, tmp_path: Path) -> None:
    big = [{"w": torch.full((8, 2**20), float(value))} for value in (1, 2)]  # 32 MiB
    for number, tensors in enumerate(big, 1):
        torch.save(tensors, tmp_path / f"{number}.pt")
    store = folder / "kill-store"
    args = ("--listen", f"unix://{folder / 'kill'}", "--store", str(store))
    copy = tmp_path / "copy.pt"
    with serving(folder / "kill-1", *args) as first:
        assert aiosync.cli.main(["push", str(tmp_path / "1.pt"), first.url]) == 0
        with pushed(str(tmp_path / "2.pt"), first.url) as pushing:
            before = os.stat(store / "policy.safetensors").st_ino
            wait_for(
                lambda: (
                    any(name.endswith(".tmp") for name in os.listdir(store))
                    or os.stat(store / "policy.safetensors").st_ino != before
                )
            )
            first.close()
            stored = WeightStore(store).load("policy")  # which checks every byte
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
        assert_same(copy, big[1])


# -- on a terminal ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_what_a_terminal_shows_is_true(folder: Path) -> None:
    url = f"unix://{folder / 'tty'}"
    with Terminal(160) as terminal:
        server = terminal.start("serve", "--listen", url)
        terminal.read_until(lambda shown: f"{url}\r\n" in shown)
        pulling = terminal.start("pull", url, str(folder / "x.pt"), quiet=True)
        for text in ("pull policy", f"waits for {url}"):  # the bar
            terminal.read_until(lambda shown, text=text: text in shown)
        pulling.send_signal(signal.SIGINT)
        assert pulling.wait(PATIENCE) == 130
        server.send_signal(signal.SIGINT)
        terminal.read_until(lambda shown: shown.count("Stopped by Ctrl-C.") == 2)
        assert server.wait(PATIENCE) == 130
        assert b"\x1b[?25h" in terminal.raw  # the cursor is back

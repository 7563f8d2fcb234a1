"""What the commands say and leave behind where the machine or the user ends them early."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")

import torch

import aiosync
from aiosync.cli import _files
from aiosync.cli._files import save_weights
from aiosync.cli._transfer import _ending_in_order
from aiosync.errors import ConfigError
from aiosync.server import WeightServer
from tests._certificates import certificates
from tests.cli._serving import command, environment, refused
from tests.schemes._harness import PATIENCE


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("failing", [False, True])
def test_a_signal_leaves_no_temporary_file(
    number: signal.Signals, failing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*_args: object) -> None:
        assert len(os.listdir(tmp_path)) == 1
        try:
            os.kill(os.getpid(), number)
        except SystemExit:
            if failing:  # as torch, whose own clean-up then fails
                raise RuntimeError("unexpected pos 64 vs 0") from None
            raise

    monkeypatch.setattr(_files, "_write_torch", write)
    before = signal.signal(number, signal.SIG_DFL)  # these tests may run with it ignored
    try:
        with pytest.raises(SystemExit) as caught, _ending_in_order():
            save_weights(tmp_path / "x.pt", {"w": torch.zeros(2)})
        assert caught.value.code == 128 + number
        assert os.listdir(tmp_path) == []
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(*_args: object) -> None:  # as torch.save(), whose own clean-up then fails
        try:
            raise OSError(28, "No space left on device")
        finally:
            raise RuntimeError("unexpected pos 64 vs 0")

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(ConfigError, match="cannot be written: No space left on device"):
        save_weights(tmp_path / "x.pt", {"w": torch.zeros(2)})


def test_model_ids_are_a_list() -> None:
    with pytest.raises(ConfigError, match=r"must be a list of names: pass \['policy'\]"):
        WeightServer("tcp://127.0.0.1:0", model_ids="policy")


def test_a_key_with_a_password_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from cryptography.hazmat.primitives import serialization

    cert, path = certificates().folder / "good.pem", tmp_path / "key.pem"
    key = serialization.load_pem_private_key(cert.read_bytes(), None)
    encrypted = serialization.BestAvailableEncryption(b"hunter2")
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encrypted)
    )
    files = ("--tls-cert", str(cert), "--tls-key", str(path))
    status, text = refused(capsys, "serve", "--listen", "tcp://127.0.0.1:0", *files)
    assert status == 2
    assert "is encrypted: the command needs a key without a password" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["serve", "doctor"])
def test_too_few_descriptors_are_one_sentence(name: str) -> None:
    listen = ["--listen", "tcp://127.0.0.1:0"] if name == "serve" else []
    done = subprocess.run(
        ["sh", "-c", 'ulimit -n 10; exec "$@"', "sh", *command(name, *listen)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        env=environment(),
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr and "never awaited" not in done.stderr
    if name == "serve":
        line = r"aiosync serve: Too many open files: this process may open too few; .*\n"
        assert re.fullmatch(line, done.stderr), done.stderr
    else:
        assert done.stderr == ""


def test_run_without_a_loop_closes_the_coroutine(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(sys.modules["aiosync._run"], "new_event_loop", fail)
    with pytest.raises(OSError, match="Too many open files"):
        aiosync.run(asyncio.sleep(0))

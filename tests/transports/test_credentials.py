"""Accepted and refused tokens and certificates, whose secrets appear in no text or pickle."""

from __future__ import annotations

import copy
import pickle
import re
import ssl
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from aiosync.errors import ConfigError
from aiosync.rendezvous.listener import StreamListener
from aiosync.transports.credentials import TLS, Credentials, Secret, read_token
from tests._certificates import certificates

TOKEN = "correct horse battery staple"


def test_secrets_do_not_show() -> None:
    credentials = Credentials(token=TOKEN, tls=TLS(cert="a.pem", password="hunter2"))
    assert credentials.token_bytes == TOKEN.encode()
    data = pickle.dumps(credentials)
    assert pickle.loads(data) == copy.deepcopy(credentials) == credentials
    for shown in (data, pickle.dumps(credentials, 2), f"{credentials} {credentials.tls}".encode()):
        assert b"horse" not in shown and b"hunter2" not in shown
    assert Secret(TOKEN) != Secret("another") and Secret(TOKEN) != TOKEN
    assert hash(Secret(TOKEN)) == hash(Secret(TOKEN.encode()))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        *((partial(Secret, value), "token") for value in ("", b"", 5, None, bytearray(b"x"))),
        *((partial(Credentials, tls=tls), "tls must be") for tls in (True, "cert.pem", 5)),
        (partial(TLS, key="key.pem"), "key"),
        (partial(TLS, cert="cert.pem", verify_clients=True), "ca="),
        (TLS(ca="ca.pem").listening_context, "cert="),
    ],
)
def test_what_makes_no_sense(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make()


def test_contexts_check_what_they_have_to() -> None:
    files = certificates()
    listening = files.listening.listening_context()
    assert listening.verify_mode == ssl.CERT_NONE
    assert files.both.listening_context().verify_mode == ssl.CERT_REQUIRED
    dialling = files.dialling.dialling_context()
    assert dialling.verify_mode == ssl.CERT_REQUIRED and dialling.check_hostname
    assert dialling.minimum_version >= ssl.TLSVersion.TLSv1_2 <= listening.minimum_version
    assert pickle.loads(pickle.dumps(files.both)) == files.both
    credentials = Credentials(tls=listening)
    assert credentials.listening_context() is listening
    with pytest.raises(ConfigError, match=r"another process: pass tls=aiosync\.TLS"):
        pickle.dumps(credentials)


@pytest.mark.parametrize(
    ("content", "token"),
    [
        (b"token", b"token"),
        (b"token\n", b"token"),
        (b"token\r\n", b"token"),
        (b"token\r", b"token\r"),
        (b"token\n\n", b"token\n"),
        (b"token\r\r\n", b"token\r"),
    ],
)
def test_a_token_file_is_read_without_one_newline(
    content: bytes, token: bytes, tmp_path: Path
) -> None:
    """Any other byte at the end may be one of a random token."""
    file = tmp_path / "token"
    file.write_bytes(content)
    assert read_token(file, "--token-file") == token


@pytest.mark.parametrize("url", ["tcp://0.0.0.0:0", "tcp://127.0.0.1:0"])
def test_a_token_that_can_be_guessed(url: str) -> None:
    """A listener that other hosts reach refuses tokens below 8 bytes and warns below 16."""
    open_to_others = "127" not in url

    def listen(nbytes: int) -> None:
        StreamListener(url, credentials=Credentials(token="t" * nbytes)).close()

    for nbytes in (1, 7, 8, 15):
        refused = pytest.raises(ConfigError, match=f"{nbytes} bytes")
        warned = pytest.warns(UserWarning, match=f"{nbytes} bytes")
        with (refused if nbytes < 8 else warned) if open_to_others else nullcontext():
            listen(nbytes)
    listen(16)


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    pem = (certificates().folder / "good.pem").read_bytes()
    at = pem.index(b"-----BEGIN CERTIFICATE")
    cert, key, broken = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "broken.pem"
    cert.write_bytes(pem[at:])
    key.write_bytes(pem[:at])
    broken.write_text("nothing of use")
    none = tmp_path / "none.pem"
    TLS(cert=cert, key=key).listening_context()
    foreign = certificates().folder / "foreign.pem"
    for one, two in ((cert, none), (cert, broken), (none, key), (key, cert), (foreign, key)):
        with pytest.raises(ConfigError, match=re.escape(str(one))) as caught:
            TLS(cert=one, key=two).listening_context()
        assert str(two) in str(caught.value)
    for path in (broken, none):
        with pytest.raises(ConfigError, match=path.name):
            TLS(ca=path).dialling_context()


def test_an_encrypted_key_does_not_ask_on_the_terminal(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    cert, path = certificates().folder / "good.pem", tmp_path / "key.pem"
    key = serialization.load_pem_private_key(cert.read_bytes(), None)
    encrypted = serialization.BestAvailableEncryption(b"hunter2")
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encrypted)
    )
    TLS(cert=cert, key=path, password="hunter2").listening_context()
    for password in (None, "wrong"):
        with pytest.raises(ConfigError, match="password") as caught:
            TLS(cert=cert, key=path, password=password).listening_context()
        assert "hunter2" not in str(caught.value) and str(path) in str(caught.value)

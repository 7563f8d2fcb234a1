"""Tokens and certificates: what is accepted, what is refused, and that nothing of it shows."""

from __future__ import annotations

import copy
import pickle
import re
import ssl
from pathlib import Path
from typing import Any

import pytest

from aiosync.errors import ConfigError
from aiosync.transports.credentials import TLS, Credentials, Secret
from tests._certificates import certificates, without_certificate

TOKEN = "correct horse battery staple"


def test_a_secret_does_not_show() -> None:
    secret = Secret(TOKEN)
    assert secret.value == TOKEN.encode()
    assert TOKEN not in repr(secret) + str(secret) + f"{secret}"
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        data = pickle.dumps(secret, protocol)
        assert b"horse" not in data
        assert pickle.loads(data) == secret
    assert pickle.dumps(secret) != pickle.dumps(secret)  # another mask each time
    assert copy.deepcopy(secret) == secret
    assert secret != Secret("another") and secret != TOKEN
    assert hash(secret) == hash(Secret(TOKEN.encode()))


@pytest.mark.parametrize("value", ["", b"", 5, None, bytearray(b"x")])
def test_what_is_no_token(value: Any) -> None:
    with pytest.raises(ConfigError):
        Secret(value)


def test_credentials_do_not_show() -> None:
    credentials = Credentials(token=TOKEN, tls=TLS(cert="a.pem", password="hunter2"))
    assert credentials.token_bytes == TOKEN.encode()
    for text in (repr(credentials), str(credentials), repr(credentials.tls)):
        assert "horse" not in text and "hunter2" not in text
    data = pickle.dumps(credentials)
    assert b"horse" not in data and b"hunter2" not in data
    assert pickle.loads(data) == credentials
    assert Credentials().token_bytes is None
    assert Credentials().listening_context() is None is Credentials().dialling_context()


def test_a_context_cannot_travel() -> None:
    context = ssl.create_default_context()
    credentials = Credentials(tls=context)
    assert credentials.dialling_context() is context
    with pytest.raises(ConfigError, match="another process"):
        pickle.dumps(credentials)


@pytest.mark.parametrize("tls", [True, "cert.pem", 5])
def test_what_is_no_tls(tls: Any) -> None:
    with pytest.raises(ConfigError, match="tls must be"):
        Credentials(tls=tls)


def test_tls_that_makes_no_sense() -> None:
    with pytest.raises(ConfigError, match="key"):
        TLS(key="key.pem")
    with pytest.raises(ConfigError, match="ca="):
        TLS(cert="cert.pem", verify_clients=True)
    with pytest.raises(ConfigError, match="cert="):
        TLS(ca="ca.pem").listening_context()


def test_contexts_check_what_they_have_to() -> None:
    files = certificates()
    listening = files.listening.listening_context()
    assert listening.verify_mode == ssl.CERT_NONE
    assert files.both.listening_context().verify_mode == ssl.CERT_REQUIRED
    dialling = files.dialling.dialling_context()
    assert dialling.verify_mode == ssl.CERT_REQUIRED and dialling.check_hostname
    assert dialling.minimum_version >= ssl.TLSVersion.TLSv1_2 <= listening.minimum_version
    assert pickle.loads(pickle.dumps(files.both)) == files.both


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    for path in (broken, tmp_path / "none.pem"):
        with pytest.raises(ConfigError, match=path.name):
            TLS(cert=path).listening_context()
        with pytest.raises(ConfigError, match=path.name):
            TLS(ca=path).dialling_context()


def test_it_is_said_which_file_cannot_be_used(tmp_path: Path) -> None:
    pem = (certificates().folder / "good.pem").read_bytes()
    at = pem.index(b"-----BEGIN CERTIFICATE")
    cert, key, broken = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "broken.pem"
    cert.write_bytes(pem[at:])
    key.write_bytes(pem[:at])
    broken.write_text("nothing of use")
    none = tmp_path / "none.pem"
    TLS(cert=cert, key=key).listening_context()
    for tls, text in (
        (TLS(cert=cert, key=none), f"the key file {none} cannot be used: No such file"),
        (TLS(cert=cert, key=broken), f"the key file {broken} cannot be used"),
        (TLS(cert=cert, key=tmp_path), f"the key file {tmp_path} cannot be used"),
        (TLS(cert=none, key=key), f"the certificate file {none} cannot be used: No such file"),
        (TLS(cert=broken, key=key), f"the certificate file {broken} cannot be used"),
        (TLS(cert=key, key=cert), f"the certificate file {key} cannot be used"),
        (TLS(cert=cert), f"key= is not given, and the certificate file {cert} has no key"),
        (
            TLS(cert=certificates().folder / "foreign.pem", key=key),
            f"the key in {key} does not belong to the certificate in",
        ),
    ):
        with pytest.raises(ConfigError, match=re.escape(text)):
            tls.listening_context()


def test_a_context_that_cannot_listen_is_refused() -> None:
    with pytest.raises(ConfigError, match="is for the side that dials"):
        Credentials(tls=ssl.create_default_context()).listening_context()
    server = without_certificate()
    with pytest.raises(ConfigError, match="has no certificate to show"):
        Credentials(tls=server).listening_context()
    server.sni_callback = lambda *_: None  # it may choose another context
    assert Credentials(tls=server).listening_context() is server
    files = certificates()
    for tls in (files.listening, files.both, files.expired):
        context = tls.listening_context()
        assert Credentials(tls=context).listening_context() is context
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        context = files.both.listening_context()
        context.minimum_version = context.maximum_version = version
        assert Credentials(tls=context).listening_context() is context


def test_an_encrypted_key_does_not_ask_on_the_terminal(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    pem = (certificates().folder / "good.pem").read_bytes()
    key = serialization.load_pem_private_key(pem, None)
    encrypted = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"hunter2"),
    )
    path = tmp_path / "key.pem"
    path.write_bytes(encrypted)
    cert = certificates().folder / "good.pem"
    TLS(cert=cert, key=path, password="hunter2").listening_context()
    for password in (None, "wrong"):
        with pytest.raises(ConfigError, match="password") as caught:
            TLS(cert=cert, key=path, password=password).listening_context()
        assert "hunter2" not in str(caught.value)
        assert str(path) in str(caught.value) and str(cert) not in str(caught.value)
        assert ("is encrypted" in str(caught.value)) == (password is None)

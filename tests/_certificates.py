"""Certificates for tests, made once per process: of a trusted and of a foreign authority."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import trustme

from aiosync import TLS


@dataclass(frozen=True)
class Certificates:
    """Ready-made TLS configurations for both sides of a link.

    Attributes:
        folder: Folder of the certificate files.
        listening: For a listener. It shows a certificate for localhost and 127.0.0.1.
        dialling: For a dialler. It trusts the authority.
        both: One object for both sides, which show and check certificates.
        foreign: Trusts another authority, and has a certificate of that one.
    """

    folder: Path
    listening: TLS
    dialling: TLS
    both: TLS
    foreign: TLS


@functools.cache
def certificates() -> Certificates:
    folder = Path(tempfile.mkdtemp(prefix="aiosync-certificates-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    authority, other = trustme.CA(), trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    other.cert_pem.write_to_path(folder / "other-ca.pem")
    issued = {
        "good": authority.issue_cert("localhost", "127.0.0.1"),
        "foreign": other.issue_cert("localhost", "127.0.0.1"),
    }
    for name, cert in issued.items():
        cert.private_key_and_cert_chain_pem.write_to_path(folder / f"{name}.pem")
    ca = folder / "ca.pem"
    return Certificates(
        folder=folder,
        listening=TLS(cert=folder / "good.pem"),
        dialling=TLS(ca=ca),
        both=TLS(cert=folder / "good.pem", ca=ca, verify_clients=True),
        foreign=TLS(cert=folder / "foreign.pem", ca=folder / "other-ca.pem"),
    )

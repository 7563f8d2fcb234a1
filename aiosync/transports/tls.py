"""Certificates of TLS, and the SSL contexts that are made of them.

``transports.tcp`` puts a link into TLS, and ``transports.tls_stream`` moves its bytes. Must not
import torch or the event loop.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, field

from aiosync.errors import ConfigError
from aiosync.transports.secret import Secret

__all__ = ["TLS"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TLS:
    """Certificates for a link, as names of files, so that this object can be pickled into workers.

    The side that listens shows ``cert``; the side that dials checks it against ``ca`` and the
    host name. With ``verify_clients`` the check is mutual: the side that dials must also show a
    certificate, which the side that listens checks against ``ca``. One object may serve both sides.

    Attributes:
        cert: PEM file of this end's certificate, followed by its chain.
        key: PEM file of the certificate's private key; ``None`` if the key is in ``cert``.
        ca: PEM file of the authorities to trust; ``None`` trusts those of the system.
        verify_clients: True lets the side that listens refuse peers without a certificate signed by
            ``ca``.
        hostname: Name that the certificate of the other end must have; ``None`` takes the
            host that was dialled, ``localhost`` for Unix sockets.
        password: Password of an encrypted key.
    """

    cert: str | os.PathLike[str] | None = None
    key: str | os.PathLike[str] | None = None
    ca: str | os.PathLike[str] | None = None
    verify_clients: bool = False
    hostname: str | None = None
    password: Secret | str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.password, str):
            object.__setattr__(self, "password", Secret(self.password))
        if self.key is not None and self.cert is None:
            raise ConfigError("TLS(key=...) needs cert=: the certificate that the key belongs to")
        if self.verify_clients and self.ca is None:
            raise ConfigError(
                "TLS(verify_clients=True) needs ca=: the authorities that sign the certificates "
                "of clients"
            )

    def listening_context(self) -> ssl.SSLContext:
        """Return the SSL context of the side that listens.

        Raises:
            ConfigError: There is no certificate, or a file cannot be used.
        """
        if self.cert is None:
            raise ConfigError("the side that listens needs TLS(cert=..., key=...)")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._load(context)
        if self.verify_clients:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def dialling_context(self) -> ssl.SSLContext:
        """Return the SSL context of the side that dials.

        Raises:
            ConfigError: A file cannot be used.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if self.ca is None:
            context.load_default_certs()
        self._load(context)
        return context

    def _refuse_pipes(self) -> None:
        """Raise :class:`ConfigError` if one of the certificate files is no regular file.

        OpenSSL would wait until a pipe is written to, and later links would read it again.
        """
        for file in (self.cert, self.key, self.ca):
            if file is not None and os.path.exists(file) and not os.path.isfile(file):
                raise ConfigError(f"{file} cannot be used for TLS: it is no regular file")

    def _load(self, context: ssl.SSLContext) -> None:
        """Load the files into a context, without a wait for a terminal or a pipe."""
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # If no password were given, OpenSSL would ask on the terminal, and wait.
        password = self.password.value if isinstance(self.password, Secret) else b""
        self._refuse_pipes()
        files = f"certificate file {self.cert} with the key file {self.key or self.cert}"
        try:
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key, password)
            files = f"certificate file {self.ca}"
            if self.ca is not None:
                context.load_verify_locations(self.ca)
        except (OSError, ValueError) as exc:
            # ssl.SSLError is an OSError.
            raise ConfigError(
                f"the {files} cannot be used (an encrypted key needs password=): {exc}"
            ) from exc

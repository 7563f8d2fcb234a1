"""TLS as a byte stream: what is encrypted goes through memory, so that no call ever blocks.

A socket that OpenSSL drives itself wants a write that did not fit to be repeated with the same
bytes; a framed link may have changed its mind by then. Here a byte that was taken is encrypted,
kept and sent in order, whatever comes after it. Which certificates, and what is checked, is in
``credentials``; ``tcp`` puts it on a socket. Must not import torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Sequence

from aiosync.errors import AuthError, ConfigError, ConnectError, RemoteProtocolError
from aiosync.transports.stream import ByteStream
from aiosync.wire import MAGIC, Refuse, encode_frame

__all__ = ["TlsStream", "why_refused"]

_READ_NBYTES = 256 * 1024
_ONE_SIDED = "the other end does not use TLS: pass tls= on both sides or on neither"
_ENCRYPT_NBYTES = 256 * 1024  # kept encrypted at most, beyond what the kernel takes


class _Scratch(threading.local):
    """What a thread reads encrypted bytes into, before OpenSSL copies them: one for all links."""

    def __init__(self) -> None:
        self.memory = memoryview(bytearray(_READ_NBYTES))


_scratch = _Scratch()


class TlsStream(ByteStream):
    """A TLS stream over a connected socket. Owns it. Use :meth:`handshake` before anything else.

    Args:
        sock: Connected stream socket.
        context: Of the side that this end is.
        server_side: This end listened.
        hostname: Name that the certificate of the other end must have, if it is checked.

    Raises:
        ConfigError: The context cannot be used for this side.
    """

    readv: Callable[[Sequence[memoryview]], int]
    writev: Callable[[Sequence[memoryview]], int]

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext,
        *,
        server_side: bool,
        hostname: str | None = None,
    ) -> None:
        super().__init__(sock)
        self._in = ssl.MemoryBIO()
        self._out = ssl.MemoryBIO()
        try:
            self._ssl = context.wrap_bio(
                self._in, self._out, server_side=server_side, server_hostname=hostname
            )
        except (ssl.SSLError, ValueError) as exc:
            raise ConfigError(f"this SSL context cannot be used: {exc}") from exc
        self._unsent = memoryview(b"")
        self.readv, self.writev = self._readv, self._writev

    # -- the handshake -------------------------------------------------------------------------

    async def handshake(self) -> None:
        """Agree on keys and check certificates. The caller limits its time.

        Raises:
            AuthError: The certificate of one end was refused.
            ConfigError: The listener does not use TLS.
            RemoteProtocolError: The dialer does not; it was told.
            ConnectError: The peer speaks something else, or went away.

        Cancellation:
            Breaks the link.
        """
        loop = asyncio.get_running_loop()
        first = True
        while True:
            done = True
            try:
                self._ssl.do_handshake()
            except ssl.SSLWantReadError:
                done = False
            except ssl.SSLError as exc:
                with contextlib.suppress(OSError):  # the alert tells the peer why
                    await loop.sock_sendall(self.sock, self._out.read())
                raise why_refused(exc) from exc
            try:
                if self._out.pending:
                    await loop.sock_sendall(self.sock, self._out.read())
                if done:
                    return
                data = await loop.sock_recv(self.sock, 65536)
            except OSError as exc:
                raise ConnectError(f"the link was lost during the TLS handshake: {exc}") from exc
            self._check_peer(data, first)
            first = False
            self._in.write(data)

    def _check_peer(self, data: bytes, first: bool) -> None:
        if not data:
            raise ConnectError(
                "the other end closed the link during the TLS handshake: it may not use TLS, or "
                "may require a certificate from this end"
            )
        if first and data.startswith(MAGIC):
            if not self._ssl.server_side:
                raise ConfigError(_ONE_SIDED)
            # It can be told in words that it understands.
            refuse = Refuse("ConfigError", "this address uses TLS: pass tls= on this side as well")
            with contextlib.suppress(OSError):
                self.sock.send(encode_frame(refuse))
            raise RemoteProtocolError("a peer sent plain frames to an address that speaks TLS")

    # -- the stream ----------------------------------------------------------------------------

    def _readv(self, buffers: Sequence[memoryview]) -> int:
        (buffer,) = buffers
        total = 0
        while total < len(buffer):
            try:
                nbytes = int(self._ssl.read(len(buffer) - total, buffer[total:]))
                if not nbytes:
                    break
                total += nbytes
            except ssl.SSLWantReadError:
                try:
                    nbytes = self.sock.recv_into(_scratch.memory)
                except BlockingIOError:
                    if total:
                        break
                    raise
                if nbytes:
                    self._in.write(_scratch.memory[:nbytes])
                else:
                    self._in.write_eof()
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                break  # frames say themselves whether they are complete
        with contextlib.suppress(OSError):  # what was read counts; the next write meets it again
            self.flush()  # the protocol answers for itself now and then
        return total

    def _writev(self, buffers: Sequence[memoryview]) -> int:
        self.flush()
        if self.has_unsent:
            raise BlockingIOError
        taken = 0
        for buffer in buffers:
            part = buffer[: _ENCRYPT_NBYTES - taken]
            while part:
                nbytes = self._ssl.write(part)
                taken += nbytes
                part = part[nbytes:]
        self.flush()
        return taken

    def flush(self) -> None:
        """See :class:`ByteStream`."""
        with contextlib.suppress(BlockingIOError, InterruptedError):
            while self._unsent or self._out.pending:
                self._unsent = self._unsent or memoryview(self._out.read())
                self._unsent = self._unsent[self.sock.send(self._unsent) :]
        self.has_unsent: bool = bool(self._unsent) or self._out.pending > 0

    def close(self, *, farewell: bool = True) -> None:
        """See :class:`ByteStream`; says goodbye if that needs no waiting."""
        if farewell and self.sock.fileno() >= 0:
            with contextlib.suppress(OSError, ValueError):
                # It asks for the peer's answer, or the session never began.
                self._ssl.unwrap()
            with contextlib.suppress(OSError):
                self.flush()
        super().close()


def why_refused(exc: ssl.SSLError) -> ConnectError:
    """What an error of OpenSSL means for whoever opened the link."""
    reason = exc.reason or str(exc)
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"):
        return ConnectError(_ONE_SIDED)
    if "CERTIFICATE" in reason or "UNKNOWN_CA" in reason:
        reason = getattr(exc, "verify_message", "") or reason
        return AuthError(f"the certificate of one end was refused: {reason}")
    return ConnectError(f"the TLS handshake failed: {reason}")

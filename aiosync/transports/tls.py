"""TLS as a byte stream: what is encrypted goes through memory, so that no call ever blocks.

A socket that OpenSSL drives itself wants a write that did not fit to be repeated with the same
bytes; a framed link may have changed its mind by then. Here a byte that was taken is encrypted,
kept and sent in order, whatever comes after it. Must not import torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Sequence

from aiosync.errors import AuthError, ConnectError, RemoteProtocolError
from aiosync.wire import MAGIC

__all__ = ["PlainPeer", "TlsIo", "why_refused"]

_READ_NBYTES = 256 * 1024
_ENCRYPT_NBYTES = 256 * 1024  # kept encrypted at most, beyond what the kernel takes


class PlainPeer(RemoteProtocolError):
    """A peer that speaks aiosync, but without TLS."""


class TlsIo:
    """A TLS stream over a connected socket; see :class:`aiosync.transports._io.ByteIo`.

    Owns the socket. Use :meth:`handshake` before anything else.

    Args:
        sock: Connected stream socket.
        context: Of the side that this end is.
        server_side: This end listened.
        hostname: Name that the certificate of the other end must have, if it is checked.
    """

    reads_out = True

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext,
        *,
        server_side: bool,
        hostname: str | None = None,
    ) -> None:
        sock.setblocking(False)
        self.sock: socket.socket = sock
        self.read_fd: int = sock.fileno()
        self.write_fd: int = self.read_fd
        self._in = ssl.MemoryBIO()
        self._out = ssl.MemoryBIO()
        self._ssl = context.wrap_bio(
            self._in, self._out, server_side=server_side, server_hostname=hostname
        )
        self._scratch = memoryview(bytearray(_READ_NBYTES))
        self._unsent = memoryview(b"")
        self._eof = False

    # -- the handshake -------------------------------------------------------------------------

    async def handshake(self) -> None:
        """Agree on keys and check certificates. The caller limits its time.

        Raises:
            AuthError: The certificate of one end was refused.
            PlainPeer: The peer sent a frame of aiosync in plain text.
            ConnectError: The peer does not speak TLS, or went away.

        Cancellation:
            Breaks the link.
        """
        loop = asyncio.get_running_loop()
        first = True
        while True:
            try:
                self._ssl.do_handshake()
                break
            except ssl.SSLWantReadError:
                await self._send_all(loop)
            except ssl.SSLCertVerificationError as exc:
                await self._send_all(loop)  # the alert tells the peer why
                raise AuthError(
                    f"the certificate of the other end was refused: {exc.verify_message}"
                ) from exc
            except ssl.SSLError as exc:
                with contextlib.suppress(ConnectError):
                    await self._send_all(loop)
                raise why_refused(exc) from exc
            data = await self._read_some(loop)
            if first and data.startswith(MAGIC):
                raise PlainPeer("a peer sent plain frames to an address that speaks TLS")
            first = False
            self._in.write(data)
        await self._send_all(loop)

    async def _send_all(self, loop: asyncio.AbstractEventLoop) -> None:
        data = self._out.read()
        try:
            if data:
                await loop.sock_sendall(self.sock, data)
        except OSError as exc:
            raise ConnectError(f"the link was lost during the TLS handshake: {exc}") from exc

    async def _read_some(self, loop: asyncio.AbstractEventLoop) -> bytes:
        try:
            data = await loop.sock_recv(self.sock, 65536)
        except OSError as exc:
            raise ConnectError(f"the link was lost during the TLS handshake: {exc}") from exc
        if not data:
            raise ConnectError(
                "the other end closed the link during the TLS handshake: it may not use TLS, or "
                "may require a certificate from this end"
            )
        return data

    # -- the stream ----------------------------------------------------------------------------

    @property
    def has_unread(self) -> bool:
        """See :class:`ByteIo`: what OpenSSL read ahead is announced by nobody else."""
        return self._ssl.pending() > 0 or self._in.pending > 0

    @property
    def has_unsent(self) -> bool:
        """See :class:`ByteIo`."""
        return len(self._unsent) > 0 or self._out.pending > 0

    @property
    def is_full(self) -> bool:
        """See :class:`ByteIo`: it takes little at a time, and more as long as that went out."""
        return self.has_unsent

    def recv_into(self, buffer: memoryview) -> int:
        """See :class:`ByteIo`."""
        total = 0
        while total < len(buffer):
            try:
                nbytes = self._ssl.read(len(buffer) - total, buffer[total:])
            except ssl.SSLWantReadError:
                try:
                    self._fill()
                except BlockingIOError:
                    if total:
                        break
                    raise
                continue
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                break  # frames say themselves whether they are complete
            if not nbytes:
                break
            total += int(nbytes)
        if self.has_unsent:
            self.flush()  # the protocol answers for itself now and then
        return total

    def _fill(self) -> None:
        if self._eof:
            raise ssl.SSLEOFError("the stream has ended")
        nbytes = self.sock.recv_into(self._scratch)
        if nbytes:
            self._in.write(self._scratch[:nbytes])
        else:
            self._eof = True
            self._in.write_eof()

    def send(self, data: bytes) -> int:
        """See :class:`ByteIo`."""
        return self.sendv([memoryview(data)])

    def sendv(self, buffers: Sequence[memoryview]) -> int:
        """See :class:`ByteIo`; what was taken may be unsent, see :meth:`flush`."""
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
            if taken >= _ENCRYPT_NBYTES:
                break
        self.flush()
        return taken

    def flush(self) -> None:
        """See :class:`ByteIo`."""
        while self.has_unsent:
            if not self._unsent:
                self._unsent = memoryview(self._out.read())
            try:
                nbytes = self.sock.send(self._unsent)
            except (BlockingIOError, InterruptedError):
                return
            self._unsent = self._unsent[nbytes:]

    def close(self) -> None:
        """Say goodbye if that needs no waiting, and close the socket. Idempotent."""
        if self.sock.fileno() < 0:
            return
        try:
            self._ssl.unwrap()
        except (OSError, ValueError):
            pass  # it asks for the peer's answer, or the session never began
        with contextlib.suppress(OSError):
            self.flush()
        self.sock.close()

    def close_copy(self) -> None:
        """See :class:`ByteIo`: a goodbye from here would end the parent's stream."""
        self.sock.close()


def why_refused(exc: ssl.SSLError) -> ConnectError:
    """What an error of OpenSSL means for whoever opened the link."""
    reason = exc.reason or str(exc)
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"):
        return ConnectError("the other end does not use TLS: pass tls= on both sides or on neither")
    if "CERTIFICATE" in reason or "UNKNOWN_CA" in reason:
        return AuthError(f"the certificate of one end was refused: {reason}")
    return ConnectError(f"the TLS handshake failed: {reason}")

"""TLS as a byte stream. OpenSSL encrypts into memory, so that no call ever blocks.

If OpenSSL drove the socket itself, a write that did not fit would have to be repeated with the same
bytes; a framed link may have other bytes to send by then. Here every byte that was taken is
encrypted, kept and sent in order, whatever is written after it. The certificates and their checks
are in ``tls``; ``tcp`` puts this stream on a socket. Must not import torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import threading
from collections.abc import Callable, Sequence

from aiosync.errors import AuthError, ConfigError, ConnectError, RemoteProtocolError
from aiosync.transports.byte_stream import ByteStream
from aiosync.wire import MAGIC, Refuse, encode_frame

__all__ = ["TlsStream", "why_refused"]

# One call of OpenSSL handles all that was read: up to 30 ms if that is nothing but changes of keys.
_READ_NBYTES = 64 * 1024
_ONE_SIDED = "the other end does not use TLS: pass tls= on both sides or on neither"
# Greatest number of encrypted bytes that are kept while the kernel does not take them.
_ENCRYPT_NBYTES = 256 * 1024
# Greatest number of bytes of OpenSSL's own answers that are kept.
_ANSWERS_NBYTES = 64 * 1024


class _Scratch(threading.local):
    """Memory for encrypted bytes that were read, until OpenSSL copies them.

    All links of a thread share it.
    """

    def __init__(self) -> None:
        self.memory = memoryview(bytearray(_READ_NBYTES))


_scratch = _Scratch()


class TlsStream(ByteStream):
    """A TLS stream over a connected socket, which it owns. Call :meth:`handshake` first.

    Args:
        sock: Connected stream socket.
        context: SSL context for this side.
        server_side: True if this end listened.
        hostname: Name that the certificate of the other end must have, if the context checks it.

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
        # Encrypted bytes of the peer for OpenSSL, and encrypted bytes of OpenSSL for the peer.
        self._in = ssl.MemoryBIO()
        self._out = ssl.MemoryBIO()
        try:
            self._ssl = context.wrap_bio(
                self._in, self._out, server_side=server_side, server_hostname=hostname
            )
        except (ssl.SSLError, ValueError) as exc:
            raise ConfigError(f"this SSL context cannot be used: {exc}") from exc
        # Bytes that were taken out of _out, and that the kernel does not have yet.
        self._unsent = memoryview(b"")
        # The error that the kernel reported behind data. It does so once, and the next read raises
        # it. Only its number is kept, as an exception would keep this object.
        self._errno: int | None = None
        self.readv, self.writev = self._readv, self._writev

    # -- the handshake -------------------------------------------------------------------------

    async def handshake(self) -> None:
        """Agree on keys and check certificates. The caller limits the time.

        Raises:
            AuthError: The certificate of one end was refused.
            ConfigError: The listener does not use TLS.
            RemoteProtocolError: The dialer does not use TLS; it was told so.
            ConnectError: The peer speaks another protocol, or closed the link.

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
                # The pending bytes are an alert, which tells the peer the reason.
                with contextlib.suppress(OSError):
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
        """Raise if the peer closed the link, or if its ``first`` bytes are plain frames."""
        if not data:
            raise ConnectError(
                "the other end closed the link during the TLS handshake: it may not use TLS, or "
                "may require a certificate from this end"
            )
        if first and data.startswith(MAGIC):
            if not self._ssl.server_side:
                raise ConfigError(_ONE_SIDED)
            # The dialer speaks plain frames, so a plain frame can tell it the reason.
            refuse = Refuse("ConfigError", "this address uses TLS: pass tls= on this side as well")
            with contextlib.suppress(OSError):
                self.sock.send(encode_frame(refuse))
            raise RemoteProtocolError("a peer sent plain frames to an address that speaks TLS")

    # -- the stream ----------------------------------------------------------------------------

    def _readv(self, buffers: Sequence[memoryview]) -> int:
        """Read and decrypt into the buffer, of which there is one; see :attr:`ByteStream.readv`."""
        try:
            return self._decrypt_into(*buffers)
        finally:
            # TLS sometimes answers by itself, such as to a change of keys. If that answer cannot be
            # sent, what was read still counts, and the next write raises the error.
            with contextlib.suppress(OSError):
                self.flush()

    def _decrypt_into(self, buffer: memoryview) -> int:
        """Fill the buffer as far as data arrived; return the number of bytes, 0 at the end.

        Raises:
            BlockingIOError: No data has arrived.
            InterruptedError: Many bytes were read, and none of them had data: call again later.
        """
        if self._out.pending > _ANSWERS_NBYTES:
            raise OSError("the peer asks TLS for answers, and does not read them")
        # Bytes of data; and bytes that were read from the socket beyond those of data.
        total = overhead = 0
        while total < len(buffer):
            try:
                nbytes = int(self._ssl.read(len(buffer) - total, buffer[total:]))
                if not nbytes:
                    break
                total += nbytes
                overhead -= nbytes
            except ssl.SSLWantReadError:
                # Records without data, or with little, must not keep the loop from its turns.
                try:
                    nbytes = self._receive(may_read=overhead < _READ_NBYTES)
                except OSError as exc:
                    if not total:
                        raise
                    if not isinstance(exc, BlockingIOError | InterruptedError):
                        self._errno = exc.errno
                    break
                overhead += nbytes
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                # The end of the stream is not an error here: frames show if one was cut.
                break
        return total

    def _receive(self, *, may_read: bool) -> int:
        """Hand bytes of the socket over to TLS; return their number, 0 at the end.

        Raises:
            InterruptedError: This read has had its turn, as ``may_read`` says.
            OSError: The connection has an error, or had one.
        """
        if not may_read:
            raise InterruptedError
        if self._errno is not None:
            raise OSError(self._errno, os.strerror(self._errno))
        nbytes = self.sock.recv_into(_scratch.memory)
        if nbytes:
            self._in.write(_scratch.memory[:nbytes])
        else:
            self._in.write_eof()
        return nbytes

    def _writev(self, buffers: Sequence[memoryview]) -> int:
        """Encrypt and send some bytes, unless earlier ones are unsent; return how many."""
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
        """Give encrypted bytes to the kernel, as many as it takes. Never blocks."""
        with contextlib.suppress(BlockingIOError, InterruptedError):
            while self._unsent or self._out.pending:
                self._unsent = self._unsent or memoryview(self._out.read())
                self._unsent = self._unsent[self.sock.send(self._unsent) :]
        self.has_unsent: bool = bool(self._unsent) or self._out.pending > 0

    def close(self, *, farewell: bool = True) -> None:
        """Close the socket; a ``farewell`` is sent before if that needs no waiting."""
        if farewell and self.sock.fileno() >= 0:
            # unwrap() raises because it also wants the peer's answer to the farewell, or because
            # the session never began.
            with contextlib.suppress(OSError, ValueError):
                self._ssl.unwrap()
            with contextlib.suppress(OSError):
                self.flush()
        super().close()


def why_refused(exc: ssl.SSLError) -> ConnectError:
    """Translate an error of OpenSSL into the one that either end of the link raises."""
    reason = exc.reason or str(exc)
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"):
        return ConnectError(_ONE_SIDED)
    if "CERTIFICATE" in reason or "UNKNOWN_CA" in reason:
        reason = getattr(exc, "verify_message", "") or reason
        return AuthError(f"the certificate of one end was refused: {reason}")
    return ConnectError(f"the TLS handshake failed: {reason}")

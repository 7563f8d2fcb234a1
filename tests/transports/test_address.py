"""Valid and invalid addresses, and the files of Unix sockets."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from aiosync.errors import ConfigError
from aiosync.rendezvous.listener import StreamListener
from aiosync.transports.address import Address, bind


@pytest.mark.parametrize(
    ("url", "expected", "local"),
    [
        ("tcp://127.0.0.1:7000", Address("tcp", "127.0.0.1", 7000), True),
        ("tcp://127.3.2.1:1", Address("tcp", "127.3.2.1", 1), True),
        ("tcp://localhost:0", Address("tcp", "localhost", 0), True),
        ("tcp://0.0.0.0:7000", Address("tcp", "0.0.0.0", 7000), False),
        ("tcp://trainer.example:65535", Address("tcp", "trainer.example", 65535), False),
        ("tcp://[::1]:7000", Address("tcp", "::1", 7000), True),
        ("tcp://[::]:7000", Address("tcp", "::", 7000), False),
        ("tcp://[fe80::1%eth0]:7", Address("tcp", "fe80::1%eth0", 7), False),
        ("unix:///tmp/a.sock", Address("unix", path="/tmp/a.sock"), True),
        ("unix:///tmp/a b@c:d", Address("unix", path="/tmp/a b@c:d"), True),
    ],
)
def test_addresses(url: str, expected: Address, local: bool) -> None:
    address = Address.parse(url)
    assert address == expected
    assert address.is_local is local
    assert Address.parse(str(address)) == expected
    assert Address.parse(address) is address


@pytest.mark.parametrize(
    "url",
    [
        "", "127.0.0.1:80", "tcp://", "tcp://host", "tcp://:80", "tcp://host:", "tcp://host:x",
        "tcp://host:65536", "tcp://host:-1", "tcp://host:1/path", "tcp://host:1?q", "tcp://host:1#f",
        "tcp://[::1:7", "tcp://::1", "http://host:1", "TCP//host:1", "unix:", "unix://", "unix:///",
        "unix://relative/path", "unix:///" + "a" * 107, 7000, None, b"tcp://host:1",
    ],
)  # fmt: skip
def test_what_is_no_address(url: object) -> None:
    with pytest.raises(ConfigError):
        Address.parse(url)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "url",
    [
        "tcp://user:hunter2@host:1",
        "tcp://user:hunter2/hunter2@host:1",
        "tcp://hunter2@host:1",
        "tcp://user:hunter2@host",
        "tcp://user:hunter2@host:99999",
        "http://user:hunter2@host:1",
        "tcp://user:hunter2@host:1?q",
        "tcp://host:1?token=hunter2",
        "tcp://host:1#hunter2",
        "tcp://host:x?token=hunter2#more",
        "http://host:1/?token=hunter2",
    ],
)
def test_credentials_in_an_address_are_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Address.parse(url)
    assert "hunter2" not in str(caught.value)


def test_what_is_too_much_in_an_address_is_seen() -> None:
    with pytest.raises(ConfigError, match=r"^'tcp://host:1\?\.\.\.' is not an address"):
        Address.parse("tcp://host:1?token=hunter2")


def test_a_port_is_chosen_and_a_taken_one_refused() -> None:
    sock, address = bind(Address.parse("tcp://127.0.0.1:0"))
    with sock:
        assert address.port == sock.getsockname()[1] > 0
        assert not sock.getblocking()
        with pytest.raises(ConfigError, match="another process or scheme"):
            bind(address)
    # SO_REUSEADDR is set, so the port can be bound again at once.
    again, _ = bind(address)
    again.close()


@pytest.mark.parametrize(
    "url", ["tcp://192.0.2.1:0", "tcp://no-such-host.invalid:0", "unix:///no/such/folder/socket"]
)
def test_an_address_that_cannot_be_here(url: str) -> None:
    with pytest.raises(ConfigError, match="cannot listen on"):
        bind(Address.parse(url))


# -- files of Unix sockets ----------------------------------------------------------------------


def test_the_file_is_private(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    old = os.umask(0)
    try:
        sock, _ = bind(Address("unix", path=str(path)))
    finally:
        os.umask(old)
    with sock:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_stale_socket_is_replaced_and_a_live_one_is_not(tmp_path: Path) -> None:
    there = Address("unix", path=str(tmp_path / "socket"))
    sock, _ = bind(there)
    with sock:
        inode = os.stat(there.path).st_ino
        with pytest.raises(ConfigError, match="another process or scheme"):
            bind(there)
        assert os.stat(there.path).st_ino == inode
    # A process that was killed leaves its file in the same way.
    assert Path(there.path).is_socket()
    sock, _ = bind(there)
    with sock, socket.socket(socket.AF_UNIX) as client:
        client.connect(there.path)


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.write_text("precious"),
        lambda path: path.mkdir(),
        lambda path: path.symlink_to("nowhere"),
        os.mkfifo,
    ],
    ids=["file", "folder", "link", "fifo"],
)
def test_what_is_no_socket_stays(tmp_path: Path, make: Any) -> None:
    path = tmp_path / "socket"
    make(path)
    before = path.lstat()
    with pytest.raises(ConfigError, match="cannot listen on"):
        bind(Address("unix", path=str(path)))
    after = path.lstat()
    # All but the time of the last access, which a look at a link may set.
    assert (*after[:7], after.st_mtime_ns) == (*before[:7], before.st_mtime_ns)


def test_a_listener_removes_its_file(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    listener = StreamListener(f"unix://{path}")
    assert path.is_socket()
    listener.close()
    assert not path.exists()
    listener.close()


@pytest.mark.parametrize("other", ["file", "socket", "link"])
def test_a_listener_leaves_what_took_the_place_of_its_file(tmp_path: Path, other: str) -> None:
    path, moved = tmp_path / "socket", tmp_path / "moved"
    with contextlib.ExitStack() as stack:
        listener = StreamListener(f"unix://{path}")
        stack.callback(listener.close)
        path.rename(moved) if other == "link" else path.unlink()
        if other == "file":
            path.write_text("precious")
        elif other == "link":
            path.symlink_to(moved)
        else:
            stack.enter_context(bind(Address("unix", path=str(path)))[0])
        before = path.lstat().st_ino
        listener.close()
        assert path.lstat().st_ino == before

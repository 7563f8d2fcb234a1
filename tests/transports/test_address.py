"""Addresses: what is one, what is not, and what happens to the files of Unix sockets."""

from __future__ import annotations

import os
import socket
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from aiosync.errors import ConfigError
from aiosync.schemes.listening import StreamListener
from aiosync.transports import address as module
from aiosync.transports.address import Address, any_port_of, bind, own_host


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


def test_a_long_one_is_shown_in_part() -> None:
    with pytest.raises(ConfigError) as caught:
        Address.parse("x" * 10_000)
    assert len(str(caught.value)) < 400


def test_a_port_is_chosen_and_a_taken_one_refused() -> None:
    sock, address = bind(Address.parse("tcp://127.0.0.1:0"))
    with sock:
        assert address.port == sock.getsockname()[1] > 0
        assert not sock.getblocking()
        with pytest.raises(ConfigError, match="another process or scheme"):
            bind(address)
    again, _ = bind(address)  # SO_REUSEADDR: at once
    again.close()


@pytest.mark.parametrize("url", ["tcp://192.0.2.1:0", "tcp://no-such-host.invalid:0"])
def test_an_address_of_another_host(url: str) -> None:
    with pytest.raises(ConfigError, match="cannot listen on"):
        bind(Address.parse(url))


def test_ipv6() -> None:
    try:
        sock, address = bind(Address.parse("tcp://[::1]:0"))
    except ConfigError as exc:
        pytest.skip(f"no IPv6: {exc}")
    with sock:
        assert str(address) == f"tcp://[::1]:{address.port}"
        socket.create_connection(("::1", address.port)).close()


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
    assert Path(there.path).is_socket()  # as after a process that was killed
    sock, _ = bind(there)
    with sock, socket.socket(socket.AF_UNIX) as client:
        client.connect(there.path)


def test_a_file_that_is_no_socket_stays(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="a regular file is there: choose another path"):
        bind(Address("unix", path=str(path)))
    assert path.read_text() == "precious"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: path.mkdir(), "a directory is there"),
        (lambda path: path.symlink_to("nowhere"), "a link that leads nowhere"),
        (lambda path: os.mkfifo(path), "something that is no socket"),
    ],
)
def test_what_is_in_the_place_of_a_socket_is_named(tmp_path: Path, make: Any, says: str) -> None:
    path = tmp_path / "socket"
    make(path)
    with pytest.raises(ConfigError, match=says):
        bind(Address("unix", path=str(path)))
    assert [each.name for each in tmp_path.iterdir()] == ["socket"]


@pytest.mark.parametrize("stale", [False, True])
def test_of_two_that_bind_one_path_at_once_one_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stale: bool
) -> None:
    """Another one comes between the two halves: what it sees is not yet a socket that listens."""
    there = Address("unix", path=str(tmp_path / "socket"))
    if stale:
        bind(there)[0].close()
    refused: list[str] = []
    bind_private = module._bind_private

    def bind_slowly(sock: socket.socket, path: str) -> None:
        monkeypatch.setattr(module, "_bind_private", bind_private)
        bind_private(sock, path)
        with pytest.raises(ConfigError) as caught:
            bind(there)
        refused.append(str(caught.value))

    def is_stale_slowly(path: str) -> bool:
        monkeypatch.undo()
        with pytest.raises(ConfigError) as caught:
            bind(there)
        refused.append(str(caught.value))
        return True

    if stale:
        monkeypatch.setattr(module, "_is_stale", is_stale_slowly)
    else:
        monkeypatch.setattr(module, "_bind_private", bind_slowly)
    sock, _ = bind(there)
    with sock, socket.socket(socket.AF_UNIX) as client:
        client.connect(there.path)
        assert len(refused) == 1
        assert refused[0].endswith("another process or scheme listens there")
    assert [each.name for each in tmp_path.iterdir()] == ["socket"]


def test_many_that_replace_one_stale_socket(tmp_path: Path) -> None:
    there = Address("unix", path=str(tmp_path / "socket"))
    together = threading.Barrier(4)

    def attempt(_number: int) -> socket.socket | None:
        together.wait()
        try:
            return bind(there)[0]
        except ConfigError:
            return None

    with ThreadPoolExecutor(4) as pool:
        for _ in range(30):
            found = [sock for sock in pool.map(attempt, range(4)) if sock is not None]
            for sock in found:
                sock.close()  # and leaves its file
            assert len(found) == 1
    assert [each.name for each in tmp_path.iterdir()] == ["socket"]


@pytest.mark.parametrize("what", ["folder", "left"])
def test_a_lock_that_cannot_be_had_or_was_left_is_no_obstacle(tmp_path: Path, what: str) -> None:
    there = Address("unix", path=str(tmp_path / "socket"))
    lock = tmp_path / ".socket.aiosync-lock"
    if what == "folder":
        lock.mkdir()
    else:
        lock.touch()  # of a process that was killed
    with bind(there)[0]:
        assert lock.exists() == (what == "folder")
    with bind(there)[0]:  # instead of the stale one
        pass


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot listen on"):
        bind(Address("unix", path=str(tmp_path / "none" / "socket")))


def test_a_listener_removes_its_own_file_only(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    url = f"unix://{path}"
    listener = StreamListener(url)
    assert path.is_socket()
    listener.close()
    assert not path.exists()
    listener.close()
    first = StreamListener(url)
    path.unlink()
    second = StreamListener(url)
    first.close()
    assert path.is_socket()  # it is the second one's
    second.close()
    assert not path.exists()


def test_the_own_host_towards_another() -> None:
    assert own_host(None) == own_host("") == own_host("127.0.0.1") == "127.0.0.1"
    assert own_host("::1") == "::1"
    assert str(any_port_of("::1")) == "tcp://[::1]:0"
    assert str(any_port_of("127.0.0.1")) == "tcp://127.0.0.1:0"

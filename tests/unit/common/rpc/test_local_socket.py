"""Addresses of abstract sockets: which are ones, which have a listener, and that they are as local as loopback."""

import socket
import sys

import pytest

from pagoda_common.config.security_config import SecurityConfig, is_local
from pagoda_common.errors import ConfigError
from pagoda_common.rpc import local_socket
from pagoda_common.rpc.local_socket import SCHEME, has_listener, is_local_socket, new_local_address

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has abstract sockets")


@pytest.mark.parametrize("name", ["a", "pagoda-worker-0123abcd", "A.b_c-9", "n" * 100])
def test_an_abstract_socket_is_local(name: str) -> None:
    address = f"{SCHEME}{name}"
    assert is_local_socket(address)
    assert is_local(address)
    SecurityConfig().check_dial(address, name="scheduler")


@pytest.mark.parametrize(
    "address",
    [
        "",
        "unix-abstract:",
        "unix-abstract:" + "n" * 101,
        "unix-abstract:a b",
        "unix-abstract:a%00b",
        "unix-abstract:a,10.0.0.1:7",
        "unix-abstract:a\n",
        "unix-abstract:a?b",
        "unix-abstract://a/b",
        "UNIX-ABSTRACT:a",
        "unix:/tmp/socket",
        "unix:socket",
        "unix:///tmp/socket",
        "vsock:2:7",
        "dns:///127.0.0.1:7",
        "dns://10.0.0.1/localhost:7",
        "ipv4:127.0.0.1:7",
        "ipv4:127.0.0.1:7,10.0.0.1:7",
        "@a",
    ],
)
def test_nothing_else_of_that_kind_is(address: str) -> None:
    assert not is_local_socket(address)
    assert not is_local(address)
    assert not has_listener(address)
    with pytest.raises(ConfigError, match="must be on loopback without TLS") as caught:
        SecurityConfig().check_dial(address, name="scheduler")
    assert repr(address) in caught.value.message


@needs_linux
def test_new_addresses_are_valid_and_never_the_same() -> None:
    addresses = [new_local_address("worker") for _ in range(20)]
    assert len(set(addresses)) == 20
    assert all(address is not None and is_local_socket(address) for address in addresses)


def test_where_there_are_no_such_sockets_there_is_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(local_socket.socket, "AF_UNIX", raising=False)
    assert new_local_address("worker") is None
    assert not has_listener(f"{SCHEME}a")


@needs_linux
def test_where_they_are_forbidden_there_is_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(local_socket.socket.socket, "connect", forbid, raising=False)
    assert new_local_address("worker") is None


@needs_linux
def test_a_listener_is_there_as_long_as_its_socket() -> None:
    address = new_local_address("worker")
    assert address is not None
    assert not has_listener(address)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("\0" + address.removeprefix(SCHEME))
        listener.listen()
        assert has_listener(address)
    assert not has_listener(address)


@needs_linux
def test_a_listener_that_takes_nobody_in_is_none() -> None:
    address = new_local_address("worker")
    assert address is not None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("\0" + address.removeprefix(SCHEME))
        listener.listen(0)
        while has_listener(address):  # until its queue is full; what is asked must never wait
            pass

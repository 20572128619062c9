"""Ports for servers that are started a little later."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pagoda_common.process import children as process
from pagoda_common.process.children import free_port


def can_listen(port: int, host: str = "127.0.0.1", *, option: int = socket.SO_REUSEADDR) -> bool:
    """Whether a server can: ours all set SO_REUSEADDR."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
        server.setsockopt(socket.SOL_SOCKET, option, 1)
        try:
            server.bind((host, port))
            server.listen()
        except OSError:
            return False
    return True


def is_free(port: int) -> bool:
    """Whether no one has it, not even for later."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def given(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "ip_local_port_range"
    path.write_text(text)
    return path


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_nobody_who_binds_0_gets_it(host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "LOCAL_PORT_RANGE", given(tmp_path, "20000\t60999\n"))
    ports = {free_port(host) for _ in range(64)}
    assert len(ports) > 32, "drawn at random"
    assert all(process.LOWEST_PORT <= port < 20000 for port in ports)
    assert can_listen(ports.pop(), host)


def test_a_taken_one_is_not_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for lowest in range(process.LOWEST_PORT, 30000):
        if is_free(lowest) and is_free(lowest + 1):
            break
    monkeypatch.setattr(process, "LOWEST_PORT", lowest)
    monkeypatch.setattr(process, "LOCAL_PORT_RANGE", given(tmp_path, f"{lowest + 2}\t60999\n"))
    with socket.socket() as server:
        server.bind(("127.0.0.1", lowest))
        assert lowest not in {free_port() for _ in range(32)}


@pytest.mark.parametrize("text", ["1024 65535", None])
def test_where_nothing_lies_below_the_system_chooses(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "none" if text is None else given(tmp_path, text)
    monkeypatch.setattr(process, "LOCAL_PORT_RANGE", path)
    assert can_listen(free_port())


def test_a_port_is_drawn_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for lowest in range(process.LOWEST_PORT, 30000):
        if all(is_free(lowest + place) for place in range(4)):
            break
    ports = given(tmp_path, f"{lowest + 4}\t60999\n")
    monkeypatch.setattr(process, "LOWEST_PORT", lowest)
    monkeypatch.setattr(process, "LOCAL_PORT_RANGE", ports)
    monkeypatch.setattr(process, "PORT_DRAWS", 256)
    first = {free_port(), free_port()}
    code = (
        "import pathlib; from pagoda_common.process import children as process; process.PORT_DRAWS = 256; "
        f"process.LOWEST_PORT = {lowest}; process.LOCAL_PORT_RANGE = pathlib.Path({str(ports)!r}); "
        "print(process.free_port(), process.free_port())"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert len(first) == 2
    assert first | set(map(int, answer.split())) == set(range(lowest, lowest + 4)), "nor by another process"
    assert free_port() not in first


@pytest.mark.parametrize("option", [socket.SO_REUSEADDR, socket.SO_REUSEPORT])
def test_a_server_that_is_started_again_has_the_same_port(option: int) -> None:
    port = free_port()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port)).close()
    for _ in range(2):
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, option, 1)
            server.bind(("127.0.0.1", port))
            server.listen()
            socket.create_connection(("127.0.0.1", port)).close()
            server.accept()[0].close()
            assert not can_listen(port), "it is in use"


def test_few_ports_are_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_reservations", type(process._reservations)(maxlen=3))
    ports = [free_port() for _ in range(4)]
    assert is_free(ports[0])
    assert not any(map(is_free, ports[1:]))

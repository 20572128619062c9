"""Ports for servers that are started a little later."""

import socket
from pathlib import Path

import pytest

from pagoda_common import process
from pagoda_common.process import free_port


def can_bind(port: int, host: str = "127.0.0.1") -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
        try:
            server.bind((host, port))
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
    assert can_bind(ports.pop(), host)


def test_a_taken_one_is_not_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for lowest in range(process.LOWEST_PORT, 30000):
        if can_bind(lowest) and can_bind(lowest + 1):
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
    assert can_bind(free_port())

"""Services whose port is taken end with code 1 and a line that names the address."""

import socket
import subprocess
import sys

import pytest

LISTENING, METRICS = "cannot listen on", "cannot serve metrics on"


@pytest.mark.parametrize(
    ("module", "flag", "other", "message"),
    [
        ("pagoda_frontend", "port", "grpc-port", LISTENING),
        ("pagoda_frontend", "grpc-port", "port", LISTENING),
        ("pagoda_scheduler", "port", "metrics-port", LISTENING),
        ("pagoda_scheduler", "metrics-port", "port", METRICS),
        ("pagoda_worker", "port", "metrics-port", LISTENING),
        ("pagoda_worker", "metrics-port", "port", METRICS),
    ],
)
def test_a_port_that_is_taken_is_named(module: str, flag: str, other: str, message: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = {flag: taken.getsockname()[1], other: 0}
        command = [sys.executable, "-m", module, "--host", "127.0.0.1"]
        command += [f"--{name}={port}" for name, port in ports.items()]
        command += [] if module == "pagoda_scheduler" else ["--scheduler=127.0.0.1:1"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 1
    assert f"error: {message} 127.0.0.1:{ports[flag]}" in ended.stderr
    assert "Traceback" not in ended.stderr

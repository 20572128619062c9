"""Services whose port is taken end with code 1 and a line that names the address."""

import socket
import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["pagoda_scheduler", "pagoda_worker"])
@pytest.mark.parametrize(
    ("flag", "message"), [("port", "cannot listen on"), ("metrics-port", "cannot serve metrics on")]
)
def test_a_port_that_is_taken_is_named(module: str, flag: str, message: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = {"port": 0, "metrics-port": 0, flag: taken.getsockname()[1]}
        command = [sys.executable, "-m", module, "--host", "127.0.0.1"]
        command += [f"--{name}={port}" for name, port in ports.items()]
        command += ["--scheduler=127.0.0.1:1"] if module == "pagoda_worker" else []
        ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 1
    assert f"error: {message} 127.0.0.1:{ports[flag]}" in ended.stderr
    assert "Traceback" not in ended.stderr

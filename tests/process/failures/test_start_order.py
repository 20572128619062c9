"""The three services find each other in whatever order they come up."""

import pytest

from pagoda_common.process.children import free_port
from tests.process.stack import Process, ask, get_status, poll_until

ORDERS = (("frontend", "scheduler", "worker"), ("worker", "frontend", "scheduler"))
"""Frontend and worker come first once each, the scheduler before a worker and after both. Elsewhere it is first."""


@pytest.mark.parametrize("order", ORDERS, ids=" ".join)
def test_services_may_start_in_any_order(order: tuple[str, ...]) -> None:
    scheduler, port, grpc_port = f"127.0.0.1:{free_port()}", free_port(), free_port()
    argv = {
        "frontend": [f"--scheduler={scheduler}", f"--port={port}", f"--grpc-port={grpc_port}"],
        "scheduler": ["--host=127.0.0.1", f"--port={scheduler.rpartition(':')[2]}"],
        "worker": [f"--scheduler={scheduler}", "--host=127.0.0.1", "--port=0"],
    }
    url = f"http://127.0.0.1:{port}"
    started: dict[str, Process] = {}

    def logs() -> str:
        return "\n".join(f"--- {name}\n{process.log}" for name, process in started.items())

    try:
        for name in order:
            process = started[name] = Process("-m", f"pagoda_{name}", *argv[name])
            poll_until(lambda process=process: "listening" in process.log, what=f"the {name} listens", log=logs)
            assert process.popen.poll() is None, logs()
        poll_until(lambda: get_status(f"{url}/ready") == 200, what="/ready answers 200", log=logs)
        assert ask(url)
        for name in ("frontend", "scheduler", "worker"):
            started[name].popen.terminate()
            assert started[name].wait() == 0, logs()
    finally:
        for process in started.values():
            process.end()

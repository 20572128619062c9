"""`pagoda serve` as a user meets it: real processes, the embedded model, signals and kills."""

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.harness.certificates import make_certificates
from tests.process.stack import MODULES, Stack, ask, get_status, has_ended, poll_until


@pytest.fixture(scope="module")
def shared_stack() -> Iterator[Stack]:
    stack = Stack('--override-generation-config={"temperature": 0}')  # a sampled answer may end with its first token
    try:
        stack.wait_ready()
        yield stack
    finally:
        stack.end()


@pytest.fixture
def start() -> Iterator[Callable[..., Stack]]:
    """Starts stacks and kills what is left of them at the end."""
    stacks: list[Stack] = []

    def start_stack(*flags: str) -> Stack:
        stacks.append(Stack(*flags))
        return stacks[-1]

    yield start_stack
    for stack in stacks:
        stack.end()


def pagoda(*argv: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pagoda", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


def test_serve_announces_addresses_and_an_example_request(shared_stack: Stack) -> None:
    log = poll_until(lambda: "curl" in shared_stack.log and shared_stack.log, what="the announcement")
    assert f"{shared_stack.url}/v1" in log
    assert f"127.0.0.1:{shared_stack.grpc_port}" in log
    curl = next(line for line in log.replace("\\\n", " ").splitlines() if line.strip().startswith("curl"))
    done = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.rstrip().endswith("data: [DONE]")


def test_serve_is_announced_when_clients_need_certificates(start: Callable[..., Stack], tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path, "localhost", "client")
    path = certificates.path
    stack = start(
        f"--ssl-certfile={path('localhost.crt')}",
        f"--ssl-keyfile={path('localhost.key')}",
        f"--ssl-ca-certs={path('ca.crt')}",
    )
    address = f"https://127.0.0.1:{stack.port}"
    poll_until(lambda: stack.popen.poll() is not None or f"{address}/v1" in stack.log, what="the announcement")
    with pytest.raises((ssl.SSLError, ConnectionError)):  # whichever of the refusal and the end arrives first
        urllib.request.urlopen(f"{address}/ready", context=ssl._create_unverified_context(), timeout=60).read()
    context = ssl.create_default_context(cafile=path("ca.crt"))
    context.check_hostname = False
    context.load_cert_chain(path("client.crt"), path("client.key"))
    with urllib.request.urlopen(f"{address}/ready", context=context, timeout=60) as answer:
        assert answer.status == 200


def test_three_services_run_as_processes_of_their_own(shared_stack: Stack) -> None:
    pids = {shared_stack.service(name).pid for name in MODULES}
    assert len(pids) == 3
    assert {process.pid for process in shared_stack.children()} == pids


def test_health_asks_a_service_over_grpc(shared_stack: Stack) -> None:
    done = pagoda("health", f"127.0.0.1:{shared_stack.grpc_port}")
    assert (done.returncode, done.stdout.strip()) == (0, "SERVING")


def test_complete_and_chat_talk_to_a_running_server(shared_stack: Stack) -> None:
    for command in ("complete", "chat"):
        done = pagoda(command, "--url", f"{shared_stack.url}/v1", "-q", "Hello!", "--max-tokens", "5")
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
    refused = pagoda("complete", "--url", f"{shared_stack.url}/v1", "-q", "Hello!", "--model-name", "nobody")
    assert refused.returncode == 1
    assert "nobody" in refused.stderr


@pytest.mark.parametrize("name", ["worker", "scheduler", "frontend"])
def test_a_killed_service_comes_back_and_answers_as_before(shared_stack: Stack, name: str) -> None:
    before = ask(shared_stack.url)
    victim = shared_stack.service(name)
    others = {other: shared_stack.service(other).pid for other in MODULES if other != name}
    victim.kill()
    poll_until(lambda: has_ended(victim), what=f"the {name} is gone")
    poll_until(lambda: shared_stack.service(name).pid != victim.pid, what=f"a new {name}", log=lambda: shared_stack.log)

    def answers() -> str | None:
        try:
            return ask(shared_stack.url)
        except OSError:  # not ready yet
            return None

    assert poll_until(answers, what="an answer", log=lambda: shared_stack.log) == before
    assert {other: shared_stack.service(other).pid for other in others} == others, "only the killed one is replaced"


def test_sigterm_ends_everything_with_code_0(start: Callable[..., Stack]) -> None:
    stack = start()
    stack.wait_ready()
    children = stack.children()
    stack.signal(signal.SIGTERM)
    assert stack.wait() == 0, stack.log
    assert all(has_ended(child) for child in children)
    assert "Traceback" not in stack.log
    assert "killed" not in stack.log, "no service had to be killed"


def test_ctrl_c_during_the_start_ends_everything_with_code_0(start: Callable[..., Stack]) -> None:
    stack = start()
    children = [stack.service(name) for name in MODULES]
    os.killpg(stack.popen.pid, signal.SIGINT)  # as a terminal does
    assert stack.wait() == 0, stack.log
    assert all(has_ended(child) for child in children)


def test_a_second_ctrl_c_ends_at_once_with_code_130(start: Callable[..., Stack]) -> None:
    stack = start()
    children = [stack.service(name) for name in MODULES]
    poll_until(lambda: get_status(f"{stack.url}/version"), what="the frontend listens", log=lambda: stack.log)
    stack.service("frontend").suspend()  # so that it never drains
    stack.signal(signal.SIGINT)
    poll_until(lambda: "second Ctrl-C" in stack.log, what="the first Ctrl-C is seen", log=lambda: stack.log)
    stack.signal(signal.SIGINT)
    assert stack.wait() == 130, stack.log
    assert all(has_ended(child) for child in children)


def test_no_orphan_survives_a_kill_of_the_parent(start: Callable[..., Stack]) -> None:
    stack = start()
    stack.wait_ready()
    children = stack.children()
    assert len(children) == 3
    stack.signal(signal.SIGKILL)
    assert stack.wait() == -signal.SIGKILL
    poll_until(lambda: all(has_ended(child) for child in children), what="all children are gone")


def test_a_taken_port_is_a_clear_error_with_code_2() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = pagoda("serve", f"--port={port}")
    assert done.returncode == 2
    assert f"port is {port}" in done.stderr.splitlines()[-1]


def test_a_model_that_does_not_exist_ends_with_code_2(start: Callable[..., Stack]) -> None:
    stack = start("./no/such/model")
    assert stack.wait() == 2, stack.log
    assert "no/such/model" in stack.log


def test_a_model_that_cannot_be_loaded_ends_with_code_2_and_the_reason(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "vocab_size": 3072,
        "max_position_embeddings": 128,
        "hidden_act": "unheard of",  # the worker alone knows which there are
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = pagoda("serve", str(tmp_path), "--port=0", "--grpc-port=0", "--tokenizer=pagoda-tiny")
    assert done.returncode == 2, done.stderr
    assert "unheard of" in next(line for line in done.stderr.splitlines() if "cannot serve" in line)


def test_an_unknown_architecture_is_refused_before_any_process_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["NobodyForCausalLM"], "model_type": "nobody"}')
    done = pagoda("serve", str(tmp_path), "--port=0", "--grpc-port=0", "--tokenizer=pagoda-tiny")
    assert done.returncode == 2, done.stderr
    assert "NobodyForCausalLM" in done.stderr.splitlines()[-1]
    assert "scheduler" not in done.stderr


def test_demo_streams_an_answer_and_ends_with_code_0() -> None:
    done = pagoda("demo", "--prompt", "Hello! Who are you?", "--max-tokens", "40")
    assert done.returncode == 0, done.stderr
    answer = done.stdout.partition("> Hello! Who are you?")[2]
    assert answer.strip()

"""Three processes that trust each other's certificates alone, and what strangers get."""

import asyncio
import json
import shutil
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest

from pagoda import AsyncLLM, SamplingParams
from pagoda.v1 import inference_pb2, inference_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from pagoda_common.config.flags.flags import security_config_to_argv
from pagoda_common.config.security_config import SecurityConfig
from pagoda_common.process.children import free_port
from pagoda_common.rpc.channels import connect, connect_blocking
from tests.harness.certificates import Certificates, make_certificates
from tests.process.stack import Process, get_status, poll_until

HOST = "127.0.0.1"
API_KEY = "an-api-key-that-nobody-may-see"
TOKEN = "a-service-token-that-nobody-may-see"
PROMPT = "Once upon a time"


@dataclass
class Stack:
    """Three processes, each with a certificate of its own."""

    certificates: Certificates
    http_port: int
    grpc_port: int
    scheduler_port: int
    processes: dict[str, Process]

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.http_port}"

    @property
    def scheduler(self) -> str:
        return f"{HOST}:{self.scheduler_port}"

    def start(self, name: str) -> None:
        """Start the service called `name`; all interfaces, which nothing but TLS allows."""
        client = f"--scheduler={self.scheduler}"
        arguments = {
            "scheduler": [f"--port={self.scheduler_port}", "--drain-timeout=0"],
            "worker": [client, "--threads=1", f"--advertise-address={HOST}:{(port := free_port())}", f"--port={port}"],
            "frontend": [client, f"--port={self.http_port}", f"--grpc-port={self.grpc_port}"],
        }[name]
        called = "worker" if name == "scheduler" else "scheduler"
        security = security_config_to_argv(self.security(name, server_name=called))
        self.processes[name] = Process("-m", f"pagoda_{name}", "--host=0.0.0.0", *arguments, *security)

    def security(self, name: str, *, server_name: str | None = None) -> SecurityConfig:
        """Of the service called `name`: its certificate, and the token."""
        token_file = self.certificates.path("tokens")
        return replace(self.certificates.config(name, server_name=server_name), service_token_file=token_file)

    def ask(self) -> str:
        """A greedy completion over HTTP."""
        body = {"model": "pagoda-tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 8}
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {API_KEY}"}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=240) as response:
            return str(json.load(response)["choices"][0]["text"])

    @property
    def log(self) -> str:
        return "\n".join(process.log for process in self.processes.values())

    def until_ready(self) -> None:
        poll_until(lambda: get_status(f"{self.url}/ready") == 200, what="ready over mutual TLS", log=lambda: self.log)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("certificates")
    certificates = make_certificates(directory, "frontend", "scheduler", "worker")
    Path(certificates.path("tokens")).write_text(TOKEN)
    patch = pytest.MonkeyPatch()
    patch.setenv("PAGODA_LOG_LEVEL", "debug")
    patch.setenv("PAGODA_API_KEY", API_KEY)
    stack = Stack(certificates, free_port(), free_port(), free_port(), {})
    try:
        for name in ("worker", "scheduler", "frontend"):
            stack.start(name)
        stack.until_ready()
        yield stack
    finally:
        for process in stack.processes.values():
            process.end()
        patch.undo()


def shown_certificate(port: int) -> str:
    """What a new connection to `port` is shown, as PEM."""
    return ssl.get_server_certificate((HOST, port), timeout=240).strip()


def status_of(security: SecurityConfig, address: str) -> grpc.StatusCode:
    """What the scheduler at `address` answers to GetState."""
    with connect_blocking(address, security=security) as channel:
        try:
            scheduler_pb2_grpc.SchedulerStub(channel).GetState(scheduler_pb2.GetStateRequest(), timeout=240)
        except grpc.RpcError as error:
            return error.code()  # an _InactiveRpcError, which is a grpc.Call
    return grpc.StatusCode.OK


async def get_state(stack: Stack) -> scheduler_pb2.GetStateResponse:
    """What the scheduler tells of itself."""
    async with connect(stack.scheduler, security=stack.security("frontend")) as channel:
        return await scheduler_pb2_grpc.SchedulerStub(channel).GetState(scheduler_pb2.GetStateRequest(), timeout=240)


async def generate(stack: Stack, security: SecurityConfig) -> str:
    """The text that a program gets which joins the scheduler."""
    options = {name: getattr(security, name) for name in ("tls_cert", "tls_key", "tls_ca", "service_token_file")}
    params = SamplingParams(temperature=0, max_tokens=8)
    async with AsyncLLM(address=stack.scheduler, **options) as llm:
        texts = [output.outputs[0].text async for output in llm.generate(PROMPT, params)]
    assert len(texts) > 1, "it is a stream"
    return texts[-1]


def test_three_processes_answer_over_mutual_tls(stack: Stack) -> None:
    text = asyncio.run(generate(stack, stack.security("frontend")))
    assert stack.ask() == text
    trusting = SecurityConfig(tls_ca=stack.certificates.path("ca.crt"))
    with connect_blocking(f"{HOST}:{stack.grpc_port}", security=trusting) as channel:
        request = inference_pb2.GenerateRequest(text=PROMPT)
        request.sampling_params.temperature, request.sampling_params.max_tokens = 0, 8
        key = (("authorization", f"Bearer {API_KEY}"),)
        messages = list(inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=240, metadata=key))
    assert "".join(message.text for message in messages) == text


def test_strangers_are_refused(stack: Stack, tmp_path: Path) -> None:
    ours = stack.certificates.config("frontend")
    assert status_of(ours, stack.scheduler) is grpc.StatusCode.UNAUTHENTICATED, "the token is missing"
    assert status_of(SecurityConfig(), stack.scheduler) is grpc.StatusCode.UNAVAILABLE
    assert status_of(SecurityConfig(tls_ca=ours.tls_ca), stack.scheduler) is grpc.StatusCode.UNAVAILABLE
    strangers = make_certificates(tmp_path, "frontend").config("frontend")
    assert status_of(replace(strangers, tls_ca=ours.tls_ca), stack.scheduler) is grpc.StatusCode.UNAVAILABLE
    assert status_of(strangers, stack.scheduler) is grpc.StatusCode.UNAVAILABLE


def test_a_new_authority_needs_no_restart(stack: Stack, tmp_path: Path) -> None:
    """Every file is replaced; then the scheduler is killed, so that every connection is made again."""
    kept = Certificates(tmp_path / "kept")
    shutil.copytree(stack.certificates.directory, kept.directory)
    text = stack.ask()
    old = shown_certificate(stack.scheduler_port)
    fresh = make_certificates(tmp_path / "new", "frontend", "scheduler", "worker")
    for file in fresh.directory.iterdir():
        shutil.copy(file, stack.certificates.directory)
    new = shown_certificate(stack.scheduler_port)
    assert new != old
    assert new in Path(stack.certificates.path("scheduler.crt")).read_text()
    stack.processes["scheduler"].popen.kill()
    stack.processes["scheduler"].wait()
    stack.start("scheduler")
    stack.until_ready()
    assert stack.ask() == text
    assert status_of(kept.config("frontend"), stack.scheduler) is grpc.StatusCode.UNAVAILABLE


def test_no_secret_in_logs_and_answers(stack: Stack) -> None:
    """With everything logged that can be. Runs last: it reads what the others have caused."""
    key_lines = [
        line
        for file in stack.certificates.directory.glob("*.key")
        for line in file.read_text().splitlines()
        if not line.startswith("-----")
    ]
    trusting = SecurityConfig(tls_ca=stack.certificates.path("ca.crt"))
    with connect_blocking(f"{HOST}:{stack.grpc_port}", security=trusting) as channel:
        key = (("authorization", f"Bearer {API_KEY}"),)
        stub = inference_pb2_grpc.InferenceStub(channel)
        info = stub.GetServerInfo(inference_pb2.GetServerInfoRequest(), timeout=240, metadata=key)
    state = asyncio.run(get_state(stack))
    assert state.workers
    seen = "\n".join([str(info), str(state), stack.log])
    assert "listening" in seen, "there are logs"
    for secret in (API_KEY, TOKEN, *key_lines):
        assert secret not in seen


@pytest.mark.parametrize(
    ("module", "argv", "field"),
    [
        ("pagoda_scheduler", ["--host=0.0.0.0"], "host"),
        ("pagoda_worker", ["--host=0.0.0.0"], "host"),
        ("pagoda_worker", ["--scheduler=10.0.0.1:50052"], "scheduler"),
        ("pagoda_worker", ["--scheduler=unix:/tmp/scheduler"], "scheduler"),
    ],
)
def test_plaintext_over_a_network_is_refused_at_the_start(module: str, argv: list[str], field: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, *argv], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 2, done.stderr
    message = done.stderr.splitlines()[-1]
    assert f"error: --{field} is" in message
    assert "--insecure" in message

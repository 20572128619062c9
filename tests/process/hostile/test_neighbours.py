"""Another user of the machine: scheduler and worker of a `pagoda serve` refuse all that it asks, restarts included."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagoda import LLM
from pagoda.v1 import scheduler_pb2, scheduler_pb2_grpc, worker_pb2, worker_pb2_grpc
from pagoda_common.process.children import free_port
from pagoda_common.rpc.local_token import find_token_file
from tests.process.stack import Process, Stack, ask, poll_until, shown_token

HOST = "127.0.0.1"
LEAVING = scheduler_pb2.WorkerRegistration(leaving=scheduler_pb2.WorkerLeaving(timeout_s=1))
SUBMIT = scheduler_pb2.SubmitRequest(request_id="theirs", prompt_token_ids=bytes(8))
STRANGER = r"""
import os, sys
import grpc
from pagoda.v1 import scheduler_pb2, scheduler_pb2_grpc
from pagoda_common.rpc.local_token import find_token_file
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
file, *addresses = sys.argv[1:]
try:
    print(open(file).read())
except PermissionError:
    print("unreadable")
for address in addresses:
    stub = scheduler_pb2_grpc.SchedulerStub(grpc.insecure_channel(address))
    try:
        print(stub.GetState(scheduler_pb2.GetStateRequest(), timeout=240))
    except grpc.RpcError as error:
        print(error.code().name)
"""
"""As another user, after the imports: the installation may lie where only its owner reads."""


class Served(Stack):
    """`pagoda serve` with a scheduler at a known port."""

    def __init__(self, *flags: str) -> None:
        self.scheduler_port = free_port()
        super().__init__(f"--scheduler-port={self.scheduler_port}", *flags)

    @property
    def scheduler(self) -> str:
        return f"{HOST}:{self.scheduler_port}"

    def token(self) -> str:
        """As other programs of its user find it."""
        return shown_token(self.scheduler_port)[0][1].removeprefix("Bearer ")

    def state(self) -> scheduler_pb2.GetStateResponse:
        """With the token."""
        shown = shown_token(self.scheduler_port)
        with grpc.insecure_channel(self.scheduler) as channel:
            stub = scheduler_pb2_grpc.SchedulerStub(channel)
            return stub.GetState(scheduler_pb2.GetStateRequest(), timeout=240, metadata=shown, wait_for_ready=True)

    def worker_addresses(self) -> list[str]:
        """Every address of its workers."""
        identities = [worker.identity for worker in self.state().workers]
        return [address for one in identities for address in (one.address, one.local_address) if address]


@pytest.fixture(scope="module")
def stack() -> Iterator[Served]:
    stack = Served("--enable-sleep-mode")
    try:
        stack.wait_ready()
        yield stack
    finally:
        stack.end()


def code_of(call: Any) -> grpc.StatusCode:
    """How a call, or a stream, ends."""
    try:
        for _ in [call()] if not hasattr(call, "__iter__") else call:
            return grpc.StatusCode.OK
    except grpc.RpcError as error:
        return error.code()  # an _InactiveRpcError, which is a grpc.Call
    return grpc.StatusCode.OK


def attacks(channel: grpc.Channel, service: Any, stub_type: Any, module: Any) -> dict[str, grpc.StatusCode]:
    """What each method of a service answers to an empty message of its type; registration tries to leave."""
    stub, codes = stub_type(channel), {}
    for method in service.methods:
        kind = method.input_type._concrete_class
        message = {"RegisterWorker": LEAVING, "Generate": SUBMIT}.get(method.name, kind())
        request = iter([message]) if method.client_streaming else message
        call = getattr(stub, method.name)
        asked = (lambda call=call, request=request: call(request, timeout=240)) if not method.server_streaming else None
        codes[method.name] = code_of(asked or call(request, timeout=240))
    return codes


def assert_refused(stack: Served) -> None:
    scheduler = scheduler_pb2.DESCRIPTOR.services_by_name["Scheduler"]
    worker = worker_pb2.DESCRIPTOR.services_by_name["Worker"]
    addresses = stack.worker_addresses()
    assert len(addresses) >= 1
    targets = [(stack.scheduler, scheduler, scheduler_pb2_grpc.SchedulerStub, scheduler_pb2)]
    targets += [(address, worker, worker_pb2_grpc.WorkerStub, worker_pb2) for address in addresses]
    for address, service, stub_type, module in targets:
        with grpc.insecure_channel(address) as channel:
            codes = attacks(channel, service, stub_type, module)
            assert len(codes) == len(service.methods)
            assert set(codes.values()) == {grpc.StatusCode.UNAUTHENTICATED}, (address, codes)
            health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=240)
            assert health.status == health_pb2.HealthCheckResponse.SERVING


def test_every_call_of_a_stranger_is_refused(stack: Served) -> None:
    text = ask(stack.url)
    assert_refused(stack)
    assert ask(stack.url) == text
    assert [worker.state for worker in stack.state().workers] == ["serving"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to be another user")
def test_another_user_gets_nothing_and_finds_no_token(stack: Served) -> None:
    addresses = [stack.scheduler, *stack.worker_addresses()]
    command = [sys.executable, "-c", STRANGER, str(find_token_file(stack.scheduler_port)), *addresses]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout.split() == ["unreadable", *["UNAUTHENTICATED"] * len(addresses)], done.stderr


def test_the_token_stands_in_no_command_line_and_no_log(stack: Served) -> None:
    token = stack.token()
    words = [word for process in stack.children() for word in process.cmdline()]
    assert not any(token in word for word in words)
    assert token not in stack.log


def test_restarted_processes_have_the_same_token(stack: Served) -> None:
    text, token = ask(stack.url), stack.token()
    for name in ("worker", "scheduler", "frontend"):
        victim = stack.service(name)
        victim.send_signal(signal.SIGKILL)
        poll_until(lambda victim=victim: not psutil.pid_exists(victim.pid), what=f"the {name} is gone")
        poll_until(stack.is_ready, what="it serves again", log=lambda: stack.log)
        assert ask(stack.url) == text
    assert stack.token() == token
    poll_until(lambda: [worker.state for worker in stack.state().workers] == ["serving"], what="the worker serves")
    assert_refused(stack)


def test_programs_of_the_same_user_join_by_the_address_alone(stack: Served) -> None:
    with LLM(address=stack.scheduler) as llm:
        assert llm.generate("Once upon a time")[0].outputs[0].text
    worker = Process("-m", "pagoda_worker", f"--scheduler={stack.scheduler}", "--threads=1")
    try:
        poll_until(
            lambda: sorted(one.state for one in stack.state().workers) == ["serving"] * 2,
            what="a worker that was started by hand serves",
            log=lambda: worker.log + stack.log,
        )
        assert_refused(stack)
    finally:
        worker.end()


def test_a_private_engine_is_as_closed() -> None:
    others = psutil.Process().children(recursive=True)
    with LLM() as llm:
        children = [child for child in psutil.Process().children(recursive=True) if child not in others]
        ports = {
            connection.laddr.port
            for child in children
            for connection in child.net_connections()
            if connection.status == psutil.CONN_LISTEN
        }
        assert len(ports) >= 2
        codes = set()
        for port in ports:
            with grpc.insecure_channel(f"{HOST}:{port}") as channel:
                stub = scheduler_pb2_grpc.SchedulerStub(channel)
                codes.add(code_of(lambda stub=stub: stub.GetState(scheduler_pb2.GetStateRequest(), timeout=240)))
        assert codes == {grpc.StatusCode.UNAUTHENTICATED}
        assert llm.generate("Once upon a time")[0].outputs[0].text
        assert llm.reset_prefix_cache()

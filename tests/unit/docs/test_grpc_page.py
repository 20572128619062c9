"""docs/grpc.md against the contracts: every RPC with its streaming mode, and the numbers that stand there."""

import re
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor import ServiceDescriptor

from pagoda.v1 import inference_pb2, scheduler_pb2, worker_pb2
from pagoda_common.config.frontend_config import FrontendConfig
from pagoda_common.engine import session as engine_session
from pagoda_common.errors import Code
from pagoda_common.rpc import channels
from pagoda_common.rpc import service as rpc
from pagoda_frontend.requests import event_ids
from pagoda_scheduler.groups import worker_groups
from pagoda_scheduler.rpc import heartbeats, outbox, worker_client, worker_control
from pagoda_worker.rpc import fence as steps

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "grpc.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
OURS = [
    file.services_by_name[name]
    for file, name in (
        (inference_pb2.DESCRIPTOR, "Inference"),
        (scheduler_pb2.DESCRIPTOR, "Scheduler"),
        (worker_pb2.DESCRIPTOR, "Worker"),
    )
]
MODES = {
    (False, False): "unary",
    (False, True): "server stream",
    (True, True): "bidirectional",
}
"""By whether requests and responses are streams."""


def rows(section: str) -> Iterator[list[str]]:
    """The cells of the rows of RPCs in a section."""
    for line in SECTIONS[section].splitlines():
        if line.startswith("| `"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def check_service(service: ServiceDescriptor) -> None:
    described = [(name.strip("`"), mode) for name, mode, *_ in rows(service.full_name)]
    served = [(m.name, MODES[bool(m.client_streaming), bool(m.server_streaming)]) for m in service.methods]
    assert sorted(described) == sorted(served)


@pytest.mark.parametrize("service", OURS, ids=lambda service: service.name)
def test_every_rpc_and_no_other_is_described(service: ServiceDescriptor) -> None:
    check_service(service)


def test_every_rpc_of_the_gateway_s_contract_is_described() -> None:
    engine = pytest.importorskip("smg_grpc_proto", reason="smg-grpc-proto is not installed here").vllm_engine_pb2
    check_service(engine.DESCRIPTOR.services_by_name["VllmEngine"])


def test_every_service_of_the_contracts_has_a_section() -> None:
    protos = [file.read_text(encoding="utf-8") for file in (ROOT / "protos" / "pagoda" / "v1").glob("*.proto")]
    named = {name for proto in protos for name in re.findall(r"^service (\w+)", proto, re.MULTILINE)}
    assert named == {service.name for service in OURS}
    assert {service.full_name for service in OURS} <= SECTIONS.keys()


def test_the_codes_are_those_of_grpc_and_all_of_ours_are_explained() -> None:
    explained = {line.split("|")[1].strip() for line in SECTIONS["How calls end"].splitlines() if line.startswith("| ")}
    assert explained - {"code"} == {code.name for code in Code} - {"OK"}
    endings = " ".join(cells[3] for service in OURS for cells in rows(service.full_name))
    named = set(re.findall(r"\b[A-Z_]{6,}\b", endings))
    assert "UNAVAILABLE" in named
    assert named <= {code.name for code in grpc.StatusCode}


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ("Limits", f"| a request | {channels.MAX_MESSAGE_BYTES // 2**20} MiB |"),
        ("Limits", f"| a response | {channels.MAX_ANSWER_BYTES // 2**30} GiB."),
        ("Limits", f"| metadata of a call | {rpc.MAX_METADATA_BYTES // 2**10} KiB |"),
        ("Limits", f"over one connection | {rpc.MAX_CONCURRENT_STREAMS:,},"),
        ("Limits", f"| handshake | {rpc.HANDSHAKE_TIMEOUT_MS // 1000} s |"),
        ("Limits", f"pings every {dict(rpc.SERVER_OPTIONS)['grpc.keepalive_time_ms'] // 1000} s"),
        ("Limits", f"does not answer for {dict(rpc.SERVER_OPTIONS)['grpc.keepalive_timeout_ms'] // 1000} s"),
        ("Health, reflection, channelz", f"- For liveness: `{rpc.LIVENESS}`,"),
        ("pagoda.v1.Inference", f"waits up to {FrontendConfig().recovery_timeout_s:g} s"),
        ("pagoda.v1.Inference", f"streams of up to {event_ids.MAX_SEQUENCES} sequences"),
        ("pagoda.v1.Scheduler", f"{outbox.MAX_BACKLOG:,} unread messages"),
        ("pagoda.v1.Scheduler", f"{outbox.MAX_UNTAKEN:,} unread steps or {outbox.MAX_UNTAKEN_BYTES >> 20} MiB,"),
        (
            "pagoda.v1.Scheduler",
            f"once every {engine_session.ACK_EVERY} messages or {engine_session.ACK_BYTES >> 20} MiB,",
        ),
        ("pagoda.v1.Scheduler", f"(`acknowledges_every`, {outbox.DEFAULT_ACKNOWLEDGES_EVERY} if not"),
        ("pagoda.v1.Scheduler", f"at most {engine_session.ACK_DELAY_S:g} s late"),
        ("pagoda.v1.Scheduler", f"wait {engine_session.HELLO_TIMEOUT_S:g} s for the hello"),
        ("pagoda.v1.Worker", f"gives `InitDevice` {worker_client.INIT_TIMEOUT_S:g} s"),
        ("pagoda.v1.Worker", f"`InitializeCache` {worker_client.CACHE_TIMEOUT_S:g} s each"),
        ("pagoda.v1.Worker", f"`Sleep` and `WakeUp` have {worker_control.MOVE_TIMEOUT_S:g} s"),
    ],
)
def test_the_numbers_are_those_of_the_code(section: str, text: str) -> None:
    assert text in " ".join(SECTIONS[section].split())


def test_the_numbers_in_words_are_those_of_the_code() -> None:
    """Ten, three and two seconds, four steps, eight answers: change the page with them."""
    assert (heartbeats.TIMEOUT_S, heartbeats.IDLE_TIMEOUT_S, worker_groups.REGISTRATION_GRACE_S) == (10.0, 3.0, 2.0)
    assert (steps.MAX_STEPS_AHEAD, steps.NUM_KEPT_ANSWERS) == (4, 8)

"""compose.tls.yaml: who has no certificate is refused, inside and outside."""

import os
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from pagoda.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from tests.container.stack import ROOT, ComposeStack

USER = 10001
"""Of the containers."""
TIMEOUT_S = 60.0
NO_TLS = ["env", "-u", "PAGODA_TLS_CA"]
NO_CERTIFICATE = ["env", "-u", "PAGODA_TLS_CERT", "-u", "PAGODA_TLS_KEY"]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority and a pair a service, as the overlay's own comment says."""
    directory = tmp_path_factory.mktemp("certificates")
    names = ["frontend", "scheduler", "worker", "balancer"]
    subprocess.run([ROOT / "examples/tls/make_certs.sh", directory, *names], check=True, capture_output=True)
    for key in directory.glob("*.key"):
        os.chown(key, USER, -1)
    return directory


@pytest.fixture(scope="module")
def tls_stack(
    stack: ComposeStack, certificates: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ComposeStack]:
    """A stack with the overlay; `stack` has built the images."""
    files = ("compose.yaml", "compose.tls.yaml")
    own = ComposeStack(directory=tmp_path_factory.mktemp("tls"), files=files, TLS_DIR=str(certificates))
    try:
        own.up()
        yield own
    finally:
        own.remove()


def generate(channel: grpc.Channel) -> str:
    """A few greedy tokens."""
    sampling_params = types_pb2.SamplingParams(max_tokens=8, temperature=0)
    request = inference_pb2.GenerateRequest(text="Once upon a time", sampling_params=sampling_params)
    with channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        return "".join(part.text for part in stub.Generate(request, timeout=TIMEOUT_S))


def test_clients_with_the_authority_are_served(tls_stack: ComposeStack, certificates: Path) -> None:
    authority = certificates / "ca.crt"
    address = tls_stack.grpc_address
    assert generate(grpc.secure_channel(address, grpc.ssl_channel_credentials(authority.read_bytes())))
    url = f"https://{tls_stack.url.removeprefix('http://')}/ready"
    context = ssl.create_default_context(cafile=authority)
    with urllib.request.urlopen(url, context=context, timeout=TIMEOUT_S) as response:
        assert response.status == 200


def test_plaintext_clients_are_refused_outside(tls_stack: ComposeStack) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        generate(grpc.insecure_channel(tls_stack.grpc_address))
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        urllib.request.urlopen(f"{tls_stack.url}/ready", timeout=TIMEOUT_S)


@pytest.mark.parametrize("without", [NO_TLS, NO_CERTIFICATE], ids=["plaintext", "no certificate"])
@pytest.mark.parametrize("address", ["scheduler:50052", "worker:50053"])
def test_callers_without_a_certificate_are_refused_inside(
    tls_stack: ComposeStack, without: list[str], address: str
) -> None:
    service = address.partition(":")[0]
    (container,) = tls_stack.containers(service)
    own = address.replace(service, "127.0.0.1")  # a name that is in the certificate
    assert tls_stack.execute(container, "pagoda-health", own).strip() == "SERVING"
    done = subprocess.run(
        ["docker", "exec", container, *without, "pagoda-health", own], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "UNAVAILABLE" in done.stderr

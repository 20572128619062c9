"""The images: small, without root, without what the service does not need. (test_stack.py ends with a stop.)"""

import json
import subprocess

import pytest

from tests.container.stack import ComposeStack

MEGABYTE = 1_000_000
MAX_BYTES = {"frontend": 300 * MEGABYTE, "scheduler": 300 * MEGABYTE, "worker": 1100 * MEGABYTE}
MAX_CODE_BYTES = 15 * MEGABYTE
"""Of what a release pulls again."""
SERVICES = tuple(MAX_BYTES)


def image_of(stack: ComposeStack, service: str) -> dict:
    return stack.inspect(stack.inspect(stack.containers(service)[0])["Image"])


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_is_small(stack: ComposeStack, service: str) -> None:
    assert image_of(stack, service)["Size"] < MAX_BYTES[service]


@pytest.mark.parametrize("service", [*SERVICES, "balancer"])
def test_a_container_runs_without_root_and_cannot_write_but_to_tmp(stack: ComposeStack, service: str) -> None:
    (container, *_) = stack.containers(service)
    assert stack.execute(container, "id", "-u").strip() != "0"
    attempt = "for d in / /opt /usr /tmp; do touch $d/probe 2>/dev/null && echo $d && rm $d/probe; done; true"
    assert stack.execute(container, "sh", "-c", attempt).split() == ["/tmp"]
    known = stack.inspect(container)["HostConfig"]
    assert known["CapDrop"] == ["ALL"]
    assert known["SecurityOpt"] == ["no-new-privileges:true"]


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_says_what_it_is(stack: ComposeStack, service: str) -> None:
    labels = image_of(stack, service)["Config"]["Labels"]
    assert labels["org.opencontainers.image.title"] == f"pagoda-{service}"
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_holds_its_own_service_and_torch_only_the_worker_s(stack: ComposeStack, service: str) -> None:
    find = "import importlib.util as u, sys; print([n for n in sys.argv[1:] if u.find_spec(n)])"
    names = [*(f"pagoda_{name}" for name in SERVICES), "torch", "pagoda_kernels"]
    found = stack.execute(stack.containers(service)[0], "python", "-c", find, *names)
    held = [f"pagoda_{service}", *(["torch", "pagoda_kernels"] if service == "worker" else [])]
    assert found.strip() == str(held)


@pytest.mark.parametrize(("service", "port"), [("frontend", 50051), ("scheduler", 50052), ("worker", 50053)])
def test_the_health_probe_of_an_image_answers(stack: ComposeStack, service: str, port: int) -> None:
    (container, *_) = stack.containers(service)
    assert stack.execute(container, "pagoda-health", f"127.0.0.1:{port}").strip() == "SERVING"


@pytest.mark.parametrize("service", SERVICES)
def test_code_is_a_layer_of_its_own_above_all_others(stack: ComposeStack, service: str) -> None:
    image = stack.inspect(stack.containers(service)[0])["Image"]
    command = ["docker", "history", "--no-trunc", "--human=false", "--format", "{{.Size}} {{.CreatedBy}}", image]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    layers = [line.split(" ", 1) for line in lines if not line.startswith("0 ")]
    size, created_by = layers[0]
    assert "/code /opt/pagoda" in created_by
    assert int(size) < MAX_CODE_BYTES


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_lists_what_it_is_made_of_and_has_no_tools(stack: ComposeStack, service: str) -> None:
    (container, *_) = stack.containers(service)
    bill = json.loads(stack.execute(container, "cat", "/usr/share/doc/pagoda/packages.cdx.json"))
    listed = {component["name"]: component for component in bill["components"]}
    assert {"grpcio", "protobuf", *(["torch"] if service == "worker" else [])} <= listed.keys()
    assert listed["grpcio"]["licenses"]
    find = "command -v pip pip3 gcc g++ cc; python -c 'import pip' 2>/dev/null && echo pip; true"
    assert stack.execute(container, "sh", "-c", find).split() == []


def test_the_worker_finds_its_compiled_kernels(stack: ComposeStack) -> None:
    script = (
        "from pagoda_kernels.native.library import cpu_level, load_native; print(cpu_level() is None or load_native())"
    )
    assert stack.execute(stack.containers("worker")[0], "python", "-c", script).strip() == "True"

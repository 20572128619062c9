"""The images: small, without root, without what the service does not need. (test_stack.py ends with a stop.)"""

import pytest

from tests.container.stack import ComposeStack

MEGABYTE = 1_000_000
MAX_BYTES = {"frontend": 300 * MEGABYTE, "scheduler": 300 * MEGABYTE, "worker": 1300 * MEGABYTE}
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

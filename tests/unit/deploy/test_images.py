"""What the Dockerfiles say, read as text: ports, health, user, what an image is made of. Builds nothing."""

import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from pagoda_common.process.children import service_environment
from pagoda_common.version import VERSION

ROOT = Path(__file__).parents[3]
SERVICES = {"frontend": (50051, (8000, 50051)), "scheduler": (50052, (50052, 9090)), "worker": (50053, (50053, 9090))}
"""The gRPC port that health is asked on, and all ports."""
IMAGES = [*SERVICES, "balancer"]
USER = "10001:10001"


def path_of(image: str) -> Path:
    return ROOT / ("deploy/balancer" if image == "balancer" else f"services/{image}") / "Dockerfile"


@cache
def stages(image: str) -> tuple[tuple[tuple[str, str], ...], ...]:
    """Instructions of each stage as (name, rest), comments left out; the first stage is what stands before FROM."""
    text = "\n".join(line for line in path_of(image).read_text().splitlines() if not line.lstrip().startswith("#"))
    lines = re.sub(r"\s*\\\n\s*", " ", text).splitlines()
    found: list[list[tuple[str, str]]] = [[]]
    for name, _, rest in (line.partition(" ") for line in lines if line.strip()):
        if name == "FROM":
            found.append([])
        found[-1].append((name, rest.strip()))
    return tuple(tuple(stage) for stage in found)


def last(image: str, name: str) -> list[str]:
    """All instructions of a name in the stage that the image is."""
    return [rest for instruction, rest in stages(image)[-1] if instruction == name]


def environment(image: str) -> dict[str, str]:
    return dict(word.split("=", 1) for line in last(image, "ENV") for word in line.split())


def runs(image: str) -> str:
    """Commands of all stages."""
    return "\n".join(rest for stage in stages(image) for name, rest in stage if name == "RUN")


def commands(image: str, stage: str) -> str:
    """Commands of one stage."""
    (found,) = [one for one in stages(image)[1:] if one[0][1].endswith(f" AS {stage}")]
    return "\n".join(rest for name, rest in found if name == "RUN")


def stage_name(stage: tuple[tuple[str, str], ...]) -> str:
    """The name that COPY and FROM may use; empty for the last stage."""
    return stage[0][1].partition(" AS ")[2]


def of_all_before(image: str, stage: tuple[tuple[str, str], ...], *names: str) -> list[str]:
    """Instructions of these names in a stage and in those that it is made from."""
    below = stage[0][1].split()[0]
    found = [one for one in stages(image)[1:] if stage_name(one) == below]
    inherited = of_all_before(image, found[0], *names) if found else []
    return inherited + [rest for name, rest in stage if name in names]


@pytest.mark.parametrize("image", IMAGES)
def test_every_line_is_an_instruction_and_what_it_takes_from_a_stage_exists(image: str) -> None:
    known = {"ARG", "FROM", "RUN", "COPY", "ENV", "LABEL", "WORKDIR", "USER", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT"}
    before: set[str] = set()
    for stage in stages(image)[1:]:
        assert {name for name, _ in stage} <= known | {"STOPSIGNAL"}
        taken = {match for _, rest in stage for match in re.findall(r"(?:--from|,from)=([\w-]+)", rest)}
        assert taken <= before
        before.add(stage_name(stage))


@pytest.mark.parametrize("image", SERVICES)
def test_what_is_copied_from_a_stage_was_made_there(image: str) -> None:
    by_name = {stage_name(stage): stage for stage in stages(image)[1:]}
    for stage in stages(image)[1:]:
        for rest in (rest for name, rest in stage if name == "COPY" and "--from=" in rest):
            source, path, _ = rest.removeprefix("--from=").split()
            made = " ".join(of_all_before(image, by_name[source], "RUN", "COPY"))
            assert re.search(rf"{re.escape(path)}\b", made), f"{path} of {source}"


@pytest.mark.parametrize("image", SERVICES)
def test_programs_are_called_where_they_were_put(image: str) -> None:
    for stage in stages(image)[1:]:
        made = " ".join(of_all_before(image, stage, "RUN", "COPY"))
        there = {*re.findall(r"venv (?:--\S+ )*(/opt/\w+)", made), *re.findall(r" (/opt/\w+)$", made, re.MULTILINE)}
        there |= {rest.split()[-1] for rest in of_all_before(image, stage, "COPY")}
        named = {path for name, rest in stage if name in ("RUN", "ENV") for path in re.findall(r"/opt/\w+", rest)}
        assert named <= there


@pytest.mark.parametrize("image", SERVICES)
def test_what_a_stage_reads_was_copied_into_it(image: str) -> None:
    for stage in stages(image)[1:]:
        there = {
            (target + Path(path).name if target.endswith("/") else target)
            for rest in of_all_before(image, stage, "COPY")
            for *paths, target in [[word for word in rest.split() if not word.startswith("--")]]
            for path in paths
        }
        # What commands write is made as they run.
        read = re.findall(
            r"(?<![>\w])(?:/src|/dist)/[\w./-]*\w", " ".join(rest for name, rest in stage if name == "RUN")
        )
        for path in read:
            assert any(path == each or path.startswith(each + "/") or each.startswith(path + "/") for each in there), (
                path
            )


@pytest.mark.parametrize("image", SERVICES)
def test_what_a_stage_runs_with_is_declared_in_it(image: str) -> None:
    for stage in stages(image)[1:]:
        declared = set(re.findall(r"(\w+)=", " ".join(of_all_before(image, stage, "ENV"))))
        declared |= {rest.partition("=")[0] for rest in of_all_before(image, stage, "ARG")}
        for name, rest in stage:
            if name in ("RUN", "LABEL", "COPY"):
                assert set(re.findall(r"\$\{([A-Z_]+)\}", rest)) <= declared
            if name == "RUN" and re.search(r"\bpip (\S+ )*(install|wheel) ", rest) and "--no-index" not in rest:
                assert {"PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"} <= declared, "packages come from where the builder says"
                assert "--mount=type=secret,id=pip_config,target=/etc/pip.conf" in rest
    (wheel,) = [stage for stage in stages(image)[1:] if stage_name(stage) == "wheel"]
    assert ("COPY", ". .") in wheel
    assert commands(image, "wheel").endswith("pip wheel --no-deps --wheel-dir /dist .")


@pytest.mark.parametrize("image", SERVICES)
def test_health_is_asked_on_the_port_that_the_service_listens_on(image: str) -> None:
    port, ports = SERVICES[image]
    (health,) = last(image, "HEALTHCHECK")
    assert health.endswith(f'CMD ["pagoda-health", "127.0.0.1:{port}"]')
    assert last(image, "EXPOSE") == [" ".join(map(str, ports))]
    env = environment(image)
    assert env["PAGODA_HOST"] == "0.0.0.0"
    assert "PAGODA_GRPC_PORT" not in env
    # Frontend and scheduler listen on their usual ports; a worker takes any port unless it is told one.
    assert env.get("PAGODA_PORT") == (str(port) if image == "worker" else None)
    assert env.get("PAGODA_METRICS_PORT") == ("9090" if 9090 in ports else None)
    assert last(image, "ENTRYPOINT") == [f'["pagoda-{image}"]']
    assert last(image, "CMD") == []


@pytest.mark.parametrize("image", IMAGES)
def test_a_container_has_ten_minutes_to_start_and_is_ill_after_three_failures(image: str) -> None:
    options = dict(re.findall(r"--([\w-]+)=(\w+)", last(image, "HEALTHCHECK")[0]))
    assert options == {
        "interval": "15s",
        "timeout": "15s",
        "retries": "3",
        "start-period": "10m",
        "start-interval": "1s",
    }


@pytest.mark.parametrize("image", IMAGES)
def test_the_user_is_not_root_and_has_the_number_that_pages_and_pods_name(image: str) -> None:
    assert last(image, "USER") == [USER]
    names = [name for name, _ in stages(image)[-1]]
    assert "RUN" not in names[names.index("USER") :], "as another user nothing could be installed"
    if image in SERVICES:
        (made,) = last(image, "RUN")
        assert "groupadd --gid 10001 pagoda" in made
        assert "useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp pagoda" in made
        assert made.endswith("install --directory --owner=10001 --group=10001 /models")
        assert f"user {USER.partition(':')[0]}" in (ROOT / "docs" / "containers.md").read_text()


@pytest.mark.parametrize("image", SERVICES)
def test_the_environment_is_that_of_a_child_of_pagoda_serve(image: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GRPC_EXPERIMENTS", "PYTHONMALLOC", "MALLOC_ARENA_MAX"):
        monkeypatch.delenv(name, raising=False)
    wanted = service_environment(("python", "-m", f"pagoda_{image}"))
    env = environment(image)
    for name in ("GRPC_EXPERIMENTS", "PYTHONMALLOC", "MALLOC_ARENA_MAX", "PYTHONUNBUFFERED"):
        assert env.get(name) == wanted.get(name), name
    assert env["PYTHONDONTWRITEBYTECODE"] == "1", "the file system cannot be written to"
    assert (env["HOME"], env["HF_HOME"]) == ("/tmp", "/models")
    assert env["PATH"] == "/opt/pagoda/bin:$PATH"


@pytest.mark.parametrize("image", SERVICES)
def test_an_image_leaves_out_the_other_services_and_is_tried_with_its_own(image: str) -> None:
    removed = set(re.findall(r"\bpagoda_\w+", " ".join(re.findall(r"rm -rf ([^&]*pagoda_[^&]*)", runs(image)))))
    others = {f"pagoda_{name}" for name in SERVICES if name != image}
    assert removed == (others if image == "worker" else others | {"pagoda_kernels"})
    assert ("-name '*.safetensors' -delete" in runs(image)) is (image != "worker"), "weights are the worker's"
    (tried,) = re.findall(r"-c 'import (pagoda_[^']+)'", runs(image))
    assert f"pagoda_{image}." in tried


@pytest.mark.parametrize("image", SERVICES)
def test_layers_go_from_what_changes_least_to_the_code_and_all_of_them_are_copied(image: str) -> None:
    packages = ["--from=slim /opt/pagoda /opt/pagoda", "--from=kernels /prebuilt /"]
    assert last(image, "COPY") == [
        *(packages if image == "worker" else ["--from=packages /opt/pagoda /opt/pagoda"]),
        "--from=bill /bill /usr/share/doc/pagoda/",
        "--from=code /code /opt/pagoda",
    ]


@pytest.mark.parametrize("image", SERVICES)
def test_code_and_packages_are_compiled_to_bytecode_where_they_are_copied_from(image: str) -> None:
    """The image cannot be written to: what is not compiled is compiled at each start."""
    assert 'compileall -q -s /code -p /opt/pagoda "$PWD"' in commands(image, "code")
    assert re.search(
        r"python -m compileall -q -x \S+ \"\$PWD\"", commands(image, "slim" if image == "worker" else "packages")
    )


@pytest.mark.parametrize("image", SERVICES)
def test_the_bill_of_materials_lists_the_packages_that_the_image_runs_with(image: str) -> None:
    bill = commands(image, "bill")
    (interpreter,) = re.findall(r"cyclonedx-py environment (\S+)", bill)
    assert interpreter == environment(image)["PATH"].partition(":")[0] + "/python"
    (written,) = re.findall(r"--output-file (\S+)/\S+\.json", bill)
    assert [words for words in map(str.split, last(image, "COPY")) if words[:2] == ["--from=bill", written]]


@pytest.mark.parametrize("image", SERVICES)
def test_extras_are_those_of_the_project(image: str) -> None:
    (extras,) = re.findall(r'ARG EXTRAS="(.*)"', path_of(image).read_text())
    assert extras.split() == [image, "otel"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras.split()) <= set(project["optional-dependencies"])
    arguments = dict(rest.split("=", 1) for rest in last(image, "ARG"))
    assert arguments == {"VERSION": VERSION, "REVISION": "unknown"}


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_says_what_it_is_and_is_built_on_what_the_others_are(image: str) -> None:
    (labels,) = last(image, "LABEL")
    known = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]*)"', labels))
    assert known["title"] == f"pagoda-{image}"
    assert "Pagoda" in known["description"]
    assert known["licenses"] == ("GPL-2.0-or-later" if image == "balancer" else "Apache-2.0")
    if image in SERVICES:
        assert (known["version"], known["revision"]) == ("${VERSION}", "${REVISION}")
    assert ("ARG", "BASE_IMAGE=python:3.11-slim-bookworm") in stages(image)[0]
    bases = {rest.split()[0] for stage in stages(image)[1:] for name, rest in stage if name == "FROM"}
    assert "${BASE_IMAGE}" in bases
    assert bases <= {"${BASE_IMAGE}", "${VARIANT}", "packages", "slim", "scratch"}
    assert [rest for name, rest in stages(image)[-1] if name == "FROM"] == [
        "${VARIANT}" if image == "worker" else "${BASE_IMAGE}"
    ]


def test_the_worker_s_variants_differ_by_compiler_and_devices_alone() -> None:
    assert ("ARG", "VARIANT=cpu") in stages("worker")[0]
    by_name = {stage[0][1].rpartition(" AS ")[2]: stage for stage in stages("worker")[1:]}
    assert [name for name, _ in by_name["cpu"]] == ["FROM"]
    assert [name for name, _ in by_name["cuda"]] == ["FROM", "RUN", "ENV"]
    assert " gcc libc6-dev " in by_name["cuda"][1][1]
    assert by_name["cuda"][2][1] == "NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility"
    assert by_name["kernels"][0][1] == "packages AS kernels"
    assert ("ARG", 'KERNEL_LEVELS="amx avx512 avx2"') in by_name["kernels"]
    assert "$(printf ' --level %s' ${KERNEL_LEVELS})" in commands("worker", "kernels")
    assert """[ "${VARIANT}" = cpu ]""" in commands("worker", "kernels"), "a GPU's kernels are Triton's"
    torch = re.search(r"TORCH := (\S+)", (ROOT / "Makefile").read_text())
    assert torch
    assert ("ARG", f"TORCH={torch[1]}") in by_name["packages"], "the one that the tests run with"
    assert ("ARG", "TORCH_ARM64=torch==2.10.0") in by_name["packages"]
    chosen = 'if [ "${VARIANT}$(uname -m)" = cpuaarch64 ]; then torch="${TORCH_ARM64}"; else torch="${TORCH}"; fi'
    assert chosen in commands("worker", "packages")


def test_triton_keeps_its_compiler_and_its_headers() -> None:
    """It compiles programs for the device (its own ptxas), and what launches them (gcc, its own cuda.h)."""
    slim = commands("worker", "slim")
    removed = " ".join(re.findall(r"rm -rf ([^&]*)", slim)).split()
    assert removed
    assert not [path for path in removed if "triton" in path]
    assert re.findall(r"find (\S+) [^&]*-delete", slim) == ["torch/bin", "."]
    assert "find . -name '*.py[ix]' -delete" in slim, "of all packages, stubs and sources of Cython alone"


def test_the_worker_s_build_refuses_a_cpu_torch_where_cuda_is_asked_for() -> None:
    assert 'if [ "${VARIANT}" = cuda ] && [ -z "${cuda}" ]; then' in runs("worker")
    assert re.search(r"VARIANT=cuda, but this is a CPU build of torch\" >&2; exit 1; fi", runs("worker"))
    assert 'if [ "${VARIANT}" = cuda ]; then links=""; else links="--find-links=/wheels"; fi' in runs("worker")


def test_the_balancer_ends_gently_and_is_asked_whether_it_is_ready() -> None:
    assert last("balancer", "STOPSIGNAL") == ["SIGUSR1"]
    assert last("balancer", "EXPOSE") == ["8000 50051 8404"]
    assert "urlopen('http://127.0.0.1:8404/ready', timeout=5)" in last("balancer", "HEALTHCHECK")[0]
    (copied,) = last("balancer", "COPY")
    assert last("balancer", "ENTRYPOINT") == [f'["haproxy", "-db", "-f", "{copied.split()[1]}"]']

"""The image with all services: its stage of the worker's Dockerfile, and the script that it starts. Builds nothing."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.unit.deploy.test_images import ROOT, SERVICES, environment, last, stage_name, stages

SCRIPT = ROOT / "deploy" / "all-in-one" / "entrypoint.sh"
STAGES = {stage_name(stage): stage for stage in stages("worker")[1:]}
STAGE = STAGES["all-in-one"]


def of(name: str, stage: str = "all-in-one") -> list[str]:
    """What follows an instruction in a stage."""
    return [rest for instruction, rest in STAGES[stage] if instruction == name]


def start(folder: Path, *arguments: str, model: str | None = None, is_mounted: bool = False) -> tuple[list[str], int]:
    """What the script calls, after the value of PAGODA_MODEL, and its status; the models are mounted in `folder`."""
    mounted, programs = folder / "models", folder / "bin"
    mounted.mkdir()
    programs.mkdir()
    if is_mounted:
        (mounted / "config.json").write_text("{}")
    command = programs / "pagoda"
    command.write_text('#!/bin/sh\nprintf "%s\\n" "${PAGODA_MODEL-unset}" "$@"\nexit 7\n')
    command.chmod(0o755)
    script = folder / "entrypoint.sh"
    script.write_text(SCRIPT.read_text().replace("/mnt/models", str(mounted)))
    variables = {name: value for name, value in os.environ.items() if name != "PAGODA_MODEL"}
    variables["PATH"] = f"{programs}:{variables['PATH']}"
    if model is not None:
        variables["PAGODA_MODEL"] = model
    done = subprocess.run(
        ["/bin/sh", str(script), *arguments], env=variables, capture_output=True, text=True, check=False
    )
    return done.stdout.replace(str(mounted), "/mnt/models").splitlines(), done.returncode


@pytest.mark.parametrize(
    ("model", "is_mounted", "served"),
    [
        (None, False, "unset"),
        (None, True, "/mnt/models"),
        ("", True, "/mnt/models"),
        ("Qwen/Qwen3-0.6B", True, "Qwen/Qwen3-0.6B"),
        ("Qwen/Qwen3-0.6B", False, "Qwen/Qwen3-0.6B"),
    ],
)
def test_the_model_is_the_one_that_was_named_else_the_mounted_one(
    model: str | None, is_mounted: bool, served: str, tmp_path: Path
) -> None:
    called, status = start(tmp_path, "--chat-template", "a b", model=model, is_mounted=is_mounted)
    assert called == [served, "serve", "--chat-template", "a b"], "every argument as it was given"
    assert status == 7, "the container's status is the command's"


def test_the_image_starts_the_script() -> None:
    (entrypoint,) = re.findall(r'\["([^"]+)"\]', of("ENTRYPOINT")[0])
    copied = [rest.split() for rest in of("COPY") if SCRIPT.name in rest]
    assert copied == [["--chmod=755", str(SCRIPT.relative_to(ROOT)), f"/usr/local/bin/{entrypoint}"]]
    assert of("CMD") == []
    assert f"!{SCRIPT.parent.relative_to(ROOT)}" in (ROOT / ".dockerignore").read_text().splitlines()


def test_the_image_is_the_worker_s_with_all_services() -> None:
    for name in ("RUN", "USER", "ARG", "HEALTHCHECK"):
        wanted = last("frontend" if name == "HEALTHCHECK" else "worker", name)
        assert of(name) == wanted, f"{name} is as of the other images"
    assert of("EXPOSE") == last("frontend", "EXPOSE"), "the other services are reached from within alone"
    assert [name for name, _ in STAGE].index("USER") > max(
        index for index, (name, _) in enumerate(STAGE) if name in ("RUN", "COPY")
    )
    trees = [rest for rest in of("COPY") if rest.startswith("--from=")]
    assert trees == [
        "--from=all-packages /opt/pagoda /opt/pagoda",
        "--from=kernels /prebuilt /",
        "--from=bill /bill /usr/share/doc/pagoda/",
        "--from=all-code /code /opt/pagoda",
    ]
    own = dict(word.split("=", 1) for line in of("ENV") for word in line.split())
    shared = ("PATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "HOME", "HF_HOME", "PAGODA_HOST")
    assert own == {name: environment("frontend")[name] for name in shared}, "`serve` sets its children's by itself"
    (labels,) = of("LABEL")
    assert 'image.title="pagoda"' in labels


def test_all_packages_and_all_code_are_in_it() -> None:
    assert STAGES["all-packages"][0][1].split()[0] == "slim"
    (made,) = of("RUN", "requirements")
    (extras,) = re.findall(r"extra_requirements\.py (\S+ \$\{EXTRAS\}) >(/all\.txt)", made)
    assert extras == ("frontend ${EXTRAS}", "/all.txt")
    assert "--from=requirements /all.txt /src/" in of("COPY", "all-packages")
    (installed,) = of("RUN", "all-packages")
    assert "install --no-compile -r /src/all.txt" in installed
    assert re.search(r"compileall -q -x \S+ /opt/pagoda/lib/python3\*/site-packages", installed)
    (code,) = of("RUN", "all-code")
    assert "--from=wheel /dist /dist" in of("COPY", "all-code")
    assert "install --no-compile --no-deps --no-index --prefix /code /dist/*.whl" in code
    assert not [service for service in SERVICES if f"pagoda_{service}" in code], "no service is taken out"
    assert 'compileall -q -s /code -p /opt/pagoda "$PWD"' in code

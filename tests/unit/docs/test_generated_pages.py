"""The generated parts of the pages are what scripts/docs_pages.py makes today."""

import importlib.util
import re
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest

from pagoda import EngineArgs
from pagoda.options.llm_options import ALIASES
from pagoda_common.config.flags.settings import _OTHERS

ROOT = Path(__file__).parents[3]
PAGES = ["migration.md", "python.md", "settings.md", "http_reference.md", "grpc_reference.md", "metrics.md"]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_pages", ROOT / "scripts" / "docs_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_what_the_code_says(script: ModuleType, name: str) -> None:
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == script.generated(name), "run make docs"


def test_every_page_with_marks_is_generated(script: ModuleType) -> None:
    elsewhere = {"models.md", "sampling.md", "benchmarks.md"}  # of the sweep, sampling_table.py and benchmarks/page.py
    marked = {page.name for page in (ROOT / "docs").glob("*.md") if re.search("<!-- .*: begin -->", page.read_text())}
    assert marked - elsewhere == set(script.PARTS)


def test_a_path_has_the_fields_of_its_body(script: ModuleType) -> None:
    text = script.http_calls().split("### POST /v1/completions\n")[1].split("\n### ")[0]
    assert "| `max_tokens` | integer |" in text
    assert "Answers: 200, 400" in text


def test_a_call_and_a_message_have_the_comments_of_the_contracts(script: ModuleType) -> None:
    text = script.grpc_calls()
    assert re.search(r"^- `Execute` \(stream of \w+ → stream of \w+\): \w+", text, re.MULTILINE)
    assert re.search(r"^- `max_tokens` \(\d+, optional uint32\): \w+", text, re.MULTILINE)


def test_a_metric_has_its_type_and_its_labels(script: ModuleType) -> None:
    requests, engine, worker = script.frontend_metrics(), script.engine_metrics(), script.worker_metrics()
    assert "| `vllm:request_success_total` | counter | `model_name`, `engine`, `finished_reason` |" in requests
    assert "| `pagoda:step_seconds` | histogram | `stage` | Time of one stage of a step" in engine
    assert "| `pagoda:group_requests_running` | gauge | `group` |" in engine
    assert "| `pagoda:worker_device_memory_bytes` | gauge | `kind` |" in worker


def test_every_flag_of_vllm_is_in_one_list_only(script: ModuleType) -> None:
    text = script.flags()
    listed = re.findall(r"^\| `(--[\w.-]+)`", text, re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert "| `--max-model-len` | same |  |" in text
    assert "| `--host` | differs | the default is 127.0.0.1" in text
    assert "| `--tool-server` | none |" in text
    assert not script.OWN_FLAGS & set(listed)
    assert set(script.DIFFERENT_FLAGS) <= set(listed)


def test_what_a_service_has_beside_the_flags_of_serve_is_listed(script: ModuleType) -> None:
    text = script.service_settings()
    assert "| `--models NAME=HOST:PORT` | `PAGODA_MODELS` |" in text
    assert text.index("### pagoda-scheduler") < text.index("`--metrics-port PORT`") < text.index("### pagoda-worker")
    assert "--max-model-len" not in text


def test_every_variable_without_a_flag_is_listed(script: ModuleType) -> None:
    others = {name for name in _OTHERS if name != "PAGODA_HEARTBEAT_FD"}  # set by a parent for its child
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert [name for name in sorted(others) if f"`{name}`" not in page] == []


def test_every_own_flag_is_a_flag(script: ModuleType) -> None:
    assert len(re.findall(r"^\| `--[\w-]+` \| \w", script.own_flags(), re.MULTILINE)) == len(script.OWN_FLAGS)


def test_every_argument_has_its_type_and_its_default(script: ModuleType) -> None:
    text = script.engine_args()
    named = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    assert {field.name for field in fields(EngineArgs)} - named == set(ALIASES.values())
    assert "| `dtype` | auto, float32, bfloat16, float16 | auto |" in text
    assert "| `max_model_len` | int | none |" in text


def test_the_calls_of_the_library_are_listed_without_those_that_are_refused(script: ModuleType) -> None:
    text = script.llm_calls()
    for call in ("generate", "embed", "sleep"):
        assert f"| `{call}()` |" in text
    assert "collective_rpc" not in text


def test_a_page_without_the_marks_is_refused(script: ModuleType) -> None:
    with pytest.raises(ValueError, match="once each"):
        script.with_part("# Page\n", "flags", "text")

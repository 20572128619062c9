"""The scripts of examples/clients against a live `pagoda serve`: those whose packages are installed here."""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.encoders import make_encoder, write_modules
from tests.process.stack import Stack

FOLDER = Path(__file__).parents[3] / "examples" / "clients"
GUIDES = (Path(__file__).parents[3] / "docs" / "guides.md").read_text(encoding="utf-8")
PACKAGES = {
    "openai_client": "openai",
    "langchain_client": "langchain_openai",
    "litellm_client": "litellm",
    "lm_eval_client": "lm_eval",
    "guidellm_client": "guidellm",
    "anthropic_client": "anthropic",
    "instructor_client": "instructor",
}
EMBEDDING_PACKAGES = {
    "openai_embeddings": ("openai",),
    "cohere_client": ("cohere",),
    "langchain_embeddings": ("langchain_openai", "langchain_cohere"),
    "llama_index_embeddings": ("llama_index.embeddings.openai_like", "llama_index.postprocessor.cohere_rerank"),
    "haystack_embeddings": ("haystack", "haystack_integrations.components.rankers.cohere"),
}


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    stack = Stack("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    try:
        stack.wait_ready()
        yield stack
    finally:
        stack.end()


@pytest.mark.parametrize("script", PACKAGES)
def test_the_client_gets_sane_answers(stack: Stack, script: str) -> None:
    if importlib.util.find_spec(PACKAGES[script]) is None:
        pytest.skip(f"{PACKAGES[script]} is not installed here")
    command = [sys.executable, str(FOLDER / f"{script}.py"), "--base-url", f"{stack.url}/v1", "--model", "pagoda-tiny"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "code", re.findall(r"```python\n(.*?)```", GUIDES, re.DOTALL), ids=["chat", "json", "choice", "tools"]
)
def test_the_code_of_the_guides_runs(stack: Stack, code: str) -> None:
    code = code.replace("http://127.0.0.1:8000", stack.url)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("embedder")
    make_encoder("BertModel", directory)
    write_modules(directory, "mean_tokens")
    stack = Stack(str(directory), "--served-model-name=tiny-embedder")
    try:
        stack.wait_ready()
        yield stack
    finally:
        stack.end()


def is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of a part before its last one
        return False


@pytest.mark.parametrize("script", EMBEDDING_PACKAGES)
def test_the_client_embeds_and_ranks(embedder: Stack, script: str) -> None:
    for package in EMBEDDING_PACKAGES[script]:
        if not is_installed(package):
            pytest.skip(f"{package} is not installed here")
    command = [sys.executable, str(FOLDER / f"{script}.py"), "--base-url", f"{embedder.url}/v1"]
    done = subprocess.run(
        [*command, "--model", "tiny-embedder"], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_script_is_tried() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == set(PACKAGES) | set(EMBEDDING_PACKAGES)

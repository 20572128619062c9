"""What `pagoda serve` leaves for other programs while it runs, and what it reads of packages that lie elsewhere."""

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from pagoda.commands.serve import shared_token
from pagoda.server import known_architectures as names
from pagoda.server.local_stack import LocalStack
from pagoda_common.config.engine_config import EngineConfig
from pagoda_common.config.frontend_config import FrontendConfig
from pagoda_common.config.security_config import SecurityConfig
from pagoda_common.rpc.local_token import find_token_file

PORT = 50987


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "pagoda" / "tokens"


def stack(token: str | None) -> LocalStack:
    engine = replace(EngineConfig(), security=SecurityConfig(service_token=token))
    return LocalStack(engine=engine, frontend=FrontendConfig(scheduler=f"127.0.0.1:{PORT}"))


def test_the_token_can_be_found_by_the_schedulers_port_while_serve_runs(cache: Path) -> None:
    with shared_token(stack("secret")):
        file = find_token_file(PORT)
        assert file is not None
        assert Path(file).read_text() == "secret\n"
    assert find_token_file(PORT) is None


def test_without_a_token_nothing_is_left(cache: Path) -> None:
    with shared_token(stack(None)):
        assert find_token_file(PORT) is None
    assert not cache.exists()


def test_serve_runs_where_no_place_is_private_and_says_what_others_need(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    with caplog.at_level(logging.INFO), shared_token(stack("secret")):
        assert find_token_file(PORT) is None
    assert "need --service-token-file" in caplog.text


@pytest.mark.parametrize(
    ("registry", "expected"),
    [
        ('FAMILIES: dict = {"A": 1}\nTOKEN_VECTORS: dict = {"B": 1}\nOTHER: dict = {"C": 1}\n', {"A", "B"}),
        ('NAME = "D"\nFAMILIES: dict = {"A": 1, NAME: 2}\nTOKEN_VECTORS: dict = {"B": 1}\n', set()),
        ("FAMILIES: dict = {", set()),
        (None, set()),
    ],
)
def test_architectures_are_read_from_the_source_of_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registry: str | None, expected: set[str]
) -> None:
    if registry is not None:
        (tmp_path / "models").mkdir()
        (tmp_path / "models" / "registry.py").write_text(registry)
    found = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(names.importlib.util, "find_spec", {"pagoda_worker": found}.get)
    assert names.known_architectures.__wrapped__() == expected


def test_transformers_is_searched_for_the_whole_name_and_believed_where_it_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "models" / "auto"
    folder.mkdir(parents=True)
    (folder / "modeling_auto.py").write_text('("llama", "LlamaForCausalLM"),')
    found = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(names.importlib.util, "find_spec", {"transformers": found}.get)
    assert names.transformers_may_know("LlamaForCausalLM")
    assert not names.transformers_may_know("Llama")
    (folder / "other.py").write_bytes(b"\xff")
    assert names.transformers_may_know("Llama")
    monkeypatch.setattr(names.importlib.util, "find_spec", lambda _: None)
    assert not names.transformers_may_know("LlamaForCausalLM")
    assert names.known_architectures.__wrapped__() == frozenset()

"""What `pagoda serve` says once it serves."""

from typing import Any

import pytest

from pagoda.commands.serve import announcement, key_shown
from pagoda.server.local_stack import LocalStack
from pagoda_common.config.engine_config import EngineConfig
from pagoda_common.config.frontend_config import FrontendConfig


def announced(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> str:
    for name in ("PAGODA_API_KEY", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    frontend = FrontendConfig(**{"port": 8123, "grpc_port": 50123, **fields})
    return announcement(LocalStack(engine=EngineConfig(), frontend=frontend), seconds=1.0)


def test_it_has_the_status_page_unless_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "status     http://127.0.0.1:8123/\n" in announced(monkeypatch)
    assert "status" not in announced(monkeypatch, disable_status_page=True)


@pytest.mark.parametrize(("host", "url"), [("0.0.0.0", "http://127.0.0.1:8123"), ("::1", "http://[::1]:8123")])
def test_its_address_is_one_that_works(monkeypatch: pytest.MonkeyPatch, host: str, url: str) -> None:
    shown = announced(monkeypatch, host=host)
    assert f"HTTP       {url}/v1" in shown
    assert f"curl -N {url}/v1/chat/completions" in shown


def test_a_key_is_shown_as_the_variable_that_holds_it_and_never_as_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    frontend = FrontendConfig(api_key=("secret",))
    assert key_shown(frontend, {"PAGODA_API_KEY": "secret"}) == "$PAGODA_API_KEY"
    assert key_shown(frontend, {"VLLM_API_KEY": "secret"}) == "$VLLM_API_KEY"
    assert key_shown(frontend, {}) == "YOUR_API_KEY"
    assert "secret" not in announced(monkeypatch, api_key=("secret",))
    assert "Bearer YOUR_API_KEY" in announced(monkeypatch, api_key_file="keys.txt")
    assert "Bearer" not in announced(monkeypatch)

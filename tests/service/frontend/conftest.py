"""A fresh frontend for each test."""

from collections.abc import AsyncIterator
from types import SimpleNamespace
from uuid import UUID

import pytest

from pagoda_frontend.http import calls
from pagoda_frontend.requests import call_context
from pagoda_frontend.responses import draft
from tests.service.frontend.harness import Running, running_frontend


@pytest.fixture
async def frontend() -> AsyncIterator[Running]:
    async with running_frontend() as running:
        yield running


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls come at second 1000 and responses are complete at second 1002; random ids are zeros."""
    monkeypatch.setattr(calls, "time", SimpleNamespace(time=lambda: 1000.9))
    monkeypatch.setattr(draft, "time", SimpleNamespace(time=lambda: 1002.9))
    monkeypatch.setattr(call_context, "uuid", SimpleNamespace(uuid4=lambda: UUID(int=0)))

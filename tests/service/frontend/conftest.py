"""A fresh frontend for each test."""

from collections.abc import AsyncIterator

import pytest

from tests.service.frontend.harness import Running, running_frontend


@pytest.fixture
async def frontend() -> AsyncIterator[Running]:
    async with running_frontend() as running:
        yield running

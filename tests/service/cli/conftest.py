"""A server with known answers for the terminal's commands."""

from collections.abc import Iterator

import pytest

from tests.fakes.openai_server import FakeOpenAIServer


@pytest.fixture
def server() -> Iterator[FakeOpenAIServer]:
    """Fresh for every test."""
    with FakeOpenAIServer() as server:
        yield server

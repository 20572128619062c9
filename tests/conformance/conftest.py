"""One live `pagoda serve` for the whole suite: what a case sees is what a user sees."""

from collections.abc import Iterator

import pytest

from tests.conformance.api import API_KEYS, Api
from tests.process.stack import Stack

TOOL_FLAGS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    stack = Stack("--api-key", *API_KEYS, "--disable-uvicorn-access-log", *TOOL_FLAGS)
    try:
        stack.wait_ready()
        yield stack
    finally:
        stack.end()


@pytest.fixture(scope="session")
def api(stack: Stack) -> Iterator[Api]:
    with Api(stack.url) as api:
        yield api

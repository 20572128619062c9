"""What a log line looks like, and what is not worth one."""

import logging
import re

import pytest

from pagoda_common.logging import LineFormatter, is_no_probe


def access(path: str) -> logging.LogRecord:
    args = ("127.0.0.1:5", "GET", path, "1.1", 200)
    return logging.LogRecord("uvicorn.access", logging.INFO, "", 0, '%s - "%s %s HTTP/%s" %d', args, None)


def test_a_line_is_level_time_service_message() -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, "a %d", (5,), None)
    assert re.fullmatch(r"INFO \d\d:\d\d:\d\d\.\d{3} scheduler: a 5", LineFormatter("scheduler").format(record))


@pytest.mark.parametrize(("path", "is_logged"), [("/ready", False), ("/health?x=1", False), ("/v1/models", True)])
def test_probes_get_no_access_line(path: str, is_logged: bool) -> None:
    assert is_no_probe(access(path)) is is_logged


def test_records_of_another_shape_pass() -> None:
    assert is_no_probe(logging.LogRecord("uvicorn.error", logging.INFO, "", 0, "Shutting down", None, None))

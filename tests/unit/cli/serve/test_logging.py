"""What a log line looks like, and what is not worth one."""

import json
import logging
import re
import sys
from typing import Any

import grpc
import grpc.aio
import pytest

from pagoda_common.config.observability_config import ObservabilityConfig
from pagoda_common.errors import ConfigError
from pagoda_common.process.logging import (
    GRPC_LOGGER,
    JsonFormatter,
    LineFormatter,
    escaped,
    is_no_probe,
    is_not_caused_by_clients,
    request_id,
    trace_id,
)


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


def shown_as_json(record: logging.LogRecord) -> dict[str, Any]:
    line = JsonFormatter("scheduler").format(record)
    assert "\n" not in line
    shown: dict[str, Any] = json.loads(line)
    return shown


def test_a_json_line_has_time_level_service_and_message() -> None:
    record = logging.LogRecord("pagoda_scheduler", logging.WARNING, "", 0, 'a "%s"\nä', ("b",), None)
    shown = shown_as_json(record)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", shown.pop("time"))
    assert shown == {
        "level": "warning",
        "service": "scheduler",
        "logger": "pagoda_scheduler",
        "message": 'a "b"\nä',
    }


def test_ids_of_request_and_trace_come_from_the_task_or_the_record() -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, "m", (), None)
    tokens = request_id.set("of-the-task"), trace_id.set("0af7651916cd43dd8448eb211c80319c")
    try:
        shown = shown_as_json(record)
        assert (shown["request_id"], shown["trace_id"]) == ("of-the-task", "0af7651916cd43dd8448eb211c80319c")
        record.request_id = "its-own"
        assert shown_as_json(record)["request_id"] == "its-own"
    finally:
        request_id.reset(tokens[0])
        trace_id.reset(tokens[1])


def test_an_access_line_has_its_parts_and_no_query() -> None:
    shown = shown_as_json(access("/v1/models?key=secret"))
    assert (shown["method"], shown["path"], shown["status"], shown["client"]) == (
        "GET",
        "/v1/models",
        200,
        "127.0.0.1:5",
    )
    assert "secret" not in json.dumps(shown)


def test_a_traceback_stays_on_its_line() -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "", 0, "m", (), sys.exc_info())
    assert "ValueError: broken" in shown_as_json(record)["exception"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"otlp_traces_endpoint": "localhost:4317"}, "otlp_traces_endpoint"),
        ({"collect_detailed_traces": ("all",)}, "collect_detailed_traces"),
        (
            {"otlp_traces_endpoint": "http://localhost:4317", "collect_detailed_traces": ("x",)},
            "collect_detailed_traces",
        ),
    ],
)
def test_wrong_flags_of_traces_are_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ObservabilityConfig(**fields)
    assert caught.value.field == named


HOSTILE = {
    "a line feed": ("a\nERROR 09:00:00.000 scheduler: forged", r"a\nERROR 09:00:00.000 scheduler: forged"),
    "a return": ("a\rforged", r"a\rforged"),
    "colours": ("\x1b[31mred\x1b[2J", r"\x1b[31mred\x1b[2J"),
    "a title of the window": ("\x1b]0;owned\x07", r"\x1b]0;owned\x07"),
    "an escape of one byte": ("\x9b31m", r"\x9b31m"),
    "ends of lines": ("a\u2028b\u2029c\x85d\x0be\x0cf", r"a\u2028b\u2029c\x85d\x0be\x0cf"),
    "direction": ("a\u202eb\u2066c", r"a\u202eb\u2066c"),
    "half a character": ("a\ud800b", r"a\ud800b"),
    "delete and null": ("\x7f\x00", r"\x7f\x00"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_a_client_wrote_stays_in_its_line(name: str) -> None:
    given, shown = HOSTILE[name]
    record = logging.LogRecord("x", logging.WARNING, "", 0, "request %s is lost", (given,), None)
    line = LineFormatter("scheduler").format(record)
    assert line.endswith(f"scheduler: request {shown} is lost")
    assert line.splitlines() == [line]
    line.encode()
    as_json = JsonFormatter("scheduler").format(record)
    assert as_json.splitlines() == [as_json]
    assert not set(as_json) & set("\x1b\x9b\x7f\u202e\u2066\ud800")
    assert json.loads(as_json)["message"] == f"request {given} is lost"


def test_letters_of_all_languages_and_tabs_stay_as_they_are() -> None:
    text = "a\tä 日本 🙂 ключ שלום"
    assert escaped(text) == text


def test_a_traceback_cannot_forge_a_line_either() -> None:
    try:
        raise ValueError("a\nERROR 09:00:00.000 scheduler: forged\x1b[2J")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "", 0, "failed", (), sys.exc_info())
    first, *others = LineFormatter("scheduler").format(record).split("\n")
    assert first.endswith("scheduler: failed")
    assert others[0] == "  Traceback (most recent call last):"
    assert all(line.startswith("  ") for line in others)
    assert not any("\x1b" in line for line in others)


def test_a_record_has_a_bound_but_for_prompts_at_level_debug() -> None:
    for level, is_whole in ((logging.INFO, False), (logging.ERROR, False), (logging.DEBUG, True)):
        record = logging.LogRecord("x", level, "", 0, "%s", ("a" * 100_000,), None)
        line = LineFormatter("scheduler").format(record)
        assert (len(line) > 100_000) is is_whole
        assert is_whole or line.endswith("… (100000 characters)")
        assert (len(JsonFormatter("scheduler").format(record)) > 100_000) is is_whole


def test_no_query_is_logged() -> None:
    record = access("/v1/models?api_key=secret&token=other")
    assert LineFormatter("frontend").format(record).endswith('127.0.0.1:5 - "GET /v1/models HTTP/1.1" 200')
    assert "secret" not in JsonFormatter("frontend").format(access("/v1/models?api_key=secret"))


async def test_an_answer_that_a_client_does_not_take_leaves_no_line(caplog: pytest.LogCaptureFixture) -> None:
    large = bytes(5 << 20)

    async def answer(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return large

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(answer)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Large", {"Get": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    logger = logging.getLogger(GRPC_LOGGER)
    logger.addFilter(is_not_caused_by_clients)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            get: Any = channel.unary_unary("/test.Large/Get")
            for _ in range(20):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await get(b"", timeout=240)
                assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    finally:
        await server.stop(None)  # an answer that is still being sent fails now
        logger.removeFilter(is_not_caused_by_clients)
    assert not [record for record in caplog.records if record.exc_info]


def test_other_faults_of_calls_are_logged() -> None:
    fault = logging.LogRecord(
        GRPC_LOGGER, logging.ERROR, "", 0, "Unexpected", None, (ValueError, ValueError("a"), None)
    )
    assert is_not_caused_by_clients(fault)
    ended = type("ExecuteBatchError", (Exception,), {})
    assert not is_not_caused_by_clients(
        logging.LogRecord(GRPC_LOGGER, logging.ERROR, "", 0, "", None, (ended, ended(), None))
    )
    assert is_not_caused_by_clients(logging.LogRecord(GRPC_LOGGER, logging.ERROR, "", 0, "a line", None, None))
    decoding = UnicodeDecodeError("utf-8", b"\xa0", 0, 1, "invalid start byte")
    of_decoding = (UnicodeDecodeError, decoding, None)
    for message, is_kept in (("Invalid encoding on %s", False), ("Unexpected %s raised by servicer", True)):
        record = logging.LogRecord(GRPC_LOGGER, logging.ERROR, "", 0, message, (b"\xa0",), of_decoding)
        assert is_not_caused_by_clients(record) is is_kept

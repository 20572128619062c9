"""One line a record, the same in every process: ``INFO 09:41:07.512 scheduler: worker 0 of group 0 is here``.

Or one JSON object a line, with the ids of request and trace where the record belongs to one. What a client wrote cannot
look like another record, nor move a terminal's cursor: signs that are not shown as themselves are escaped.
"""

import json
import logging
import re
import sys
import time
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from pagoda_common.config.observability_config import LogFormat

LEVELS = ("debug", "info", "warning", "error")
PROBE_PATHS = ("/live", "/health", "/ready", "/metrics", "/ping", "/load")
"""HTTP paths that get no line in the access log, unless the level is debug."""
ACCESS_LOGGER = "uvicorn.access"
GRPC_LOGGER = "grpc._cython.cygrpc"

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the request that the current task answers."""
trace_id: ContextVar[str] = ContextVar("trace_id", default="")
"""Id of its trace, 32 hexadecimal digits."""


MAX_MESSAGE_CHARS = 8192
"""Length of a record above level debug; at debug, prompts are logged completely."""
MAX_TRACEBACK_CHARS = 65536
_UNSHOWN = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but the tab, ends of lines, marks that turn the direction of text, halves of characters."""


def escaped(text: str) -> str:
    """`text` in one line, with what a terminal or a reader of lines would take for more than text as in Python."""
    return _UNSHOWN.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode(), text)


def _bounded(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"


def _message(record: logging.LogRecord) -> str:
    text = record.getMessage()
    return text if record.levelno <= logging.DEBUG else _bounded(text, MAX_MESSAGE_CHARS)


def _is_access(record: logging.LogRecord) -> bool:
    return record.name == ACCESS_LOGGER and isinstance(record.args, tuple) and len(record.args) == 5


class LineFormatter(logging.Formatter):
    """LEVEL time service: message. Times are local, with milliseconds; a traceback follows on its own lines, indented.

    A record of the access log is without its query, for what a client may put there.
    """

    def __init__(self, service: str) -> None:
        super().__init__(f"%(levelname)s %(asctime)s {service}: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """One line, and those of a traceback."""
        if _is_access(record):
            assert isinstance(record.args, tuple), "as just seen"
            client, method, path, version, status = record.args
            record.args = (client, method, str(path).partition("?")[0], version, status)
        record.message = escaped(_message(record))
        record.asctime = self.formatTime(record)
        line = self.formatMessage(record)
        if not record.exc_info:
            return line
        lines = _bounded(self.formatException(record.exc_info), MAX_TRACEBACK_CHARS).split("\n")
        return "\n".join([line, *(f"  {escaped(one)}" for one in lines)])

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """Wall-clock time of day."""
        return f"{time.strftime('%H:%M:%S', self.converter(record.created))}.{int(record.msecs):03d}"


class JsonFormatter(logging.Formatter):
    """An object a record: time (UTC), level, service, logger, message; request_id, trace_id and exception if any.

    The ids are the current task's, unless the record brings its own (``extra={"request_id": …}``). A record of the
    access log has the request's parts instead of a sentence; its query is left out, for what a client may put there.
    """

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        shown: dict[str, Any] = {
            "time": at.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
        }
        shown |= _access(record.args) if _is_access(record) else {"message": _message(record)}
        for name, known in (("request_id", request_id), ("trace_id", trace_id)):
            if value := getattr(record, name, "") or known.get():
                shown[name] = value
        if record.exc_info:
            shown["exception"] = _bounded(self.formatException(record.exc_info), MAX_TRACEBACK_CHARS)
        line = json.dumps(shown, ensure_ascii=False, default=str)
        return _UNSHOWN.sub(lambda found: f"\\u{ord(found[0]):04x}", line)


def _access(args: Any) -> dict[str, Any]:
    """Uvicorn's (client, method, path with query, HTTP version, status)."""
    client, method, path, _, status = args
    path = str(path).partition("?")[0]
    return {
        "message": f"{method} {path} {status}",
        "client": client,
        "method": method,
        "path": path,
        "status": status,
    }


def is_no_probe(record: logging.LogRecord) -> bool:
    """Filter of uvicorn's access log: probes come every second and say nothing."""
    args = record.args
    return not (isinstance(args, tuple) and len(args) >= 3 and str(args[2]).partition("?")[0] in PROBE_PATHS)


def is_not_caused_by_clients(record: logging.LogRecord) -> bool:
    """Filter of gRPC's log: two records with tracebacks that a client can cause, one a call or thousands.

    A client may end a call in the middle of its answer, as it does if the answer is larger than it takes (4 MiB by
    default). And metadata may be no UTF-8: the library logs each field, and reads it as Latin-1.
    """
    kind = record.exc_info[0] if record.exc_info else None
    if kind is not None and kind.__name__ == "ExecuteBatchError":
        return False
    return not str(record.msg).startswith("Invalid encoding on")


_life_level = logging.INFO


def log_life(logger: logging.Logger, text: str, *args: Any) -> None:
    """Log what a service says of its own start and end: info, but debug in a child, whose parent tells it all."""
    logger.log(_life_level, text, *args)


def configure_logging(
    service: str, level: str = "info", log_format: LogFormat = "text", *, is_child: bool = False
) -> None:
    """Send every record of this process to stderr, from `level` on; called once, in `__main__`.

    Args:
        service: what the lines begin with, such as "scheduler".
        level: debug, info, warning or error; `__main__` reads it from PAGODA_LOG_LEVEL. Others mean info.
        log_format: as --log-format.
        is_child: another process starts, watches and ends this one.
    """
    global _life_level
    _life_level = logging.DEBUG if is_child else logging.INFO
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service) if log_format == "json" else LineFormatter(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper() if level.lower() in LEVELS else "INFO")
    if root.level > logging.DEBUG:
        logging.getLogger(ACCESS_LOGGER).addFilter(is_no_probe)
        logging.getLogger(GRPC_LOGGER).addFilter(is_not_caused_by_clients)
    for name in ("httpx", "httpcore", "filelock", "urllib3", "asyncio", "opentelemetry"):
        logging.getLogger(name).setLevel(logging.WARNING)

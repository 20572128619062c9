"""One line a record, the same in every process: ``INFO 09:41:07.512 scheduler: worker 0 of group 0 is here``.

Or one JSON object a line, with the ids of request and trace where the record belongs to one.
"""

import json
import logging
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

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the request that the current task answers."""
trace_id: ContextVar[str] = ContextVar("trace_id", default="")
"""Id of its trace, 32 hexadecimal digits."""


class LineFormatter(logging.Formatter):
    """LEVEL time service: message. Times are local, with milliseconds; a traceback follows on its own lines."""

    def __init__(self, service: str) -> None:
        super().__init__(f"%(levelname)s %(asctime)s {service}: %(message)s")

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
        is_access = record.name == ACCESS_LOGGER and isinstance(record.args, tuple) and len(record.args) == 5
        shown |= _access(record.args) if is_access else {"message": record.getMessage()}
        for name, known in (("request_id", request_id), ("trace_id", trace_id)):
            if value := getattr(record, name, "") or known.get():
                shown[name] = value
        if record.exc_info:
            shown["exception"] = self.formatException(record.exc_info)
        return json.dumps(shown, ensure_ascii=False, default=str)


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
    for name in ("httpx", "httpcore", "filelock", "urllib3", "asyncio", "opentelemetry"):
        logging.getLogger(name).setLevel(logging.WARNING)

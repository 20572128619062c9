"""One line a record, the same in every process: ``INFO 09:41:07.512 scheduler: worker 0 of group 0 is here``."""

import logging
import sys
import time

LEVELS = ("debug", "info", "warning", "error")
PROBE_PATHS = ("/health", "/ready", "/metrics", "/ping", "/load")
"""HTTP paths that get no line in the access log, unless the level is debug."""


class LineFormatter(logging.Formatter):
    """LEVEL time service: message. Times are local, with milliseconds; a traceback follows on its own lines."""

    def __init__(self, service: str) -> None:
        super().__init__(f"%(levelname)s %(asctime)s {service}: %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """Wall-clock time of day."""
        return f"{time.strftime('%H:%M:%S', self.converter(record.created))}.{int(record.msecs):03d}"


def is_no_probe(record: logging.LogRecord) -> bool:
    """Filter of uvicorn's access log: probes come every second and say nothing."""
    args = record.args
    return not (isinstance(args, tuple) and len(args) >= 3 and str(args[2]).partition("?")[0] in PROBE_PATHS)


def configure_logging(service: str, level: str = "info") -> None:
    """Send every record of this process to stderr, from `level` on; called once, in `__main__`.

    Args:
        service: what the lines begin with, such as "scheduler".
        level: debug, info, warning or error; `__main__` reads it from PAGODA_LOG_LEVEL. Others mean info.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper() if level.lower() in LEVELS else "INFO")
    if root.level > logging.DEBUG:
        logging.getLogger("uvicorn.access").addFilter(is_no_probe)
    for name in ("httpx", "httpcore", "filelock", "urllib3", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)

"""Writes lines to stdout and stderr that may be lost: a server does not end because its log cannot be written."""

import contextlib
import os
import sys
from typing import TextIO


def show(text: str, stream: TextIO | None = None) -> None:
    """Write `text` and a newline to `stream` (stderr if not given); lost where the disk is full or no one reads.

    It goes past the stream's buffer: what stays in there because it could not be written would fail again at the end of
    the process, and make its exit code 120.
    """
    stream = stream or sys.stderr
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # not a file: a test's capture
        print(text, file=stream, flush=True)
        return
    rest = f"{text}\n".encode(stream.encoding or "utf-8", "backslashreplace")
    try:
        stream.flush()
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except OSError:
        pass


def drop_unwritable() -> None:
    """At the end of the process: what stdout and stderr still hold and cannot write is lost, and the exit code stays.

    Python would try once more, and end with code 120. What logging writes goes through the streams' buffers.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())
                stream.flush()
        except (AttributeError, ValueError):  # none, or closed
            continue

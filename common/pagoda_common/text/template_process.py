"""A process that renders chat templates which came with a request: nested loops and long texts end it alone.

Reads one JSON object a line (source, messages, continue_final_message and variables of `render_chat_template`), answers
one a line: {"text": …} or {"error": …, "field": …}. Ends when its input does.
"""

import json
import sys
from typing import Any

from pagoda_common.errors import InvalidRequest
from pagoda_common.process.job_limits import limit_cpu, limit_memory
from pagoda_common.text.chat_template import render_chat_template

MAX_CPU_S = 2.0
MAX_TEXT_CHARS = 16 << 20
MAX_MEMORY_BYTES = 512 << 20
"""On top of what the process has when it is ready."""

TOO_MUCH = {"error": "chat_template takes too much time or memory to be rendered", "field": "chat_template"}


def _answer(job: dict[str, Any]) -> dict[str, Any]:
    try:
        text = render_chat_template(
            job["source"],
            messages=job["messages"],
            continue_final_message=job["continue_final_message"],
            **job["variables"],
        )
        if len(text) > MAX_TEXT_CHARS:
            raise MemoryError
        return {"text": text}
    except InvalidRequest as error:
        if isinstance(error.__cause__, MemoryError | RecursionError):
            return TOO_MUCH
        return {"error": error.message[:2000], "field": error.field}
    except (MemoryError, RecursionError):
        return TOO_MUCH
    except TypeError as error:
        return {"error": f"the chat template refused the messages: {error}"[:2000], "field": "messages"}


def main() -> None:
    """Serve jobs until the parent is gone."""
    limit_memory(MAX_MEMORY_BYTES)
    print(json.dumps({"is_ready": True}), flush=True)
    for line in sys.stdin:
        with limit_cpu(MAX_CPU_S):
            answer = _answer(json.loads(line))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

"""Renders templates of requests in a process that is ended if one takes too much time or memory. Knows no messages."""

import sys
from typing import Any

import orjson

from pagoda_common.errors import InvalidRequest
from pagoda_common.text import exact_json
from pagoda_frontend.budget.helpers import HelperPool, JobFailed
from pagoda_frontend.budget.work_pool import WorkPool

RENDER_S = 10.0
"""Wall-clock limit in seconds; the process limits its processor time by itself."""


class TemplateHelpers:
    """The helper processes, which start with the first such template."""

    def __init__(self, *, work: WorkPool) -> None:
        command = [sys.executable, "-m", "pagoda_common.text.template_process"]
        self._helpers = HelperPool(command, what="chat templates of requests", max_job_s=RENDER_S)
        self._work = work

    async def render(self, arguments: dict[str, Any]) -> str:
        """The rendered text.

        Args:
            arguments: `source`, `messages`, `continue_final_message` and `variables`, as in `render_chat_template`.

        Raises:
            InvalidRequest: the template is wrong, refuses the messages, or takes too much time or memory.
            QueueFull: too many templates wait.
        """
        job = await self._work.prepare(lambda: exact_json.dumps(arguments))
        try:
            answer = orjson.loads(await self._helpers.ask(job))
        except (JobFailed, orjson.JSONDecodeError):
            message = "chat_template takes too much time or memory to be rendered"
            raise InvalidRequest(message, field="chat_template") from None
        if "error" in answer:
            raise InvalidRequest(answer["error"], field=answer["field"])
        text: str = answer["text"]
        return text

    async def close(self) -> None:
        """End the processes."""
        await self._helpers.close()

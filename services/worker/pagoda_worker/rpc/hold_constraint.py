"""Waits on the event loop for a constraint to be compiled. Knows grammars; no messages, no steps."""

import asyncio

from llguidance import LLMatcher

from pagoda_common.params.structured_outputs import StructuredOutputsParams
from pagoda_worker.sampling import grammars
from pagoda_worker.sampling.grammars import Grammars


async def compiled(kept: Grammars, params: StructuredOutputsParams) -> None:
    """Return when the constraint is compiled, so that no step waits for it.

    Raises:
        PagodaError: the constraint cannot be compiled, or takes too long.
    """
    while True:
        template = kept.template(params)
        has_time = kept.is_loaded
        waiting = asyncio.wrap_future(template)
        waiting.add_done_callback(_hear)
        # Others may wait for it, too: it is not cancelled with us.
        await asyncio.wait([waiting], timeout=grammars.MAX_HOLD_S)
        if not template.done():
            if has_time:
                raise kept.give_up()
        elif not template.cancelled():
            template.result()
            return


def _hear(waiting: "asyncio.Future[LLMatcher]") -> None:
    if not waiting.cancelled():
        waiting.exception()

"""State that all models of one frontend share: keys, threads, memory, traces, stored answers. Knows no engine."""

import asyncio
from dataclasses import dataclass, field

from pagoda_common.config.frontend_config import FrontendConfig
from pagoda_common.metrics.tracing import Tracer, make_tracer
from pagoda_common.rpc.bearer import BearerKeys
from pagoda_frontend.budget.held_memory import HeldMemory
from pagoda_frontend.budget.work_pool import WorkPool
from pagoda_frontend.observability.request_log import RequestLog
from pagoda_frontend.responses.store import ResponseStore


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """The shared state of one process. Made by `of`."""

    api_keys: BearerKeys
    """Keys of the API; none: everyone is served."""
    tracer: Tracer | None
    held_memory: HeldMemory
    """Memory of requests before they are admitted."""
    responses: ResponseStore
    """Answers of /v1/responses, stored for later calls."""
    work: WorkPool = field(default_factory=WorkPool)
    """Runs work that would block the event loop."""
    request_log: RequestLog = field(default_factory=RequestLog)
    """For the status page."""

    @staticmethod
    def of(config: FrontendConfig) -> "Shared":
        """The state of a frontend with `config`."""
        return Shared(
            api_keys=BearerKeys(config.api_key),
            tracer=make_tracer("pagoda-frontend", config.observability),
            held_memory=HeldMemory(max_bytes=max(config.max_unadmitted_bytes, 4 * config.max_request_body_bytes)),
            responses=ResponseStore(max_responses=config.max_stored_responses),
        )

    async def close(self) -> None:
        """Take no more work, and send the last traces."""
        self.work.close()
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)

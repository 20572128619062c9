"""Serving: one model's state that all handlers share: the engine, the tokenizer and limits, and the open requests.

Knows neither HTTP nor gRPC.
"""

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from pagoda_common.config.frontend_config import FrontendConfig
from pagoda_common.engine.interface import Engine
from pagoda_common.errors import DeadlineExceeded, NotFound, NotReady, PagodaError
from pagoda_common.params.lora_adapter import MAX_NAME_CHARS
from pagoda_common.process.logging import log_life
from pagoda_common.text.chat_template import check_template, load_chat_template
from pagoda_frontend.conversation.dialect import dialect_of
from pagoda_frontend.observability.history import History
from pagoda_frontend.observability.metrics import Metrics
from pagoda_frontend.serving.served_model import ServedModel, load_served_model
from pagoda_frontend.serving.shared import Shared

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0
LOAD_RETRY_S = 5.0


class Serving:
    """One model's state in a frontend. `start()` returns at once; the model is known once the engine has loaded it."""

    def __init__(
        self, *, config: FrontendConfig, engine: Engine, metrics: Metrics, shared: Shared | None = None
    ) -> None:
        """
        Args:
            shared: state shared with the other models of this frontend; None makes a new one.

        Raises:
            ConfigError: chat template or plugins cannot be read, or a parser is unknown.
        """
        self.config = config
        self.engine = engine
        self.metrics = metrics
        self.shared = shared or Shared.of(config)
        self.api_keys = self.shared.api_keys
        has_several_keys = len(set(config.api_key)) > 1
        self._isolates_tenants = {"tenant": True, "none": False}.get(config.prefix_cache_isolation, has_several_keys)
        self.tracer = self.shared.tracer
        self.started_s = time.monotonic()
        self.is_draining = False
        self.num_open = 0
        """Requests that are being answered."""
        self.num_calls = 0
        """Calls of the API between their head and the end of their answer, those whose body is awaited or whose prompt
        and grammar are being checked included."""
        self.num_requests = 0
        """Counter: accepted requests."""
        self.history = History()
        """For the status page, as is request_log."""
        self.request_log = self.shared.request_log
        self.work = self.shared.work
        self.held_memory = self.shared.held_memory
        self._idle = asyncio.Event()
        self.dialect = dialect_of(config)
        """Parsers of tool calls and reasoning."""
        self.chat_template = load_chat_template(config.chat_template)
        if self.chat_template is not None:
            check_template(self.chat_template, name="chat_template", field="chat_template")
        """Jinja text of the flag; None takes the tokenizer's."""
        self._model: ServedModel | None = None
        self._open: dict[tuple[str, str], list[str]] = {}
        """The engine's ids of open requests, by tenant and request id."""
        self._why_not = ""
        self._loading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to load tokenizer and model facts."""
        self._loading = asyncio.create_task(self._load(), name="load")

    async def close(self) -> None:
        """Stop loading, and end what the model's requests need."""
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)
        if self._model is not None:
            await self._model.grammars.close()
            await self._model.prompts.close()

    @property
    def has_api_keys(self) -> bool:
        """Whether calls need a key."""
        return bool(self.config.api_key)

    def cache_salt(self, given: str, *, tenant: str) -> str:
        """The salt that separates requests of `tenant` in the prefix cache, in addition to their own salt.

        No salt of a client has a slash, so that no tenant can name another one's.
        """
        return f"{tenant}/{given}" if tenant and self._isolates_tenants else given

    @property
    def is_ready(self) -> bool:
        """Whether a request that arrives now is served: at once, or after a scheduler that was just lost is back."""
        return self._model is not None and (self.engine.is_ready or self._is_recovering) and not self.is_draining

    @property
    def _is_recovering(self) -> bool:
        lost_for_s = self.engine.lost_for_s
        return lost_for_s is not None and lost_for_s < self.config.recovery_timeout_s

    @property
    def has_been_ready(self) -> bool:
        """Whether the engine has been ready since this frontend started."""
        return self._model is not None

    @property
    def not_ready_reason(self) -> str:
        """Why the model is not ready; "" when ready."""
        if self.is_draining:
            return "the frontend is shutting down"
        if not self.engine.is_ready:
            return self.engine.not_ready_reason or "the engine is starting"
        return "" if self._model is not None else self._why_not or "the tokenizer is loading"

    @property
    def model(self) -> ServedModel:
        """The model.

        Raises:
            NotReady: it is not known yet, or the frontend is shutting down.
        """
        if self._model is None or self.is_draining:
            raise NotReady(self.not_ready_reason, retry_after_s=RETRY_AFTER_S)
        return self._model

    def model_named(self, name: str | None) -> ServedModel:
        """The model under `name`, which may be an adapter's; None and "" take the model whatever its name.

        Raises:
            NotReady: as `model`.
            NotFound: there is none of that name.
        """
        model = self.model
        if not name or name in model.names:
            return model
        adapter = self.engine.loras.get(name)
        if adapter is None:
            raise NotFound(f"The model `{name}` does not exist.", field="model")
        return replace(model, lora=adapter)

    async def look_for(self, name: object) -> None:
        """Look up `name` as an adapter in the engine, so that `model_named` finds it.

        Raises:
            PagodaError: the engine does not answer, or the adapter cannot be used.
        """
        if not isinstance(name, str) or not name or self._model is None:
            return
        if name not in self._model.names and name not in self.engine.loras and len(name) <= MAX_NAME_CHARS:
            await self.engine.resolve_lora(name)

    @contextmanager
    def open_request(self, request_id: str, engine_ids: Sequence[str], *, tenant: str) -> Iterator[None]:
        """Count a request of `tenant` as open, and let `abort` find its requests in the engine."""
        key = (tenant, request_id)
        known = self._open.setdefault(key, [])
        known.extend(engine_ids)
        self.num_open += 1
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_open -= 1
            self._note_idle()
            for engine_id in engine_ids:
                known.remove(engine_id)
            if not known and self._open.get(key) is known:
                del self._open[key]

    def begin_call(self) -> None:
        """Count a call of the API; `end_call` follows."""
        self.num_calls += 1

    def end_call(self) -> None:
        """It is over."""
        self.num_calls -= 1
        self._note_idle()

    @property
    def is_idle(self) -> bool:
        """Whether there is no open request and no call that may still open one."""
        return self.num_open == 0 and self.num_calls == 0

    async def wait_until_idle(self) -> None:
        """Return when nothing is under way."""
        while not self.is_idle:
            self._idle.clear()
            await self._idle.wait()

    def _note_idle(self) -> None:
        if self.is_idle:
            self._idle.set()

    def is_open(self, request_id: str, *, tenant: str) -> bool:
        """Whether `tenant` has an open request with this id here."""
        return (tenant, request_id) in self._open

    def abort(self, request_id: str, *, tenant: str) -> bool:
        """Abort an open request of `tenant`; False if there is none."""
        engine_ids = self._open.get((tenant, request_id), [])
        for engine_id in list(engine_ids):
            self.engine.abort(engine_id)
        return bool(engine_ids)

    async def wait_for_recovery(self, timeout_s: float) -> None:
        """Return when the engine takes requests: at once, or after a lost scheduler or worker is back.

        Args:
            timeout_s: the request's own time limit; 0 is none.

        Raises:
            NotReady: it does not come back within --recovery-timeout.
            DeadlineExceeded: it does not come back within `timeout_s`, which is shorter.
        """
        if self.engine.is_ready or self.engine.is_sleeping:
            return
        bound_s = self.config.recovery_timeout_s
        try:
            await self.engine.wait_until_ready(min(bound_s, timeout_s or bound_s))
        except NotReady as error:
            if self.engine.is_sleeping:
                return  # it waits in the engine's queue, whose bounds count
            if 0 < timeout_s < bound_s:
                message = f"the request was not finished within {timeout_s:g} s: {self.engine.not_ready_reason}"
                raise DeadlineExceeded(message) from error
            raise NotReady(error.message, retry_after_s=RETRY_AFTER_S) from error

    async def _load(self) -> None:
        while self._model is None:
            try:
                model = await load_served_model(
                    self.config, engine=self.engine, work=self.work, chat_template=self.chat_template
                )
                self.metrics.set_model(model_name=model.names[0], max_model_len=model.max_model_len)
                self._model = model
                log_life(logger, "serving %s, context of %d tokens", ", ".join(model.names), model.max_model_len)
            except PagodaError as error:
                self._why_not = error.message
                logger.error("%s; trying again", error.message)
                await asyncio.sleep(LOAD_RETRY_S)
            except Exception:
                self._why_not = "the tokenizer cannot be loaded"
                logger.exception("cannot load the tokenizer; trying again")
                await asyncio.sleep(LOAD_RETRY_S)

"""What all handlers share: the engine, the model with its tokenizer and limits, and the requests that are open.

Knows neither HTTP nor gRPC.
"""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version

from pagoda_common.config.engine_config import EMBEDDED_MODEL
from pagoda_common.config.frontend_config import FrontendConfig
from pagoda_common.config.generation_config import resolve_generation_config
from pagoda_common.engine.generation import TextStream
from pagoda_common.engine.interface import Engine
from pagoda_common.engine.stream import EngineRequest
from pagoda_common.errors import Code, DeadlineExceeded, NotFound, NotReady, PagodaError
from pagoda_common.metrics.tracing import make_tracer
from pagoda_common.params.outputs import SequenceDelta
from pagoda_common.process.logging import log_life
from pagoda_common.process.logging import request_id as log_request_id
from pagoda_common.text.tokenizer import Tokenizer
from pagoda_frontend.conversation.dialect import dialect_of
from pagoda_frontend.observability.metrics import Metrics
from pagoda_frontend.observability.request_span import start_request_span
from pagoda_frontend.requests.grammar_checks import GrammarChecks
from pagoda_frontend.requests.params import SamplingDefaults, sampling_defaults
from pagoda_frontend.requests.prompts import Prompts, load_chat_template

logger = logging.getLogger(__name__)

VERSION = version("pagoda")
RETRY_AFTER_S = 1.0
LOAD_RETRY_S = 5.0
RECOVERY_WAIT_S = 30.0
"""A request that arrives while a lost scheduler or worker comes back waits this long before it is refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """What is known once the engine has loaded."""

    names: tuple[str, ...]
    """Names clients use; the first one is ours."""
    tokenizer: Tokenizer
    prompts: Prompts
    grammars: GrammarChecks
    max_model_len: int
    vocab_size: int
    embedding_size: int
    """Values of an embedding; 0: the worker makes none."""
    defaults: SamplingDefaults
    fingerprint: str
    """system_fingerprint of responses: changes with the version and the model."""
    created: int
    """Unix time in seconds at which it was ready."""


class Serving:
    """One frontend's state. `start()` returns at once; the model is known when the engine has loaded it."""

    def __init__(self, *, config: FrontendConfig, engine: Engine, metrics: Metrics) -> None:
        """Raises ConfigError when chat template or plugins cannot be read, or a parser is unknown."""
        self.config = config
        self.engine = engine
        self.metrics = metrics
        self.tracer = make_tracer("pagoda-frontend", config.observability)
        self.started_s = time.monotonic()
        self.is_draining = False
        self.num_open = 0
        """Requests that are being answered."""
        self.num_calls = 0
        """Calls of the API between their head and the end of their answer, those whose body is awaited or whose prompt
        and grammar are being checked included."""
        self.num_requests = 0
        """Counter: requests that were taken in."""
        self._idle = asyncio.Event()
        self.dialect = dialect_of(config)
        """Parsers of tool calls and reasoning."""
        self.chat_template = load_chat_template(config.chat_template)
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
        """Stop loading."""
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)
        if self._model is not None:
            await self._model.grammars.close()
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)

    @property
    def is_ready(self) -> bool:
        """Whether a request that comes now is served at once."""
        return self._model is not None and self.engine.is_ready and not self.is_draining

    @property
    def has_been_ready(self) -> bool:
        """Whether the engine has been ready since this frontend started."""
        return self._model is not None

    @property
    def not_ready_reason(self) -> str:
        """Why not; "" when ready."""
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
        """The model under `name`; None and "" take it whatever its name.

        Raises:
            NotReady: as `model`.
            NotFound: there is none of that name.
        """
        model = self.model
        if name and name not in model.names:
            raise NotFound(f"The model `{name}` does not exist.", field="model")
        return model

    @contextmanager
    def open_request(self, request_id: str, engine_ids: Sequence[str], *, tenant: str) -> Iterator[None]:
        """Count a request of `tenant` as open, and let `abort` find the engine's requests behind it."""
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
        """Whether nothing is under way: no open request, and no call on its way to one."""
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
        """Whether `tenant` has a request of that id open here."""
        return (tenant, request_id) in self._open

    def abort(self, request_id: str, *, tenant: str) -> bool:
        """Abort an open request of `tenant`; whether there is one."""
        engine_ids = self._open.get((tenant, request_id), [])
        for engine_id in list(engine_ids):
            self.engine.abort(engine_id)
        return bool(engine_ids)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[list[SequenceDelta]]:
        """The request's text as it comes, followed by the metrics. Closing it aborts the request.

        Raises:
            PagodaError: the request was refused or failed.
        """
        model = self._model  # while a drain waits for the calls that were taken in, they go on
        if model is None:
            raise NotReady(self.not_ready_reason, retry_after_s=RETRY_AFTER_S)
        params = request.sampling_params
        if not log_request_id.get():
            log_request_id.set(request.request_id)
        if self.config.enable_log_requests:
            self._log(request, model)
        timer = self.metrics.timer(
            num_prompt_tokens=len(request.prompt_token_ids),
            n=params.n,
            max_tokens=params.max_tokens if request.pooling is None else None,
        )
        outcome, fault, is_whole = "abort", "", False
        span = None
        if self.tracer is not None:
            span = start_request_span(request, tracer=self.tracer, model_name=model.names[0])
        try:
            if not self.engine.is_ready and not self.engine.is_sleeping:
                await self._wait_for_recovery(request.timeout_s)
            stream = TextStream(engine=self.engine, tokenizer=model.tokenizer, request=request)
            try:
                while not stream.is_finished:
                    if deltas := await stream.get():
                        timer.add(deltas)
                        if span is not None:
                            span.add(deltas)
                        yield deltas
            finally:
                is_whole = stream.is_finished
                stream.close()
        except PagodaError as error:
            outcome, fault = "error", error.message
            if error.code is Code.RESOURCE_EXHAUSTED:
                self.metrics.count_rejection(error.message)
            raise
        finally:
            timer.close(outcome)
            if span is not None:
                span.close("finished" if is_whole and not fault else outcome, fault)

    def _log(self, request: EngineRequest, model: ServedModel) -> None:
        """Say what came in, as vLLM does: the prompt only at level debug."""
        num_tokens = len(request.prompt_token_ids)
        logger.info(
            "received request %s: %d prompt tokens, %r", request.request_id, num_tokens, request.sampling_params
        )
        if logger.isEnabledFor(logging.DEBUG):
            text = model.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
            logger.debug("request %s has the prompt %r", request.request_id, text[: self.config.max_log_len])

    async def _wait_for_recovery(self, timeout_s: float) -> None:
        try:
            await self.engine.wait_until_ready(min(RECOVERY_WAIT_S, timeout_s or RECOVERY_WAIT_S))
        except NotReady as error:
            if self.engine.is_sleeping:
                return  # it waits in the engine's queue, whose bounds count
            if 0 < timeout_s < RECOVERY_WAIT_S:
                message = f"the request was not finished within {timeout_s:g} s: {self.engine.not_ready_reason}"
                raise DeadlineExceeded(message) from error
            raise NotReady(error.message, retry_after_s=RETRY_AFTER_S) from error

    async def _load(self) -> None:
        while self._model is None:
            try:
                await self._load_once()
            except PagodaError as error:
                self._why_not = error.message
                logger.error("%s; trying again", error.message)
                await asyncio.sleep(LOAD_RETRY_S)
            except Exception:
                self._why_not = "the tokenizer cannot be loaded"
                logger.exception("cannot load the tokenizer; trying again")
                await asyncio.sleep(LOAD_RETRY_S)

    async def _load_once(self) -> None:
        config = self.config
        source = config.tokenizer or (config.model if config.model != EMBEDDED_MODEL else None)
        if source is not None:
            tokenizer = await asyncio.to_thread(Tokenizer.load, source, revision=config.revision)
        await self.engine.wait_until_ready()
        info = self.engine.model_facts
        assert info is not None
        if source is None:
            tokenizer = await asyncio.to_thread(Tokenizer.load, info.model, revision=config.revision)
        own_name = config.model if config.model != EMBEDDED_MODEL else info.model
        names = config.served_model_name or (own_name,)
        self.metrics.set_model(model_name=names[0], max_model_len=info.max_model_len)
        self._model = ServedModel(
            names=names,
            tokenizer=tokenizer,
            prompts=Prompts(
                tokenizer=tokenizer,
                chat_template=self.chat_template,
                max_model_len=info.max_model_len,
                vocab_size=info.vocab_size,
            ),
            grammars=GrammarChecks(
                tokenizer=tokenizer.name,
                revision=config.revision,
                vocab_size=info.vocab_size,
                eos_token_ids=info.eos_token_ids,
            ),
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            embedding_size=info.embedding_size,
            defaults=sampling_defaults(
                resolve_generation_config(
                    info.generation_config_json,
                    source=config.generation_config,
                    override=config.override_generation_config,
                )
            ),
            fingerprint=f"pagoda-{VERSION}-{info.digest[:8]}",
            created=int(time.time()),
        )
        log_life(logger, "serving %s, context of %d tokens", ", ".join(names), info.max_model_len)


def unique_id(prefix: str, suffix: str | None = None) -> str:
    """A request id: `prefix` and what the client gave, else something random."""
    if suffix:
        return prefix + re.sub(r"[^A-Za-z0-9_.:-]", "_", suffix[:128])
    return prefix + uuid.uuid4().hex

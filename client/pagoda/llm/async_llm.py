"""AsyncLLM: generation for asyncio programs, on a private engine or a running scheduler.

async with AsyncLLM(model="pagoda-tiny") as llm:
    async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=50)):
        print(output.outputs[0].text)
"""

import asyncio
import itertools
import secrets
from collections.abc import AsyncGenerator, Iterable
from contextlib import closing
from dataclasses import replace
from functools import cached_property
from typing import Any, Self

from pagoda.llm.async_memory_calls import CONNECT_TIMEOUT_S, AsyncMemoryCalls
from pagoda.llm.embedding import (
    EmbeddingRequestOutput,
    PoolingInput,
    PoolingRequestOutput,
    as_embedding,
    check_pooling_params,
    pool_input,
    pooling_tasks,
    read_for_pooling,
    with_task,
)
from pagoda.llm.hub_tokenizer import HubTokenizer
from pagoda.llm.prompts import Prompt, PromptInput, as_prompt_list, check_params, read_prompts
from pagoda.llm.request_output import RequestOutputBuilder, default_sampling_params
from pagoda.llm.served_model import ServedModelConfig
from pagoda.lora.request import LoRARequest, adapter_of
from pagoda.options.engine_args import EngineArgs
from pagoda.options.llm_options import engine_config_from_options
from pagoda.options.refusals import RefusedCalls, refuse_extras
from pagoda.server.engine_process import PrivateEngine
from pagoda.server.service_token import with_token
from pagoda.v1 import types_pb2
from pagoda_common.config.checkpoint.generation_config import resolve_generation_config
from pagoda_common.config.engine_config import EMBEDDED_MODEL
from pagoda_common.config.pooler_config import pooler_config
from pagoda_common.config.structured_outputs_config import structured_outputs_defaults
from pagoda_common.engine.client import EngineClient, EngineRequest
from pagoda_common.engine.generation import TextStream
from pagoda_common.errors import InvalidRequest, NotReady
from pagoda_common.grammar.bounded_grammar import BoundedCompiler
from pagoda_common.grammar.matcher import GrammarCompiler
from pagoda_common.params.beam_search import BeamSearchParams
from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_common.params.outputs import RequestOutput
from pagoda_common.params.pooling_params import POOLED, PoolingParams, PoolingTask
from pagoda_common.params.sampling_params import RequestOutputKind, SamplingParams
from pagoda_common.params.truncation import Side, truncation_of
from pagoda_common.text.bad_words import bad_words_token_ids
from pagoda_common.text.pooling_prompts import PromptMaker, score_template
from pagoda_common.text.tokenizer import Tokenizer

COLLECTED_TOKENS = 64
"""Tokens that become text together where no one reads them before the end: to wake up costs more than one's text."""


class AsyncLLM(AsyncMemoryCalls, RefusedCalls):
    """A language model for asyncio. It belongs to the event loop that starts it."""

    def __init__(
        self, model: str = EMBEDDED_MODEL, *, tokenizer: str | None = None, address: str | None = None, **options: Any
    ) -> None:
        """
        Args:
            model: directory or hub id.
            tokenizer: directory or hub id, when it is not the model's.
            address: host:port of a running scheduler, or several with commas between, which are tried in turn, also
                after the scheduler is lost. None starts a private engine.
            options: the engine's options, as for LLM.

        Raises:
            ConfigError: an option is unknown or out of bounds.
        """
        self.config = engine_config_from_options(model=model, tokenizer=tokenizer, **options)
        self._structured_outputs = structured_outputs_defaults(self.config.model.structured_outputs_config)
        self._is_private = address is None
        self._address = address
        self._process: PrivateEngine | None = None
        self._engine: EngineClient | None = None
        self._tokenizer: Tokenizer | None = None
        self._starting = asyncio.Lock()
        self._id_prefix = secrets.token_hex(4)
        self._ids = itertools.count()
        self._closing: asyncio.Task[None] | None = None
        """Kept here: an event loop holds only weak references to its tasks."""
        self._bad_words: tuple[tuple[str, ...], tuple[tuple[int, ...], ...]] = ((), ())

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **extras: Any) -> Self:
        """Create an AsyncLLM from EngineArgs; the engine starts with the first call.

        Args:
            extras: vLLM's other arguments (usage_context, …); a value that asks for something is refused.

        Raises:
            ConfigError: an argument is out of bounds or not supported.
        """
        refuse_extras(extras)
        return cls(**engine_args.keywords())

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    async def start(self) -> None:
        """Start or join the engine and wait until it can generate. A second call does nothing.

        Raises:
            ModelLoadError: the private engine cannot load the model, or there is no tokenizer.
            NotReady: the scheduler at `address` cannot be used.
        """
        async with self._starting:
            if self._tokenizer is not None:
                return
            try:
                await self._start()
            except BaseException:
                await self._close()
                raise

    async def _start(self) -> None:
        config = self.config.model
        if self._is_private:
            # Read first: a checkpoint without tokenizer fails at once, not after its weights were loaded.
            tokenizer = await asyncio.to_thread(
                Tokenizer.load, config.tokenizer or config.model, revision=config.revision
            )
            self.config = replace(self.config, security=with_token(self.config.security))
            self._process = PrivateEngine(config=self.config)
            self._engine = self._process.client
            await self._process.start()
        else:
            assert self._address is not None
            self._engine = EngineClient(address=self._address, security=self.config.security)
            await self._engine.start()
            await self._engine.wait_until_ready(CONNECT_TIMEOUT_S)
            served = self.model_info.model if config.model == EMBEDDED_MODEL else config.model
            tokenizer = await asyncio.to_thread(Tokenizer.load, config.tokenizer or served, revision=config.revision)
        self._tokenizer = tokenizer

    def shutdown(self, timeout: float | None = None) -> "asyncio.Task[None]":
        """End open requests and the private engine. It starts at once; await the result to wait for its end.

        Args:
            timeout: accepted as in vLLM, and ignored.

        Raises:
            RuntimeError: there is no running event loop.
        """
        self._closing = asyncio.get_running_loop().create_task(self._close(), name="shutdown of AsyncLLM")
        return self._closing

    async def _close(self) -> None:
        if self._engine is not None:
            await self._engine.close()
            self._engine = None
        if self._process is not None:
            await self._process.stop()
            self._process = None
        self._tokenizer = None

    @property
    def engine(self) -> EngineClient:
        """The connection to the scheduler.

        Raises:
            NotReady: not started, or shut down.
        """
        if self._engine is None:
            raise NotReady("the engine is not running: it was not started, or was shut down")
        return self._engine

    @property
    def model_info(self) -> types_pb2.ModelInfo:
        """The loaded model."""
        info = self.engine.model_info
        if info is None:
            raise NotReady("the model is not known yet")
        return info

    @property
    def model_config(self) -> ServedModelConfig:
        """The served model, with vLLM's attributes; available after `start`."""
        return ServedModelConfig.of(self.model_info, self.config.model)

    def get_tokenizer(self) -> HubTokenizer:
        """The tokenizer, with transformers' interface; available after `start`."""
        return HubTokenizer(self.tokenizer)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; available after `start`."""
        if self._tokenizer is None:
            raise NotReady("the engine is not running: it was not started, or was shut down")
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling defaults of the checkpoint's generation_config.json."""
        model = self.config.model
        return default_sampling_params(
            resolve_generation_config(
                self.model_info.generation_config_json,
                source=model.generation_config,
                override=model.override_generation_config,
            )
        )

    async def generate(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        **extras: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue a prompt; yields the complete output so far whenever it grows.

        The last output has `finished` set. With sampling_params.output_kind DELTA each output has only the new part,
        with FINAL_ONLY there is one output. Closing the generator early aborts the request.

        Raises:
            PagodaError: the prompt or a parameter is wrong, or the engine failed the request.
        """
        refuse_extras(extras)
        await self.start()
        prompts = as_prompt_list(prompt)
        if len(prompts) != 1:
            raise InvalidRequest(f"generate takes one prompt, got {len(prompts)}", field="prompt")
        tokenizer = self.tokenizer
        params = sampling_params or self.get_default_sampling_params()
        (read,) = await asyncio.to_thread(
            read_prompts, prompts, tokenizer=tokenizer, model_info=self.model_info, params=params
        )
        await asyncio.to_thread(self.check_params, params)
        adapter = adapter_of(lora_request)
        request = self.make_request(read, params, request_id=request_id, priority=priority, lora=adapter)
        builder = RequestOutputBuilder(request=request, prompt=read, tokenizer=tokenizer)
        if params.output_kind is RequestOutputKind.FINAL_ONLY:
            await self.collect(request, builder)
            yield builder.build()
            return
        read_output = builder.take if params.output_kind is RequestOutputKind.DELTA else builder.build
        with closing(self.open(request)) as stream:
            while not stream.is_finished:
                builder.append(await stream.get())
                builder.prompt_logprobs = stream.prompt_logprobs
                yield read_output()

    async def embed(
        self,
        prompt: PromptInput,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        **extras: Any,
    ) -> EmbeddingRequestOutput:
        """Embed a prompt, as LLM.embed does; a cancelled call aborts its request.

        Raises:
            PagodaError: the prompt or a parameter is wrong, or the engine refused or failed it.
        """
        check_pooling_params(pooling_params, extras)
        await self.start()
        read = await asyncio.to_thread(read_for_pooling, prompt, self.prompt_maker("embed"))
        if len(read) != 1:
            raise InvalidRequest(f"embed takes one prompt, got {len(read)}", field="prompt")
        params = with_task(pooling_params, "embed")
        return as_embedding(await self.pool(read[0], params, request_id=request_id, priority=priority))

    async def encode(
        self,
        prompt: PromptInput,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        **extras: Any,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Run a pooling task on the prompt; yields one output.

        Raises:
            PagodaError: the prompt or a parameter is wrong, or the engine refused or failed it.
        """
        check_pooling_params(pooling_params, extras)
        await self.start()
        params = pooling_params or PoolingParams()
        default: PoolingTask = next(iter(pooling_tasks(self.model_info)), "embed")
        task = default if params.task is None else params.task
        read = await asyncio.to_thread(read_for_pooling, prompt, self.prompt_maker(task))
        if len(read) != 1:
            raise InvalidRequest(f"encode takes one prompt, got {len(read)}", field="prompt")
        yield await self.pool(read[0], params, request_id=request_id, priority=priority)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Abort one request or several; their generators end with finish_reason "abort"."""
        for one in [request_id] if isinstance(request_id, str) else request_id:
            self.engine.abort(one)

    async def check_health(self) -> None:
        """Raises NotReady when the engine cannot generate now."""
        if not self.engine.is_ready:
            raise NotReady(self.engine.not_ready_reason)

    def check_params(self, params: SamplingParams) -> None:
        """Check `params` against the model.

        Raises:
            InvalidRequest: `field` names the parameter.
        """
        max_logprobs = self.config.model.max_logprobs if self._is_private else None
        check_params(params, model_info=self.model_info, max_logprobs=max_logprobs)
        constraint = self._structured_outputs.applied_to(params.structured_outputs)
        if constraint is not None:
            self._grammars.compile(constraint)

    @cached_property
    def _grammars(self) -> BoundedCompiler:
        info, config = self.model_info, self.config.model
        compiler = GrammarCompiler(
            tokenizer=self.tokenizer, vocab_size=info.vocab_size, eos_token_ids=info.eos_token_ids
        )
        return BoundedCompiler(
            compiler,
            tokenizer=self.tokenizer.name,
            revision=config.revision,
            vocab_size=info.vocab_size,
            eos_token_ids=info.eos_token_ids,
        )

    def prompt_maker(
        self,
        task: PoolingTask,
        *,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        add_special_tokens: bool = True,
        max_query_tokens: int = 0,
        max_document_tokens: int = 0,
    ) -> PromptMaker:
        """How prompts of a task are made, as the frontend makes them.

        Args:
            prompt_name: of a prompt of the checkpoint's files; None takes their default.
            truncate_prompt_tokens: tokens to keep of each prompt; -1 is as many as the model takes.
            max_query_tokens: tokens to keep of each query of a pair; 0 keeps all.
            max_document_tokens: tokens to keep of each document of a pair; 0 keeps all.

        Raises:
            InvalidRequest: there is no such prompt, or a bound is broken.
        """
        info, tokenizer = self.model_info, self.tokenizer
        side: Side | None = "right" if info.only_pools else None
        return PromptMaker(
            tokenizer=tokenizer,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            field="prompts",
            add_special_tokens=add_special_tokens,
            truncation=truncation_of(truncate_prompt_tokens, side, max_tokens=0, max_model_len=info.max_model_len),
            prefix=tokenizer.prompt_files.prompt_of(prompt_name),
            template=score_template(tokenizer.chat_template),
            max_query_tokens=max_query_tokens,
            max_document_tokens=max_document_tokens,
            splits_long=task == "embed" and pooler_config(self.config.model.pooler_config).splits_long,
        )

    async def pool(
        self,
        given: PoolingInput,
        params: PoolingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        lora: LoraAdapter | None = None,
    ) -> PoolingRequestOutput:
        """The pooling result of one prompt; errors as in `pool_input`."""
        prompts = given.prompts()
        requests = [
            self.make_request(
                prompt,
                POOLED,
                request_id=request_id if request_id is None or not place else f"{request_id}-{place}",
                priority=priority,
                lora=lora,
            )
            for place, prompt in enumerate(prompts)
        ]
        return await pool_input(self.engine, requests, given, params)

    def make_request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        beam_search: BeamSearchParams | None = None,
        lora: LoraAdapter | None = None,
    ) -> EngineRequest:
        """A request that can be submitted.

        Raises:
            InvalidRequest: it has an adapter, and the private engine takes none.
        """
        if lora is not None and self._is_private and not self.config.lora.enable_lora:
            raise InvalidRequest("lora_request needs enable_lora=True", field="lora_request")
        constraint = self._structured_outputs.applied_to(params.structured_outputs)
        if constraint is not params.structured_outputs:
            params = replace(params, structured_outputs=constraint)
        if params.bad_words and not params.bad_words_token_ids:
            params = replace(params, bad_words_token_ids=self._bad_words_token_ids(tuple(params.bad_words)))
        return EngineRequest(
            request_id=request_id or f"{self._id_prefix}-{next(self._ids)}",
            prompt_token_ids=prompt.token_ids,
            sampling_params=params,
            priority=priority,
            cache_salt=prompt.cache_salt,
            beam_search=beam_search,
            lora=lora,
        )

    def _bad_words_token_ids(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Remembers the words of the call before: thousands of prompts share theirs."""
        if self._bad_words[0] != words:
            self._bad_words = words, bad_words_token_ids(words, self.tokenizer)
        return self._bad_words[1]

    async def collect(self, request: EngineRequest, builder: RequestOutputBuilder) -> None:
        """Submit `request` and fill `builder` until it has ended; aborts when cancelled.

        Raises:
            PagodaError: the request was refused or failed; `builder` has what there was.
        """
        with closing(self.open(request)) as stream:
            while not stream.is_finished:
                builder.append(await stream.get(at_least=COLLECTED_TOKENS))
                builder.prompt_logprobs = stream.prompt_logprobs

    def open(self, request: EngineRequest) -> TextStream:
        """Submit `request`; the caller closes the stream.

        Raises:
            PagodaError: as in `EngineClient.submit`.
        """
        return TextStream(engine=self.engine, tokenizer=self.tokenizer, request=request)


AsyncLLMEngine = AsyncLLM
"""vLLM's older name of it."""

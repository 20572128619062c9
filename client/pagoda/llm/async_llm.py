"""AsyncLLM: generation for asyncio programs, on a private engine or a running scheduler.

async with AsyncLLM(model="pagoda-tiny") as llm:
    async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=50)):
        print(output.outputs[0].text)
"""

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import AsyncGenerator, Iterable
from contextlib import closing
from dataclasses import replace
from functools import cached_property
from os import PathLike
from typing import Any, Self

import grpc.aio

from pagoda.llm.embedding import (
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    check_pooling_params,
    embed_prompt,
    pool_prompt,
    read_for_embedding,
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
from pagoda.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2
from pagoda_common.config.engine_config import EMBEDDED_MODEL
from pagoda_common.config.generation_config import resolve_generation_config
from pagoda_common.config.structured_outputs_config import structured_outputs_defaults
from pagoda_common.engine.client import EngineClient, EngineRequest
from pagoda_common.engine.generation import TextStream
from pagoda_common.errors import InvalidRequest, NotReady
from pagoda_common.grammar.bounded_grammar import BoundedCompiler
from pagoda_common.grammar.matcher import GrammarCompiler
from pagoda_common.params.beam_search import BeamSearchParams
from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_common.params.outputs import RequestOutput
from pagoda_common.params.pooling_params import POOLED, PoolingParams
from pagoda_common.params.sampling_params import RequestOutputKind, SamplingParams
from pagoda_common.rpc.channels import connect
from pagoda_common.rpc.service import error_from_rpc
from pagoda_common.text.bad_words import bad_words_token_ids
from pagoda_common.text.tokenizer import Tokenizer

CONNECT_TIMEOUT_S = 60.0
"""Seconds for a running scheduler (`address`) to become ready."""
RPC_TIMEOUT_S = 10.0
SETTLE_TIMEOUT_S = 2.0
COLLECTED_TOKENS = 64
"""Tokens that become text together where no one reads them before the end: to wake up costs more than one's text."""


class AsyncLLM(RefusedCalls):
    """A language model. Belongs to the event loop that starts it."""

    def __init__(
        self, model: str = EMBEDDED_MODEL, *, tokenizer: str | None = None, address: str | None = None, **options: Any
    ) -> None:
        """
        Args:
            model: directory or hub id.
            tokenizer: directory or hub id, when it is not the model's.
            address: host:port of a running scheduler; several with commas between are tried in turn, also when the
                scheduler is lost. None starts a private engine.
            options: the engine's, as of LLM.

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
        """The same from vLLM's dataclass; the engine starts with the first call.

        Args:
            extras: vLLM's further arguments (usage_context, stat_loggers, …), refused when they ask for something.

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
        """Start or join the engine and wait until it can generate; does nothing the second time.

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
        """End open requests and the private engine. It begins at once; the caller may await its end.

        Args:
            timeout: accepted; the engine's processes have bounds of their own.

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
        """What the engine serves; there after `start`."""
        return ServedModelConfig.of(self.model_info, self.config.model)

    def get_tokenizer(self) -> HubTokenizer:
        """The tokenizer, with transformers' interface; there after `start`."""
        return HubTokenizer(self.tokenizer)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; there after `start`."""
        if self._tokenizer is None:
            raise NotReady("the engine is not running: it was not started, or was shut down")
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's generation_config.json recommends."""
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
        """Everything so far, whenever there is more; the last one has `finished` set.

        sampling_params.output_kind changes that: DELTA gives what is new each time, FINAL_ONLY the last one alone.

        Leaving the loop early aborts the request when the generator is closed.

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
        """The prompt's embedding, as of LLM.embed; a cancelled call aborts its request.

        Raises:
            PagodaError: the prompt or a parameter is wrong, or the engine refused or failed it.
        """
        check_pooling_params(pooling_params, extras)
        await self.start()
        tokenizer, model_info = self.tokenizer, self.model_info
        read = await asyncio.to_thread(read_for_embedding, prompt, tokenizer=tokenizer, model_info=model_info)
        if len(read) != 1:
            raise InvalidRequest(f"embed takes one prompt, got {len(read)}", field="prompt")
        request = self.make_request(read[0], POOLED, request_id=request_id, priority=priority)
        return await embed_prompt(self.engine, request, pooling_params)

    async def encode(
        self,
        prompt: PromptInput,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        **extras: Any,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """What is made of the prompt, once: that of the parameters' task, or of the model's first one.

        Raises:
            PagodaError: the prompt or a parameter is wrong, or the engine refused or failed it.
        """
        check_pooling_params(pooling_params, extras)
        await self.start()
        tokenizer, model_info = self.tokenizer, self.model_info
        read = await asyncio.to_thread(read_for_embedding, prompt, tokenizer=tokenizer, model_info=model_info)
        if len(read) != 1:
            raise InvalidRequest(f"encode takes one prompt, got {len(read)}", field="prompt")
        request = self.make_request(read[0], POOLED, request_id=request_id, priority=priority)
        yield await pool_prompt(self.engine, request, pooling_params or PoolingParams())

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End a request or several; their generators give what there is, with finish_reason "abort"."""
        for one in [request_id] if isinstance(request_id, str) else request_id:
            self.engine.abort(one)

    async def check_health(self) -> None:
        """Raises NotReady when the engine cannot generate now."""
        if not self.engine.is_ready:
            raise NotReady(self.engine.not_ready_reason)

    async def reset_prefix_cache(self) -> int:
        """Forget every cached prefix that no request uses; the number of blocks that have lost their content.

        Raises:
            PagodaError: the scheduler does not answer.
        """
        async with connect(self.engine.address, security=self.config.security) as channel:
            stub = scheduler_pb2_grpc.SchedulerStub(channel)
            try:
                reply = await stub.ResetPrefixCache(scheduler_pb2.ResetPrefixCacheRequest(), timeout=RPC_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                raise error_from_rpc(error) from None
        return reply.num_blocks

    async def sleep(self, level: int = 1, mode: str = "keep") -> None:
        """Give the engine's memory away until `wake_up`; what is open or comes then waits.

        Args:
            level: 1 keeps the weights in host memory where the device has its own; 2 drops them, and `wake_up` reads
                them again.
            mode: keep lets open requests go on after `wake_up`, abort ends them.

        Raises:
            PagodaError: a worker could not; it serves on.
        """
        await self.engine.control.sleep(level=level, mode=mode)
        with contextlib.suppress(TimeoutError):  # until the load says so, too; someone may have woken it already
            async with asyncio.timeout(SETTLE_TIMEOUT_S):
                while not self.engine.is_sleeping:  # noqa: ASYNC110 (the load comes with the next message)
                    await asyncio.sleep(0.005)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Let the engine serve again; with the tags ["weights"] it has its weights and sleeps on.

        Raises:
            PagodaError: the weights cannot come back; the engine sleeps on.
        """
        await self.engine.control.wake_up(tags=tags or ())
        if not tags or "kv_cache" in tags:
            await self.engine.wait_until_ready(CONNECT_TIMEOUT_S)

    async def is_sleeping(self) -> bool:
        """Whether requests wait because the engine sleeps."""
        return await self.engine.control.is_sleeping()

    async def reload_weights(self, model: str | PathLike[str], revision: str | None = None) -> None:
        """Serve other weights of the same architecture; open requests continue with them.

        Args:
            model: directory or hub id of the checkpoint, as the workers reach it.

        Raises:
            PagodaError: they cannot be read or do not fit; the old ones serve on.
        """
        await self.engine.control.reload_weights(str(model), revision=revision)

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
            PagodaError: as of `EngineClient.submit`.
        """
        return TextStream(engine=self.engine, tokenizer=self.tokenizer, request=request)


AsyncLLMEngine = AsyncLLM
"""vLLM's older name of it."""

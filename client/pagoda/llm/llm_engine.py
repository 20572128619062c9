"""LLMEngine: an engine that the caller drives step by step, with vLLM's interface.

engine = LLMEngine.from_engine_args(EngineArgs(model="pagoda-tiny"))
engine.add_request("0", "Once upon a time", SamplingParams(max_tokens=20))
while engine.has_unfinished_requests():
    for output in engine.step():
        print(output.outputs[0].text)
"""

import asyncio
import copy
import logging
import random
import weakref
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from typing import Any, Self, TypeAlias

from pagoda.llm.async_llm import COLLECTED_TOKENS, AsyncLLM
from pagoda.llm.embedding import (
    EmbeddingRequestOutput,
    as_embedding,
    check_pooling_params,
    read_for_pooling,
    with_task,
)
from pagoda.llm.hub_tokenizer import HubTokenizer
from pagoda.llm.loop_thread import LoopThread
from pagoda.llm.prompts import PromptInput, read_prompts, tokenization_options, with_truncation
from pagoda.llm.request_output import RequestOutputBuilder
from pagoda.llm.served_model import ServedModelConfig
from pagoda.lora.request import LoRARequest, adapter_of
from pagoda.options.engine_args import EngineArgs
from pagoda.options.refusals import refuse_extras
from pagoda_common.config.engine_config import EngineConfig
from pagoda_common.engine.generation import TextStream
from pagoda_common.errors import Code, InvalidRequest, PagodaError
from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_common.params.outputs import RequestOutput
from pagoda_common.params.pooling_params import PoolingParams
from pagoda_common.params.sampling_params import RequestOutputKind, SamplingParams

logger = logging.getLogger(__name__)

StepOutput: TypeAlias = RequestOutput | EmbeddingRequestOutput


class _Generation:
    """A request that generates. Lives on the engine's loop."""

    def __init__(self, stream: TextStream, builder: RequestOutputBuilder) -> None:
        self._stream = stream
        self._builder = builder
        self.is_finished = False
        self.has_news = False
        self._kind = builder.request.sampling_params.output_kind

    async def follow(self, on_news: asyncio.Event) -> None:
        """Take the tokens until the end; sets `on_news` whenever `output` should be called.

        Raises:
            PagodaError: the engine refused the request, or is gone. One that alone fails ends as "error" instead.
        """
        at_least = COLLECTED_TOKENS if self._kind is RequestOutputKind.FINAL_ONLY else 1
        with closing(self._stream) as stream:
            try:
                while not stream.is_finished:
                    self._builder.append(await stream.get(at_least=at_least))
                    self._builder.prompt_logprobs = stream.prompt_logprobs
                    self._tell(on_news, is_finished=stream.is_finished)
            except PagodaError as error:
                if error.code is not Code.INTERNAL:
                    raise
                logger.error("request %s failed: %s", self._builder.request.request_id, error.message)
                self._builder.fail()
                self._tell(on_news, is_finished=True)

    def _tell(self, on_news: asyncio.Event, *, is_finished: bool) -> None:
        self.is_finished = is_finished
        if is_finished or self._kind is not RequestOutputKind.FINAL_ONLY:
            self.has_news = True
            on_news.set()

    def output(self) -> StepOutput:
        """The output so far or its new part, by the request's output_kind."""
        self.has_news = False
        return self._builder.take() if self._kind is RequestOutputKind.DELTA else self._builder.build()


class _Embedding:
    """A request for an embedding. Lives on the engine's loop."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._result: EmbeddingRequestOutput | None = None
        self.has_news = False

    @property
    def is_finished(self) -> bool:
        """The embedding is there."""
        return self._result is not None

    async def follow(self, on_news: asyncio.Event) -> None:
        """Wait for the embedding; raises PagodaError when the engine refused or failed it."""
        self._result = as_embedding(await self._call)
        self.has_news = True
        on_news.set()

    def output(self) -> StepOutput:
        """The embedding."""
        assert self._result is not None
        self.has_news = False
        return self._result


class LLMEngine:
    """Requests are added at any time; each `step` gives what is new. One thread at a time."""

    def __init__(self, async_llm: AsyncLLM, loop: LoopThread) -> None:
        """
        Args:
            async_llm: started on `loop`; the caller shuts it down.
        """
        self._async_llm = async_llm
        self._loop = loop
        self._draw_seed = random.Random(async_llm.config.model.seed)
        self._open: dict[str, _Generation | _Embedding] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._on_news = asyncio.Event()
        self._failures: list[PagodaError] = []

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **extras: Any) -> Self:
        """Start an engine of its own, which ends with the object or with `shutdown`.

        Args:
            extras: vLLM's further arguments (usage_context, stat_loggers, …), refused when they ask for something.

        Raises:
            ConfigError: an argument is out of bounds or not supported.
            ModelLoadError: the model cannot be loaded.
        """
        refuse_extras(extras)
        async_llm, loop = AsyncLLM(**engine_args.keywords()), LoopThread(name="pagoda-engine")
        engine = cls(async_llm, loop)
        engine._finalizer = weakref.finalize(engine, shut_down, async_llm, loop)
        try:
            loop.run(async_llm.start())
        except BaseException:
            engine.shutdown()
            raise
        return engine

    _finalizer: Any = None
    """Ends an engine that this object started."""

    def shutdown(self) -> None:
        """End an engine of its own; that of an LLM ends with it."""
        if self._finalizer is not None:
            self._finalizer()

    @property
    def vllm_config(self) -> EngineConfig:
        """The configuration with vLLM's names: model_config, cache_config, … It is the requested one, but for the
        prefix cache, which models that only pool do not have."""
        config = self._async_llm.config
        if not self._async_llm.model_info.only_pools:
            return config
        return replace(config, cache=replace(config.cache, enable_prefix_caching=False))

    @property
    def model_config(self) -> ServedModelConfig:
        """The served model, with vLLM's attributes."""
        return self._async_llm.model_config

    def get_tokenizer(self) -> HubTokenizer:
        """The tokenizer, with transformers' interface."""
        return self._async_llm.get_tokenizer()

    def add_request(
        self,
        request_id: str,
        prompt: PromptInput,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Any = None,
        priority: int = 0,
    ) -> str:
        """Submit a request.

        Args:
            request_id: unique among the open ones.
            params: PoolingParams ask for the prompt's embedding.
            arrival_time: accepted; a request arrives when it is added.
            tokenization_kwargs: add_special_tokens and truncate_prompt_tokens.
            priority: lower runs first (needs scheduling_policy="priority").

        Returns:
            request_id.

        Raises:
            InvalidRequest: the prompt, a parameter or the id is wrong; nothing was submitted then.
            PagodaError: the engine is gone.
        """
        refuse_extras({"trace_headers": trace_headers})
        adapter = adapter_of(lora_request)
        options = tokenization_options(tokenization_kwargs)
        if not isinstance(request_id, str) or not request_id:
            raise InvalidRequest(f"request_id must be a text, got {request_id!r}", field="request_id")
        if request_id in self._open:
            raise InvalidRequest(f"request_id {request_id!r} is in use", field="request_id")
        if isinstance(params, PoolingParams):
            check_pooling_params(params, {})
            llm = self._async_llm
            (read,) = read_for_pooling([prompt], llm.prompt_maker("embed", **options))
            wanted = with_task(params, "embed")
            call = llm.pool(read, wanted, request_id=request_id, priority=priority, lora=adapter)
            self._loop.run(self._start(request_id, _Embedding(call)))
            return request_id
        self._loop.run(self._generate(request_id, prompt, params, priority, options, adapter))
        return request_id

    async def _generate(
        self,
        request_id: str,
        prompt: PromptInput,
        params: SamplingParams,
        priority: int,
        options: dict[str, Any],
        lora: LoraAdapter | None,
    ) -> None:
        params = with_truncation(params, options)
        if params.seed is None:
            params = copy.copy(params)
            params.seed = self._draw_seed.getrandbits(63)
        llm = self._async_llm
        (read,) = await asyncio.to_thread(
            read_prompts,
            [prompt],
            tokenizer=llm.tokenizer,
            model_info=llm.model_info,
            params=params,
            add_special_tokens=options.get("add_special_tokens", True),
        )
        await asyncio.to_thread(llm.check_params, params)
        request = llm.make_request(read, params, request_id=request_id, priority=priority, lora=lora)
        builder = RequestOutputBuilder(request=request, prompt=read, tokenizer=llm.tokenizer)
        await self._start(request_id, _Generation(llm.open(request), builder))

    async def _start(self, request_id: str, opened: _Generation | _Embedding) -> None:
        self._open[request_id] = opened
        self._tasks[request_id] = asyncio.create_task(self._follow(request_id, opened), name=f"request {request_id}")

    async def _follow(self, request_id: str, opened: _Generation | _Embedding) -> None:
        try:
            await opened.follow(self._on_news)
        except PagodaError as error:
            self._open.pop(request_id, None)
            self._failures.append(error)
            self._on_news.set()
        finally:
            self._tasks.pop(request_id, None)

    def step(self) -> list[StepOutput]:
        """Wait for news of any request, and give those of all that have some; empty when no request is open.

        Raises:
            PagodaError: the engine refused a request, which is open no more, or is gone.
        """
        return self._loop.run(self._step())

    async def _step(self) -> list[StepOutput]:
        if not self._open and not self._failures:
            return []
        await self._on_news.wait()
        self._on_news.clear()
        if self._failures:
            failure = self._failures.pop(0)
            if self._failures or any(opened.has_news for opened in self._open.values()):
                self._on_news.set()
            raise failure
        outputs = []
        for request_id, opened in list(self._open.items()):
            if opened.has_news:
                outputs.append(opened.output())
                if opened.is_finished:
                    del self._open[request_id]
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has more to give."""
        return bool(self._open or self._failures)

    def get_num_unfinished_requests(self) -> int:
        """Requests whose end `step` has not given yet."""
        return len(self._open)

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """End a request or several now, without a further output; unknown ids are ignored."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        self._loop.run(self._abort(ids))

    async def _abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._open.pop(request_id, None)
            task = self._tasks.pop(request_id, None)
            if task is not None:
                task.cancel()
                await asyncio.wait([task])

    def reset_prefix_cache(self) -> bool:
        """Drop every cached prefix that no request uses; raises PagodaError when the scheduler does not answer."""
        self._loop.run(self._async_llm.reset_prefix_cache())
        return True


def shut_down(async_llm: AsyncLLM, loop: LoopThread) -> None:
    """End the engine that runs on `loop`, and the loop; does nothing the second time."""

    async def close() -> None:
        await async_llm.shutdown()

    try:
        loop.run(close())
    finally:
        loop.close()

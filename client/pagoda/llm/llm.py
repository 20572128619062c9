"""LLM: offline generation with vLLM's interface.

from pagoda import LLM, SamplingParams

llm = LLM(model="pagoda-tiny")
for output in llm.generate(["Hello", "Once upon a time"], SamplingParams(temperature=0.8, top_p=0.95)):
    print(output.prompt, output.outputs[0].text)
"""

import asyncio
import copy
import logging
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, Self, TypeAlias

from tqdm import tqdm

from pagoda.llm.async_llm import AsyncLLM
from pagoda.llm.beam_search import BeamSearchOutput, BeamSearchParams, beam_search_output
from pagoda.llm.conversation import Message, render
from pagoda.llm.embed_calls import EmbedCalls
from pagoda.llm.hub_tokenizer import HubTokenizer
from pagoda.llm.llm_engine import LLMEngine, shut_down
from pagoda.llm.loop_thread import LoopThread
from pagoda.llm.metrics import GenerationCounts, Metric, snapshot
from pagoda.llm.prompts import PromptInput, as_prompt_list, read_prompts, tokenization_options, with_truncation
from pagoda.llm.request_output import RequestOutputBuilder
from pagoda.llm.served_model import ServedModelConfig
from pagoda.lora.request import LoRARequest, adapter_of, adapters_of
from pagoda.options.refusals import RefusedCalls, refuse_extras
from pagoda_common.config.engine_config import EMBEDDED_MODEL
from pagoda_common.errors import Code, InvalidRequest, PagodaError
from pagoda_common.params.outputs import RequestOutput
from pagoda_common.params.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

MAX_OPEN_REQUESTS = 2048
"""Requests submitted at a time; the others wait here rather than in the engine's queue."""

UseTqdm: TypeAlias = bool | Callable[..., Any]


class LLM(EmbedCalls, RefusedCalls):
    """A language model for programs without asyncio.

    It starts a private scheduler and worker as child processes, which end with this process. With `address` it uses a
    running scheduler. Use it from one thread at a time.
    """

    def __init__(
        self,
        model: str = EMBEDDED_MODEL,
        *,
        tokenizer: str | None = None,
        revision: str | None = None,
        dtype: str = "auto",
        max_model_len: int | None = None,
        seed: int = 0,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        gpu_memory_utilization: float = 0.92,
        kv_cache_memory_bytes: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        enable_prefix_caching: bool = True,
        address: str | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            model: directory, hub id, or the embedded "pagoda-tiny".
            seed: seed of the generator from which requests without a seed draw theirs. A program therefore gives the
                same outputs in each run.
            address: host:port of a running scheduler, or several with commas between, which are tried in turn, also
                after the scheduler is lost. None starts a private engine. An address that is not on loopback needs
                tls_cert, tls_key and tls_ca (files), or insecure=True, and service_token_file if services use tokens.
            options: any other argument of EngineArgs. data_parallel_size=2 starts two workers;
                tensor_parallel_size=2 starts two that share one model.

        Raises:
            ConfigError: an argument is unknown, out of bounds or not supported.
            ModelLoadError: the model cannot be loaded.
            NotReady: the scheduler at `address` cannot be used.
        """
        self._async_llm = AsyncLLM(
            model,
            tokenizer=tokenizer,
            address=address,
            revision=revision,
            dtype=dtype,
            max_model_len=max_model_len,
            seed=seed,
            trust_remote_code=trust_remote_code,
            tensor_parallel_size=tensor_parallel_size,
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
            **options,
        )
        self._counts = GenerationCounts()
        self._enqueued: list[RequestOutputBuilder] = []
        self._draw_seed = random.Random(seed)
        self._loop = LoopThread(name="pagoda-llm")
        # Runs once: at shutdown(), when the object is collected, or when the interpreter ends.
        self._finalizer = weakref.finalize(self, shut_down, self._async_llm, self._loop)
        try:
            self._loop.run(self._async_llm.start())
        except BaseException:
            self.shutdown()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """End the private engine. The object cannot be used afterwards."""
        self._finalizer()

    @cached_property
    def llm_engine(self) -> LLMEngine:
        """The same engine as an LLMEngine, which the caller drives step by step."""
        return LLMEngine(self._async_llm, self._loop)

    @property
    def model_config(self) -> ServedModelConfig:
        """The served model, with vLLM's attributes."""
        return self._async_llm.model_config

    def get_tokenizer(self) -> HubTokenizer:
        """The tokenizer, with transformers' interface."""
        return self._async_llm.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling defaults of the checkpoint's generation_config.json, which calls without parameters use."""
        return self._async_llm.get_default_sampling_params()

    def get_world_size(self, include_dp: bool = True) -> int:
        """The number of workers; without `include_dp`, of one copy of the model."""
        parallel = self._async_llm.config.parallel
        return parallel.tensor_parallel_size * (parallel.data_parallel_size if include_dp else 1)

    def get_metrics(self) -> list[Metric]:
        """The engine's last reported load, and counts of the tokens and requests of this LLM."""
        return snapshot(self._async_llm.engine.load, self._counts, model_name=self._async_llm.model_info.model)

    def reset_prefix_cache(self, **extras: Any) -> bool:
        """Drop every cached prefix that no request uses.

        Raises:
            PagodaError: the scheduler does not answer.
        """
        refuse_extras(extras)
        self._loop.run(self._async_llm.reset_prefix_cache())
        return True

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        **extras: Any,
    ) -> list[RequestOutput]:
        """Continue each prompt; outputs are in the order of the prompts.

        Args:
            prompts: texts, lists of token ids, {"prompt": …} or {"prompt_token_ids": …}; one or a list.
            sampling_params: one for all, or one per prompt; None takes the checkpoint's defaults.
            use_tqdm: show a progress bar; or a function that makes one.
            priority: one per prompt, lower runs first (needs scheduling_policy="priority").
            tokenization_kwargs: add_special_tokens and truncate_prompt_tokens.
            lora_request: the adapter of all, or of each prompt; needs enable_lora=True.
            extras: vLLM's other arguments (trace_headers, …); a value that asks for something is refused.

        Raises:
            InvalidRequest: a prompt or parameter is wrong. Nothing was submitted then.
            PagodaError: the engine is lost. A single request that fails has finish_reason "error" instead.
        """
        refuse_extras(extras)
        return self._run(self._read(prompts, sampling_params, priority, tokenization_kwargs, lora_request), use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        **extras: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several; outputs are in their order.

        Args:
            messages: a conversation, a list of {"role": …, "content": …}; or a list of conversations.
            chat_template: Jinja text in place of the checkpoint's.
            chat_template_content_format: texts are the same in all of vLLM's formats.
            continue_final_message: continue the last message; needs add_generation_prompt=False.
            tools: JSON schemas of functions, for the template. Calls stay in the text as the model writes them.
            chat_template_kwargs: further variables of the template.

        Raises:
            InvalidRequest: there is no chat template, or it refuses the messages; otherwise as `generate`.
        """
        refuse_extras(extras)
        rendered = render(
            messages,
            self._async_llm.tokenizer,
            chat_template=chat_template,
            content_format=chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            variables=chat_template_kwargs or {},
        )
        tokenization_kwargs = {"add_special_tokens": False, **(tokenization_kwargs or {})}
        read = self._read(list(rendered), sampling_params, None, tokenization_kwargs, lora_request)
        return self._run(read, use_tqdm)

    def enqueue(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        **extras: Any,
    ) -> list[str]:
        """Check prompts and keep them for `wait_for_completion`; arguments and errors as in `generate`.

        Returns:
            The request_id of each.
        """
        refuse_extras(extras)
        builders = self._read(prompts, sampling_params, priority, tokenization_kwargs, lora_request)
        self._enqueued += builders
        return [builder.request.request_id for builder in builders]

    def wait_for_completion(self, *, use_tqdm: UseTqdm = True) -> list[RequestOutput]:
        """Generate the enqueued prompts; outputs are in their order. Errors as in `generate`."""
        builders, self._enqueued = self._enqueued, []
        return self._run(builders, use_tqdm)

    def beam_search(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        params: BeamSearchParams,
        lora_request: LoRARequest | None = None,
        use_tqdm: UseTqdm = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Find the likeliest continuations of each prompt; arguments and errors as in `generate`.

        Args:
            concurrency_limit: accepted as in vLLM, and ignored.
        """
        adapter = adapter_of(lora_request)
        tokenizer = self._async_llm.tokenizer
        read = read_prompts(as_prompt_list(prompts), tokenizer=tokenizer, model_info=self._async_llm.model_info)
        sampling_params = params.sampling_params()
        self._async_llm.check_params(sampling_params)
        builders = []
        for prompt in read:
            request = self._async_llm.make_request(prompt, sampling_params, beam_search=params, lora=adapter)
            builders.append(RequestOutputBuilder(request=request, prompt=prompt, tokenizer=tokenizer))
        return [beam_search_output(output, params, tokenizer) for output in self._run(builders, use_tqdm)]

    def _read(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
        tokenization_kwargs: dict[str, Any] | None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutputBuilder]:
        """One builder a prompt, with its request, when everything is right."""
        given = as_prompt_list(prompts)
        adapters = adapters_of(lora_request, len(given))
        params = self._params_per_prompt(sampling_params, len(given))
        options = tokenization_options(tokenization_kwargs)
        params = [with_truncation(one, options) for one in params]
        if priority is not None and len(priority) != len(given):
            message = f"priority has {len(priority)} entries, there are {len(given)} prompts"
            raise InvalidRequest(message, field="priority")
        tokenizer = self._async_llm.tokenizer
        read = read_prompts(
            given,
            tokenizer=tokenizer,
            model_info=self._async_llm.model_info,
            add_special_tokens=options.get("add_special_tokens", True),
            params=params,
        )
        builders = []
        for place, prompt in enumerate(read):
            request = self._async_llm.make_request(
                prompt,
                self._with_seed(params[place]),
                priority=priority[place] if priority is not None else 0,
                lora=adapters[place],
            )
            builders.append(RequestOutputBuilder(request=request, prompt=prompt, tokenizer=tokenizer))
        return builders

    def _run(self, builders: list[RequestOutputBuilder], use_tqdm: UseTqdm) -> list[RequestOutput]:
        self._check_awake()
        make_bar = use_tqdm if callable(use_tqdm) else tqdm
        with make_bar(total=len(builders), desc="Processed prompts", disable=not use_tqdm, dynamic_ncols=True) as bar:
            self._loop.run(self._run_all(builders, bar))
        outputs = [builder.build() for builder in builders]
        for output in outputs:
            self._counts.add(output)
        return outputs

    def _params_per_prompt(
        self, sampling_params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> Sequence[SamplingParams]:
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            self._async_llm.check_params(sampling_params)
            return [sampling_params] * num_prompts
        if len(sampling_params) != num_prompts:
            message = f"sampling_params has {len(sampling_params)} entries, there are {num_prompts} prompts"
            raise InvalidRequest(message, field="sampling_params")
        for params in sampling_params:
            self._async_llm.check_params(params)
        return sampling_params

    def _with_seed(self, params: SamplingParams) -> SamplingParams:
        if params.seed is None:
            params = copy.copy(params)
            params.seed = self._draw_seed.getrandbits(63)
        return params

    async def _run_all(self, builders: list[RequestOutputBuilder], bar: Any) -> None:
        pending = iter(builders)
        num_tokens = 0

        async def work(waiting: Iterator[RequestOutputBuilder]) -> None:
            nonlocal num_tokens
            for builder in waiting:
                await self._run_one(builder)
                num_tokens += builder.num_output_tokens
                rate = num_tokens / max(bar.format_dict["elapsed"] or 0, 1e-3)
                bar.set_postfix_str(f"{rate:.0f} output tokens/s", refresh=False)
                bar.update()

        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(len(builders), MAX_OPEN_REQUESTS)):
                    tasks.create_task(work(pending))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _run_one(self, builder: RequestOutputBuilder) -> None:
        try:
            await self._async_llm.collect(builder.request, builder)
        except PagodaError as error:
            if error.code is not Code.INTERNAL:
                raise
            logger.error("request %s failed: %s", builder.request.request_id, error.message)
            builder.fail()

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
from typing import Any, Self

from tqdm import tqdm

from pagoda.async_llm import AsyncLLM
from pagoda.beam_search import BeamSearchOutput, BeamSearchParams, beam_search_output
from pagoda.loop_thread import LoopThread
from pagoda.prompts import Prompt, PromptInput, as_prompt_list, read_prompts
from pagoda.request_output import RequestOutputBuilder
from pagoda_common.config import EMBEDDED_MODEL
from pagoda_common.errors import Code, InvalidRequest, PagodaError
from pagoda_common.outputs import RequestOutput
from pagoda_common.sampling_params import SamplingParams
from pagoda_common.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MAX_OPEN_REQUESTS = 2048
"""Requests submitted at a time; the others wait here rather than in the engine's queue."""

Message = dict[str, Any]


class LLM:
    """A language model for programs without asyncio.

    Starts a private engine, scheduler and worker as child processes that end with this one, or uses a running
    scheduler. One thread at a time.
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
            seed: requests without a seed draw theirs from a generator with this one, so a program gives the same
                outputs each time it is run.
            address: host:port of a running scheduler; None starts a private engine.
            options: further fields of ModelConfig, CacheConfig, SchedulerConfig and ParallelConfig
                (data_parallel_size=2 starts two workers).

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
        self._draw_seed = random.Random(seed)
        self._loop = LoopThread(name="pagoda-llm")
        # Runs once: at shutdown(), when the object is collected, or when the interpreter ends.
        self._finalizer = weakref.finalize(self, _shut_down, self._async_llm, self._loop)
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
        """End the private engine. The object is of no use afterwards."""
        self._finalizer()

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer."""
        return self._async_llm.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's generation_config.json recommends; used when a call gives none."""
        return self._async_llm.get_default_sampling_params()

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt; the outputs are in the prompts' order.

        Args:
            prompts: texts, lists of token ids, {"prompt": …} or {"prompt_token_ids": …}; one or a list.
            sampling_params: one for all, or one per prompt; None takes the checkpoint's defaults.
            use_tqdm: show a progress bar; or a function that makes one.
            priority: one per prompt, lower runs first (needs scheduling_policy="priority").

        Raises:
            InvalidRequest: a prompt or parameter is wrong; nothing was submitted then.
            PagodaError: the engine is gone. A request that alone fails has finish_reason "error" instead.
        """
        read = read_prompts(
            as_prompt_list(prompts),
            tokenizer=self.get_tokenizer(),
            model_info=self._async_llm.model_info,
            params=sampling_params,
        )
        return self._generate(read, sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several; the outputs are in their order.

        Args:
            messages: a conversation, a list of {"role": …, "content": …}; or a list of conversations.
            chat_template: Jinja text in place of the checkpoint's.
            chat_template_kwargs: further variables of the template.

        Raises:
            InvalidRequest: no chat template, or it refuses the messages; else as `generate`.
        """
        is_one = bool(messages) and isinstance(messages[0], dict)
        conversations: Sequence[Any] = [messages] if is_one else messages
        tokenizer = self.get_tokenizer()
        rendered: list[PromptInput] = [
            tokenizer.apply_chat_template(
                list(conversation),
                add_generation_prompt=add_generation_prompt,
                chat_template=chat_template,
                tools=tools,
                **(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]
        info = self._async_llm.model_info
        read = read_prompts(
            rendered, tokenizer=tokenizer, model_info=info, add_special_tokens=False, params=sampling_params
        )
        return self._generate(read, sampling_params, use_tqdm, None)

    def beam_search(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        params: BeamSearchParams,
        *,
        use_tqdm: bool | Callable[..., Any] = False,
    ) -> list[BeamSearchOutput]:
        """Search for the likeliest continuations of each prompt; arguments and errors as `generate`."""
        tokenizer = self.get_tokenizer()
        read = read_prompts(as_prompt_list(prompts), tokenizer=tokenizer, model_info=self._async_llm.model_info)
        sampling_params = params.sampling_params()
        builders = []
        for prompt in read:
            request = self._async_llm.make_request(prompt, sampling_params, beam_search=params)
            builders.append(RequestOutputBuilder(request=request, prompt=prompt, tokenizer=tokenizer))
        return [beam_search_output(output, params, tokenizer) for output in self._run(builders, use_tqdm)]

    def _generate(
        self,
        prompts: list[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool | Callable[..., Any],
        priority: Sequence[int] | None,
    ) -> list[RequestOutput]:
        params = self._params_per_prompt(sampling_params, len(prompts))
        if priority is not None and len(priority) != len(prompts):
            message = f"priority has {len(priority)} entries, there are {len(prompts)} prompts"
            raise InvalidRequest(message, field="priority")
        builders = []
        for place, prompt in enumerate(prompts):
            request = self._async_llm.make_request(
                prompt, self._with_seed(params[place]), priority=priority[place] if priority is not None else 0
            )
            builders.append(RequestOutputBuilder(request=request, prompt=prompt, tokenizer=self.get_tokenizer()))
        return self._run(builders, use_tqdm)

    def _run(self, builders: list[RequestOutputBuilder], use_tqdm: bool | Callable[..., Any]) -> list[RequestOutput]:
        make_bar = use_tqdm if callable(use_tqdm) else tqdm
        with make_bar(total=len(builders), desc="Processed prompts", disable=not use_tqdm, dynamic_ncols=True) as bar:
            self._loop.run(self._run_all(builders, bar))
        return [builder.build() for builder in builders]

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
            async for _ in self._async_llm.follow(builder.request, builder):
                pass
        except PagodaError as error:
            if error.code is not Code.INTERNAL:
                raise
            logger.error("request %s failed: %s", builder.request.request_id, error.message)
            builder.fail()


def _shut_down(async_llm: AsyncLLM, loop: LoopThread) -> None:
    try:
        loop.run(async_llm.shutdown())
    finally:
        loop.close()

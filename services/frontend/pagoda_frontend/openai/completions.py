"""POST /v1/completions."""

from functools import partial
from typing import Any

from fastapi import Request, Response

from pagoda_common.errors import InvalidRequest
from pagoda_common.params.structured_outputs import StructuredOutputsParams
from pagoda_common.params.truncation import Truncation
from pagoda_frontend.conversation.thinking_budget import FIELD as BUDGET
from pagoda_frontend.conversation.thinking_budget import with_thinking_budget
from pagoda_frontend.http.answers.pieced_json import long_json_response
from pagoda_frontend.http.answers.sse import EventStream, stream_events, unless_disconnected
from pagoda_frontend.http.calls import call_of, read_call, tenant_of
from pagoda_frontend.openai.chunks import CompletionChunks, chunk_options
from pagoda_frontend.openai.echo import Echo
from pagoda_frontend.openai.logprobs import LogprobWriter, logprob_writer, prompt_logprobs_by_id
from pagoda_frontend.openai.protocol import CompletionBody
from pagoda_frontend.requests.call_context import CallContext, unique_id
from pagoda_frontend.requests.choices import choices_of
from pagoda_frontend.requests.params import COMPLETION_MAX_TOKENS
from pagoda_frontend.requests.run import CollectedSequence, start_run
from pagoda_frontend.requests.sampling import body_truncation, sampling_params_of
from pagoda_frontend.requests.structured import constraint_field
from pagoda_frontend.serving.served_model import ServedModel
from pagoda_frontend.serving.serving import Serving

COMPLETIONS_PATH = "/v1/completions"
MAX_PROMPTS = 1024


class Completions:
    """The endpoint."""

    def __init__(self, *, serving: Serving) -> None:
        self._serving = serving

    async def create(self, request: Request) -> Response:
        """Complete a prompt.

        Raises:
            PagodaError: the request is wrong, was refused, or failed.
        """
        serving = self._serving
        body, resumption = await read_call(request, CompletionBody, serving=serving, path=COMPLETIONS_PATH)
        request_id = unique_id("cmpl-", request.headers.get("x-request-id") or body.request_id)
        tenant = tenant_of(request, serving=serving)
        call = call_of(request.headers, body, tenant=tenant, request_id=request_id, resumption=resumption)
        if body.stream:
            call = await serving.work.prepare(partial(call.noting, body, path=COMPLETIONS_PATH))
            return await self._answer(body, call)
        return await unless_disconnected(request, self._answer(body, call))

    async def _answer(self, body: CompletionBody, call: CallContext) -> Response:
        serving = self._serving
        model = serving.model_named(body.model)
        max_tokens = body.max_tokens if body.max_tokens is not None else COMPLETION_MAX_TOKENS
        is_scoring = bool(body.echo) and max_tokens == 0
        choices = choices_of(body, best_of=body.best_of, with_logprobs=body.logprobs is not None)
        params = await serving.work.prepare(
            lambda: sampling_params_of(
                body,
                model=model,
                max_logprobs=serving.config.max_logprobs,
                choices=choices,
                logprobs=body.logprobs,
                max_tokens=1 if is_scoring else max_tokens,
                prompt_logprobs=body.logprobs if body.echo and body.prompt_logprobs is None else None,
            )
        )
        truncation = body_truncation(body, params=params, model=model)
        texts, prompts = await self._prompts(body, model, truncation)
        if body.thinking_token_budget is not None:
            params.structured_outputs = self._with_budget(
                params.structured_outputs, body.thinking_token_budget, texts=texts, prompts=prompts, model=model
            )
        await model.grammars.check(params.structured_outputs, field=constraint_field(body))
        run = start_run(
            call,
            serving=serving,
            model=model,
            prompts=prompts,
            params=params,
            field="prompt",
            cache_salt=body.cache_salt,
            beam_search=choices.beam_search,
            is_scoring=is_scoring,
        )
        envelope = {
            "id": call.request_id,
            "object": "text_completion",
            "created": call.created,
            "model": body.model or model.names[0],
            "system_fingerprint": model.fingerprint,
        }
        logprobs = logprob_writer(
            body, model.tokenizer, body.logprobs, as_token_ids=serving.config.return_tokens_as_token_ids
        )
        echo = None
        if body.echo:
            echo = [
                Echo(text=text, token_ids=ids, tokenizer=model.tokenizer, logprobs=logprobs)
                for text, ids in zip(texts, prompts, strict=True)
            ]
        if body.stream:
            chunks = CompletionChunks(
                echo=echo,
                envelope=envelope,
                options=chunk_options(body, logprobs, has_usage=serving.config.enable_force_include_usage),
                prompts=prompts,
                n=run.n,
                usage=run.usage,
                prompt_logprobs=run.prompt_logprobs,
            )
            return EventStream(
                stream_events(run, chunks, run),
                request_id=call.request_id,
                keep_alive_s=serving.config.sse_keep_alive_interval_s,
                timeout_s=call.timeout_s,
            )
        collected = await run.collect()

        def answer() -> dict[str, Any]:
            shown = []
            for sequence in choices.best(collected):
                place = sequence.index // choices.n
                choice = _choice(sequence, body, prompts[place], logprobs)
                if echo is not None:
                    echo[place].put_before(choice, run.prompt_logprobs[place])
                choice["prompt_logprobs"] = prompt_logprobs_by_id(run.prompt_logprobs[place], model.tokenizer)
                shown.append(choice)
            whole = {**envelope, "choices": shown, "usage": run.usage()}
            return whole | {"service_tier": None, "kv_transfer_params": None}

        headers = {"X-Request-Id": call.request_id}
        return await long_json_response(answer, headers, work=serving.work, num_bytes=run.answer_bytes)

    def _with_budget(
        self,
        constraint: StructuredOutputsParams | None,
        budget: int,
        *,
        texts: list[str | None],
        prompts: list[list[int]],
        model: ServedModel,
    ) -> StructuredOutputsParams | None:
        """`constraint` with at most `budget` tokens of reasoning before the constrained text.

        Raises:
            InvalidRequest: the budget cannot be enforced, or only some prompts end inside reasoning.
        """
        bounded = [
            with_thinking_budget(
                constraint,
                budget,
                dialect=self._serving.dialect,
                prompt=text if text is not None else model.tokenizer.decode(ids, skip_special_tokens=False),
                tokenizer=model.tokenizer,
                max_model_len=model.max_model_len,
            )
            for text, ids in zip(texts, prompts, strict=True)
        ]
        if any(one != bounded[0] for one in bounded):
            message = f"{BUDGET} needs prompts that all end inside reasoning, or none that does"
            raise InvalidRequest(message, field=BUDGET)
        return bounded[0]

    async def _prompts(
        self, body: CompletionBody, model: ServedModel, truncation: Truncation | None
    ) -> tuple[list[str | None], list[list[int]]]:
        """Texts to echo (None where token ids are given) and token ids of the prompts."""
        given: list[Any] = body.prompt if isinstance(body.prompt, list) else [body.prompt]
        if isinstance(body.prompt, list) and given and isinstance(given[0], int):
            given = [given]
        if not given:
            raise InvalidRequest("prompt is empty: it must have at least one entry", field="prompt")
        if len(given) > MAX_PROMPTS:
            raise InvalidRequest(f"there may be at most {MAX_PROMPTS} prompts, got {len(given)}", field="prompt")
        texts: list[str | None] = []
        prompts: list[list[int]] = []
        add_special_tokens = body.add_special_tokens is not False
        for prompt in given:
            if isinstance(prompt, str):
                ids = await model.prompts.from_text(
                    prompt, add_special_tokens=add_special_tokens, field="prompt", truncation=truncation
                )
            else:
                ids = model.prompts.from_token_ids(prompt, field="prompt", truncation=truncation)
            text = prompt if isinstance(prompt, str) else None
            if text is not None and truncation is not None and len(ids) >= truncation.num_tokens:
                text = model.tokenizer.decode(ids)
            texts.append(text)
            prompts.append(ids)
        return texts, prompts


def _choice(
    sequence: CollectedSequence,
    body: CompletionBody,
    prompt: list[int],
    logprobs: LogprobWriter | None,
) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": sequence.index,
        "text": sequence.text,
        "logprobs": None,
        "finish_reason": sequence.finish_reason,
        "stop_reason": sequence.stop_reason,
    }
    if logprobs is not None:
        choice["logprobs"] = logprobs.for_completion(sequence.logprobs, sequence.token_text_offsets)
    choice["token_ids"] = sequence.token_ids if body.return_token_ids else None
    choice["prompt_token_ids"] = prompt if body.return_token_ids else None
    return choice

"""The public gRPC service: the same engine, prompts and limits as over HTTP, in protobuf."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from pagoda.v1 import inference_pb2, inference_pb2_grpc
from pagoda_common.errors import InvalidRequest, PagodaError
from pagoda_frontend.access import MAX_REQUEST_ID_CHARS
from pagoda_frontend.conversation import Conversation, start_conversation
from pagoda_frontend.convert import delta_to_proto, sampling_params_of, sequence_to_proto
from pagoda_frontend.convert_chat import (
    PROTO_NAMES,
    chat_body_from_proto,
    message_delta_to_proto,
    message_to_proto,
    prompt_of,
    tokenize_body_from_proto,
)
from pagoda_frontend.errors import renamed
from pagoda_frontend.operations import token_ids_of
from pagoda_frontend.params import check_cache_salt, check_prompt_logprobs, check_token_ids, fit_to_context
from pagoda_frontend.run import Run
from pagoda_frontend.serving import VERSION, Serving, unique_id
from pagoda_frontend.terms import Terms, tenant_of

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """pagoda.v1.Inference."""

    def __init__(self, *, serving: Serving) -> None:
        self._serving = serving

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncGenerator[inference_pb2.GenerateResponse]:
        run = await self._run(request, context)
        async with aclosing(run.deltas()) as stream:
            async for deltas in stream:
                for delta in deltas:
                    yield delta_to_proto(delta, request_id=run.request_id, num_prompt_tokens=run.num_prompt_tokens)

    async def GenerateUnary(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> inference_pb2.GenerateUnaryResponse:
        run = await self._run(request, context)
        outputs = [
            sequence_to_proto(sequence, request_id=run.request_id, num_prompt_tokens=run.num_prompt_tokens)
            for sequence in await run.collect()
        ]
        return inference_pb2.GenerateUnaryResponse(request_id=run.request_id, outputs=outputs)

    async def Chat(
        self, request: inference_pb2.ChatRequest, context: Any
    ) -> AsyncGenerator[inference_pb2.ChatResponse]:
        conversation = await self._conversation(request, context)
        run = conversation.run
        num_output_tokens = [0] * run.n
        async with aclosing(conversation.deltas()) as stream:
            async for deltas in stream:
                for delta in deltas:
                    num_output_tokens[delta.index] += len(delta.token_ids)
                    if delta.is_empty and not delta.token_ids and delta.finish_reason is None:
                        continue
                    usage = _usage(run, num_output_tokens[delta.index])
                    yield message_delta_to_proto(delta, request_id=run.request_id, usage=usage)

    async def ChatUnary(self, request: inference_pb2.ChatRequest, context: Any) -> inference_pb2.ChatUnaryResponse:
        conversation = await self._conversation(request, context)
        run = conversation.run
        messages = [
            message_to_proto(message, request_id=run.request_id, usage=_usage(run, len(message.token_ids)))
            for message in await conversation.collect()
        ]
        return inference_pb2.ChatUnaryResponse(request_id=run.request_id, messages=messages)

    async def Abort(
        self, request: inference_pb2.AbortGenerationRequest, context: Any
    ) -> inference_pb2.AbortGenerationResponse:
        for request_id in request.request_ids:
            self._serving.abort(request_id)
        return inference_pb2.AbortGenerationResponse()

    async def Tokenize(self, request: inference_pb2.TokenizeRequest, context: Any) -> inference_pb2.TokenizeResponse:
        model = self._serving.model_named(request.model)
        body = tokenize_body_from_proto(request)
        try:
            token_ids = await token_ids_of(body, model=model, serving=self._serving)
        except PagodaError as error:
            raise renamed(error, {"prompt": "text"}) from error
        strings = [model.tokenizer.token_text(token) for token in token_ids] if request.return_token_strs else ()
        return inference_pb2.TokenizeResponse(
            token_ids=token_ids, token_strs=strings, max_model_len=model.max_model_len
        )

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Any
    ) -> inference_pb2.DetokenizeResponse:
        model = self._serving.model_named(request.model)
        check_token_ids(request.token_ids, vocab_size=model.vocab_size, field="token_ids")
        text = model.tokenizer.decode(list(request.token_ids), skip_special_tokens=request.skip_special_tokens)
        return inference_pb2.DetokenizeResponse(text=text)

    async def GetModelInfo(
        self, request: inference_pb2.GetModelInfoRequest, context: Any
    ) -> inference_pb2.GetModelInfoResponse:
        model = self._serving.model
        info = self._serving.engine.model_info
        return inference_pb2.GetModelInfoResponse(model_info=info, served_model_names=model.names)

    async def GetServerInfo(
        self, request: inference_pb2.GetServerInfoRequest, context: Any
    ) -> inference_pb2.GetServerInfoResponse:
        serving = self._serving
        uptime_s = time.monotonic() - serving.started_s
        return inference_pb2.GetServerInfoResponse(version=VERSION, uptime_s=uptime_s, load=serving.engine.load)

    async def _run(self, request: inference_pb2.GenerateRequest, context: Any) -> Run:
        serving = self._serving
        model = serving.model_named(request.model)
        params = sampling_params_of(
            request,
            defaults=model.defaults,
            vocab_size=model.vocab_size,
            max_logprobs=serving.config.max_logprobs,
        )
        await model.grammars.check(params.structured_outputs)
        check_cache_salt(request.cache_salt)
        prompt, field = await prompt_of(request, model.prompts)
        check_prompt_logprobs(params, num_prompt_tokens=len(prompt), vocab_size=model.vocab_size)
        params = fit_to_context(params, num_prompt_tokens=len(prompt), max_model_len=model.max_model_len, field=field)
        return Run(
            serving=serving,
            request_id=_request_id(request.request_id, "gen-"),
            prompts=[prompt],
            sampling_params=[params],
            terms=self._terms(context, request.priority),
            cache_salt=request.cache_salt,
        )

    async def _conversation(self, request: inference_pb2.ChatRequest, context: Any) -> Conversation:
        try:
            return await start_conversation(
                chat_body_from_proto(request),
                serving=self._serving,
                headers={},
                request_id=_request_id(request.request_id, "chat-"),
                terms=self._terms(context, request.priority),
            )
        except PagodaError as error:
            raise renamed(error, PROTO_NAMES) from error

    def _terms(self, context: Any, priority: int) -> Terms:
        headers = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        return Terms(
            tenant=tenant_of(headers, has_api_keys=bool(self._serving.config.api_key)),
            priority=priority,
            timeout_s=context.time_remaining() or 0.0,
        )


def _request_id(given: str, prefix: str) -> str:
    if len(given) > MAX_REQUEST_ID_CHARS:
        message = f"request_id has {len(given)} characters, at most {MAX_REQUEST_ID_CHARS} are allowed"
        raise InvalidRequest(message, field="request_id")
    return given or unique_id(prefix)


def _usage(run: Run, num_output_tokens: int) -> inference_pb2.Usage:
    return inference_pb2.Usage(
        num_prompt_tokens=run.num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        num_cached_tokens=run.num_cached_tokens,
    )

"""The public gRPC service: the same engine, prompts and limits as over HTTP, in protobuf."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from pagoda.v1 import inference_pb2, inference_pb2_grpc
from pagoda_frontend.convert import delta_to_proto, prompt_of, sampling_params_of, sequence_to_proto
from pagoda_frontend.params import check_cache_salt, check_token_ids, fit_to_context
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

    async def Abort(
        self, request: inference_pb2.AbortGenerationRequest, context: Any
    ) -> inference_pb2.AbortGenerationResponse:
        for request_id in request.request_ids:
            self._serving.abort(request_id)
        return inference_pb2.AbortGenerationResponse()

    async def Tokenize(self, request: inference_pb2.TokenizeRequest, context: Any) -> inference_pb2.TokenizeResponse:
        add_special_tokens = not request.HasField("add_special_tokens") or request.add_special_tokens
        prompts = self._serving.model.prompts
        token_ids = await prompts.from_text(request.text, add_special_tokens=add_special_tokens, field="text")
        return inference_pb2.TokenizeResponse(token_ids=token_ids)

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Any
    ) -> inference_pb2.DetokenizeResponse:
        model = self._serving.model
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
        check_cache_salt(request.cache_salt)
        prompt, field = await prompt_of(request, model.prompts)
        params = fit_to_context(params, num_prompt_tokens=len(prompt), max_model_len=model.max_model_len, field=field)
        headers = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        return Run(
            serving=serving,
            request_id=request.request_id or unique_id("gen-"),
            prompts=[prompt],
            sampling_params=[params],
            terms=Terms(
                tenant=tenant_of(headers, has_api_keys=bool(serving.config.api_key)),
                priority=request.priority,
                timeout_s=context.time_remaining() or 0.0,
            ),
            cache_salt=request.cache_salt,
        )

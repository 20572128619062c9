"""The public gRPC service of several models: routes each call to the servicer of its model."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from pagoda.v1 import inference_pb2, inference_pb2_grpc
from pagoda_common.metrics.engine_metrics import total_load
from pagoda_frontend.grpc.bounds import check_message
from pagoda_frontend.grpc.servicer import InferenceServicer, abort_each, tenant_of
from pagoda_frontend.serving.models import Models


class SharedServicer(inference_pb2_grpc.InferenceServicer):
    """pagoda.v1.Inference."""

    def __init__(self, *, models: Models, servicers: Sequence[InferenceServicer]) -> None:
        """`servicers`: those of `models`, in their order."""
        self._models = models
        self._servicers = servicers

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncGenerator[inference_pb2.GenerateResponse]:
        async with aclosing((await self._of_stream(request)).Generate(request, context)) as stream:
            async for response in stream:
                yield response

    async def GenerateUnary(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> inference_pb2.GenerateUnaryResponse:
        return await (await self._of(request)).GenerateUnary(request, context)

    async def Chat(
        self, request: inference_pb2.ChatRequest, context: Any
    ) -> AsyncGenerator[inference_pb2.ChatResponse]:
        async with aclosing((await self._of_stream(request)).Chat(request, context)) as stream:
            async for response in stream:
                yield response

    async def ChatUnary(self, request: inference_pb2.ChatRequest, context: Any) -> inference_pb2.ChatUnaryResponse:
        return await (await self._of(request)).ChatUnary(request, context)

    async def Embed(self, request: inference_pb2.EmbedRequest, context: Any) -> inference_pb2.EmbedResponse:
        return await (await self._of(request)).Embed(request, context)

    async def Pool(self, request: inference_pb2.PoolRequest, context: Any) -> inference_pb2.PoolResponse:
        return await (await self._of(request)).Pool(request, context)

    async def Classify(self, request: inference_pb2.ClassifyRequest, context: Any) -> inference_pb2.ClassifyResponse:
        return await (await self._of(request)).Classify(request, context)

    async def Score(self, request: inference_pb2.ScoreRequest, context: Any) -> inference_pb2.ScoreResponse:
        return await (await self._of(request)).Score(request, context)

    async def Rerank(self, request: inference_pb2.RerankRequest, context: Any) -> inference_pb2.RerankResponse:
        return await (await self._of(request)).Rerank(request, context)

    async def Abort(
        self, request: inference_pb2.AbortGenerationRequest, context: Any
    ) -> inference_pb2.AbortGenerationResponse:
        check_message(request)
        tenant = tenant_of(context, serving=self._models.first)
        abort_each(request.request_ids, self._models.servings, tenant=tenant)
        return inference_pb2.AbortGenerationResponse()

    async def Tokenize(self, request: inference_pb2.TokenizeRequest, context: Any) -> inference_pb2.TokenizeResponse:
        return await (await self._of(request)).Tokenize(request, context)

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Any
    ) -> inference_pb2.DetokenizeResponse:
        return await (await self._of(request)).Detokenize(request, context)

    async def GetModelInfo(
        self, request: inference_pb2.GetModelInfoRequest, context: Any
    ) -> inference_pb2.GetModelInfoResponse:
        return await (await self._of(request)).GetModelInfo(request, context)

    async def GetServerInfo(
        self, request: inference_pb2.GetServerInfoRequest, context: Any
    ) -> inference_pb2.GetServerInfoResponse:
        answers = [await servicer.GetServerInfo(request, context) for servicer in self._servicers]
        answers[0].load.CopyFrom(total_load([answer.load for answer in answers]))
        return answers[0]

    async def _of(self, request: Any) -> InferenceServicer:
        """The servicer of the model that `request` names."""
        self._models.first.begin_call()  # a drain waits for it
        try:
            serving = await self._models.named(request.model)
        finally:
            self._models.first.end_call()
        return self._servicers[self._models.servings.index(serving)]

    async def _of_stream(self, request: inference_pb2.GenerateRequest | inference_pb2.ChatRequest) -> InferenceServicer:
        """The same, or the servicer of the model whose stream `request` resumes."""
        if not request.HasField("resume_from") or request.model:
            return await self._of(request)
        serving = await self._models.holding(request.resume_from.request_id)
        return self._servicers[self._models.servings.index(serving)]

"""The public gRPC service: the same engine, prompts and limits as over HTTP, in protobuf."""

import base64
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeAlias, TypeVar

from google.protobuf.message import Message

from pagoda.v1 import inference_pb2, inference_pb2_grpc
from pagoda_common.engine.client import EngineClient
from pagoda_common.engine.convert import beam_search_params_from_proto
from pagoda_common.engine.stream import Known
from pagoda_common.errors import InvalidRequest, NotFound
from pagoda_common.version import VERSION
from pagoda_frontend.budget.caller import caller, current_hold, hold_more, host_of_peer, network_of
from pagoda_frontend.conversation.conversation import Conversation, start_conversation
from pagoda_frontend.conversation.template import token_ids_of, token_strings
from pagoda_frontend.grpc import pooling
from pagoda_frontend.grpc.bounds import check_message
from pagoda_frontend.grpc.convert import delta_to_proto, sampling_params_of, sequence_to_proto
from pagoda_frontend.grpc.convert_chat import (
    PROTO_NAMES,
    chat_body_from_proto,
    message_delta_to_proto,
    message_to_proto,
    prompt_of,
    tokenize_body_from_proto,
)
from pagoda_frontend.requests.call_context import (
    MAX_REQUEST_ID_CHARS,
    CallContext,
    begin_call,
    claimed_tenant,
    unique_id,
)
from pagoda_frontend.requests.choices import check_searchable
from pagoda_frontend.requests.errors import fields_named
from pagoda_frontend.requests.event_ids import Place
from pagoda_frontend.requests.params import check_cache_salt, check_token_ids
from pagoda_frontend.requests.resume import Resumption, resumption_at
from pagoda_frontend.requests.run import Run, start_run
from pagoda_frontend.serving.serving import Serving

MESSAGE_FACTOR = 4
"""Bytes in memory for each byte of a message."""
ANSWER_FACTOR = 2
"""Bytes of memory that a unary answer takes for each byte of its estimated size: as a message, and serialized."""
TOKEN_BYTES = 16
"""Bytes per token for estimating the size of an answer."""
SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
GENERATE, CHAT = f"{SERVICE}/Generate", f"{SERVICE}/Chat"
"""Calls whose streams can be resumed."""


Answer = TypeVar("Answer")
StartingCall: TypeAlias = (
    inference_pb2.GenerateRequest
    | inference_pb2.ChatRequest
    | inference_pb2.EmbedRequest
    | inference_pb2.PoolRequest
    | inference_pb2.ClassifyRequest
    | inference_pb2.ScoreRequest
    | inference_pb2.RerankRequest
)
"""Messages that start a request in the engine."""


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """pagoda.v1.Inference."""

    def __init__(self, *, serving: Serving, engine: EngineClient) -> None:
        """`engine`: the one that `serving` uses; its load and state are answered from here."""
        self._serving = serving
        self._engine = engine

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncGenerator[inference_pb2.GenerateResponse]:
        resumption = await self._resumption(request, context, GENERATE)
        if resumption is not None:
            request = inference_pb2.GenerateRequest.FromString(base64.b64decode(resumption.note["body"]))
        call = self._call(request, context, "gen-", resumption)
        call = await self._serving.work.prepare(lambda: call.noting(_encoded(request), path=GENERATE))
        run = await self._run(request, call)
        request_id, num_prompt_tokens = call.request_id, run.num_prompt_tokens
        try:
            async with aclosing(run.deltas()) as stream:
                async for deltas in stream:
                    for delta in deltas:
                        if not delta.is_replayed:
                            yield delta_to_proto(delta, request_id=request_id, num_prompt_tokens=num_prompt_tokens)
        finally:
            run.release()

    async def GenerateUnary(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> inference_pb2.GenerateUnaryResponse:
        _refuse_resume_from(request)
        run = await self._run(request, self._call(request, context, "gen-"))
        request_id, num_prompt_tokens = run.call.request_id, run.num_prompt_tokens
        sequences = await run.collect()

        def answer() -> inference_pb2.GenerateUnaryResponse:
            outputs = [
                sequence_to_proto(sequence, request_id=request_id, num_prompt_tokens=num_prompt_tokens)
                for sequence in sequences
            ]
            return inference_pb2.GenerateUnaryResponse(request_id=request_id, outputs=outputs)

        return await self._answered(answer, run)

    async def Chat(
        self, request: inference_pb2.ChatRequest, context: Any
    ) -> AsyncGenerator[inference_pb2.ChatResponse]:
        resumption = await self._resumption(request, context, CHAT)
        if resumption is not None:
            request = inference_pb2.ChatRequest.FromString(base64.b64decode(resumption.note["body"]))
        call = self._call(request, context, "chat-", resumption)
        call = await self._serving.work.prepare(lambda: call.noting(_encoded(request), path=CHAT))
        conversation = await self._conversation(request, call)
        run = conversation.run
        num_output_tokens = [0] * run.n
        try:
            async with aclosing(conversation.deltas()) as stream:
                async for deltas in stream:
                    for delta in deltas:
                        offset = num_output_tokens[delta.index]
                        num_output_tokens[delta.index] += len(delta.token_ids)
                        is_nothing = delta.is_empty and not delta.token_ids and delta.finish_reason is None
                        if is_nothing or delta.is_replayed:
                            continue
                        usage = _usage(run, num_output_tokens[delta.index])
                        yield message_delta_to_proto(delta, request_id=run.call.request_id, offset=offset, usage=usage)
        finally:
            run.release()

    async def ChatUnary(self, request: inference_pb2.ChatRequest, context: Any) -> inference_pb2.ChatUnaryResponse:
        _refuse_resume_from(request)
        conversation = await self._conversation(request, self._call(request, context, "chat-"))
        run = conversation.run
        request_id = run.call.request_id
        collected = await conversation.collect()

        def answer() -> inference_pb2.ChatUnaryResponse:
            messages = [
                message_to_proto(message, request_id=request_id, usage=_usage(run, len(message.token_ids)))
                for message in collected
            ]
            return inference_pb2.ChatUnaryResponse(request_id=request_id, messages=messages)

        return await self._answered(answer, run)

    async def Embed(self, request: inference_pb2.EmbedRequest, context: Any) -> inference_pb2.EmbedResponse:
        return await pooling.embed(request, self._call(request, context, "embd-"), serving=self._serving)

    async def Pool(self, request: inference_pb2.PoolRequest, context: Any) -> inference_pb2.PoolResponse:
        return await pooling.pool(request, self._call(request, context, "pool-"), serving=self._serving)

    async def Classify(self, request: inference_pb2.ClassifyRequest, context: Any) -> inference_pb2.ClassifyResponse:
        return await pooling.classify(request, self._call(request, context, "classify-"), serving=self._serving)

    async def Score(self, request: inference_pb2.ScoreRequest, context: Any) -> inference_pb2.ScoreResponse:
        return await pooling.score(request, self._call(request, context, "score-"), serving=self._serving)

    async def Rerank(self, request: inference_pb2.RerankRequest, context: Any) -> inference_pb2.RerankResponse:
        return await pooling.rerank(request, self._call(request, context, "rerank-"), serving=self._serving)

    async def Abort(
        self, request: inference_pb2.AbortGenerationRequest, context: Any
    ) -> inference_pb2.AbortGenerationResponse:
        check_message(request)
        abort_each(request.request_ids, (self._serving,), tenant=tenant_of(context, serving=self._serving))
        return inference_pb2.AbortGenerationResponse()

    async def Tokenize(self, request: inference_pb2.TokenizeRequest, context: Any) -> inference_pb2.TokenizeResponse:
        await self._serving.look_for(request.model)
        model, work = self._serving.model_named(request.model), self._serving.work
        self._hold(request, context)
        check_message(request)
        body = await work.prepare(lambda: tokenize_body_from_proto(request))
        with fields_named({"prompt": "text"}):
            token_ids = await token_ids_of(body, model=model, serving=self._serving)

        def answer() -> inference_pb2.TokenizeResponse:
            strings: Sequence[str] = ()
            if request.return_token_strs:
                strings = token_strings(token_ids, body, tokenizer=model.tokenizer)
            return inference_pb2.TokenizeResponse(
                token_ids=token_ids, token_strs=strings, max_model_len=model.max_model_len
            )

        return await work.run_sized(answer, num_bytes=TOKEN_BYTES * len(token_ids))

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Any
    ) -> inference_pb2.DetokenizeResponse:
        await self._serving.look_for(request.model)
        model = self._serving.model_named(request.model)
        self._hold(request, context)
        check_message(request)

        def answer() -> inference_pb2.DetokenizeResponse:
            check_token_ids(request.token_ids, vocab_size=model.vocab_size, field="token_ids")
            text = model.tokenizer.decode(request.token_ids, skip_special_tokens=request.skip_special_tokens)
            return inference_pb2.DetokenizeResponse(text=text)

        return await self._serving.work.run_sized(answer, num_bytes=TOKEN_BYTES * len(request.token_ids))

    async def GetModelInfo(
        self, request: inference_pb2.GetModelInfoRequest, context: Any
    ) -> inference_pb2.GetModelInfoResponse:
        model = self._serving.model_named(request.model)
        info = self._engine.model_info
        return inference_pb2.GetModelInfoResponse(model_info=info, served_model_names=model.names)

    async def GetServerInfo(
        self, request: inference_pb2.GetServerInfoRequest, context: Any
    ) -> inference_pb2.GetServerInfoResponse:
        uptime_s = time.monotonic() - self._serving.started_s
        return inference_pb2.GetServerInfoResponse(version=VERSION, uptime_s=uptime_s, load=self._engine.load)

    async def _run(self, request: inference_pb2.GenerateRequest, call: CallContext) -> Run:
        serving = self._serving
        await serving.look_for(request.model)
        model = serving.model_named(request.model)
        params = await serving.work.prepare(
            lambda: sampling_params_of(
                request,
                defaults=model.defaults,
                vocab_size=model.vocab_size,
                max_logprobs=serving.config.max_logprobs,
            )
        )
        params.structured_outputs = model.structured_outputs.applied_to(params.structured_outputs)
        beam_search = None
        if request.HasField("beam_search"):
            beam_search = beam_search_params_from_proto(request.beam_search, n=params.n)
            check_searchable(params, with_logprobs=params.logprobs is not None)
        await model.grammars.check(params.structured_outputs)
        check_cache_salt(request.cache_salt or None)
        prompt, field = await prompt_of(request, model.prompts)
        return start_run(
            call,
            serving=serving,
            model=model,
            prompts=[prompt],
            params=params,
            field=field,
            cache_salt=request.cache_salt,
            beam_search=beam_search,
        )

    async def _answered(self, make: Callable[[], Answer], run: Run) -> Answer:
        """The result of `make` for all outputs of `run`, on a thread where they are large; raises QueueFull."""
        hold_more(ANSWER_FACTOR * run.answer_bytes)
        return await run.on_thread(make, num_bytes=run.answer_bytes)

    async def _conversation(self, request: inference_pb2.ChatRequest, call: CallContext) -> Conversation:
        beam_search = None
        if request.HasField("beam_search"):
            beam_search = beam_search_params_from_proto(request.beam_search, n=max(1, request.sampling_params.n))
        with fields_named(PROTO_NAMES):
            body = await self._serving.work.prepare(lambda: chat_body_from_proto(request))
            return await start_conversation(body, call, serving=self._serving, beam_search=beam_search)

    async def _resumption(
        self, request: inference_pb2.GenerateRequest | inference_pb2.ChatRequest, context: Any, path: str
    ) -> Resumption | None:
        """The stream that `request` resumes; None if it is a new one."""
        if not request.HasField("resume_from"):
            return None
        asked = request.resume_from
        known = tuple(Known(one.num_tokens, one.is_finished) for one in asked.received)
        place = Place(key=asked.request_id, known=known, field="resume_from")
        return await resumption_at(place, engine=self._serving.engine, path=path, tenant=self._tenant(context))

    def _call(
        self,
        request: StartingCall,
        context: Any,
        prefix: str,
        resumption: Resumption | None = None,
    ) -> CallContext:
        """The context of a call, which a drain waits for from here on. Its id is that of the resumed stream, else the
        client's, else a new one."""
        self._serving.begin_call()
        context.add_done_callback(lambda _: self._serving.end_call())
        self._hold(request, context)
        check_message(request)
        tenant, given = self._tenant(context), request.request_id
        if resumption is None and len(given) > MAX_REQUEST_ID_CHARS:
            message = f"request_id has {len(given)} characters, at most {MAX_REQUEST_ID_CHARS} are allowed"
            raise InvalidRequest(message, field="request_id")
        if resumption is None and given and self._serving.is_open(given, tenant=tenant):
            raise InvalidRequest(f"request_id {given!r} is in use", field="request_id")
        return begin_call(
            given or unique_id(prefix),
            created=int(time.time()),
            tenant=tenant,
            priority=request.priority,
            timeout_s=context.time_remaining() or 0.0,
            resumption=resumption,
        )

    def _hold(self, request: Message, context: Any) -> None:
        """Count what the message holds until the request is admitted or over."""
        hold = self._serving.held_memory.begin()
        peer = host_of_peer(str(context.peer() or ""))
        name = self._tenant(context) if self._serving.has_api_keys else network_of(peer)
        caller.set(name)
        current_hold.set(hold)
        hold.owner = name
        context.add_done_callback(lambda _: hold.end())
        hold.add(MESSAGE_FACTOR * request.ByteSize())

    def _tenant(self, context: Any) -> str:
        return tenant_of(context, serving=self._serving)


def tenant_of(context: Any, *, serving: Serving) -> str:
    """The caller: the accepted key, found in the same way as in the port's access check."""
    metadata = context.invocation_metadata() or ()
    if not serving.has_api_keys:
        return claimed_tenant({key: value for key, value in metadata if isinstance(value, str)})
    accepted = serving.api_keys.accepted(metadata)
    assert accepted is not None, "the guard has let the call in"
    return accepted


def abort_each(request_ids: Sequence[str], servings: Sequence[Serving], *, tenant: str) -> None:
    """Abort requests of `tenant`; raises NotFound when one of them is not open at this frontend."""
    unknown = [one for one in request_ids if not sum(serving.abort(one, tenant=tenant) for serving in servings)]
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        message = f"request {unknown[0][:MAX_REQUEST_ID_CHARS]!r}{more} is not open at this frontend"
        raise NotFound(message, field="request_ids")


def _encoded(request: Message) -> str:
    """`request` as a note holds it."""
    return base64.b64encode(request.SerializeToString()).decode()


def _refuse_resume_from(request: inference_pb2.GenerateRequest | inference_pb2.ChatRequest) -> None:
    if request.HasField("resume_from"):
        raise InvalidRequest("resume_from needs a streaming call, this call is unary", field="resume_from")


def _usage(run: Run, num_output_tokens: int) -> inference_pb2.Usage:
    return inference_pb2.Usage(
        num_prompt_tokens=run.num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        num_cached_tokens=run.num_cached_tokens,
    )

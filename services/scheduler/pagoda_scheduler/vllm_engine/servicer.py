"""vllm.grpc.engine.VllmEngine over the engine, for the smg gateway and llm-d's endpoint picker."""

import secrets
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import grpc.aio
import numpy as np
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from pagoda.v1 import scheduler_pb2, types_pb2
from pagoda_common.config.checkpoint.model_files import resolve_model
from pagoda_common.engine.convert import token_ids_to_bytes
from pagoda_common.errors import Code, InvalidRequest, NotReady, PagodaError
from pagoda_common.version import VERSION
from pagoda_scheduler.engine.engine import Engine
from pagoda_scheduler.rpc.convert_requests import requests_from_proto
from pagoda_scheduler.rpc.scheduler_state import SchedulerState
from pagoda_scheduler.rpc.sinks import GenerateSink
from pagoda_scheduler.vllm_engine.events import stream_events
from pagoda_scheduler.vllm_engine.requests import submit_from_vllm
from pagoda_scheduler.vllm_engine.sink import VllmEngineSink
from pagoda_scheduler.vllm_engine.tokenizer_files import tokenizer_archive

CHUNK_BYTES = 1 << 20


class VllmEngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]  # generated without types
    """VllmEngine; requests are converted to Pagoda's and share the engine with all other clients."""

    def __init__(self, *, engine: Engine, state: SchedulerState) -> None:
        self._engine = engine
        self._state = state
        self._started_at = time.monotonic()
        self._last_receive = 0.0
        self._num_samples = 0

    async def Generate(
        self, request: vllm_engine_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[vllm_engine_pb2.GenerateResponse]:
        """One request; it is freed when it ends or the caller disconnects."""
        self._last_receive = time.time()
        model = self._model()
        message = submit_from_vllm(request)
        message.request_id = self._unused_id(message.request_id)
        params = message.sampling_params
        sink = VllmEngineSink(
            num_sequences=params.n,
            streams=request.stream,
            num_logprobs=params.logprobs if params.HasField("logprobs") else None,
            takes_prompt=params.HasField("prompt_logprobs"),
            on_room=self._engine.unpark,
        )
        message.eos_token_ids.extend(model.eos_token_ids)
        sequences = requests_from_proto(message, sink=sink, config=self._engine.config, model_info=model)
        self._engine.sinks.add(sink)
        try:
            self._engine.submit(sequences, timeout_s=context.time_remaining() or 0.0)
            async for response in sink.outbox:
                yield response
        finally:
            self._engine.close_sink(sink)

    async def Embed(self, request: vllm_engine_pb2.EmbedRequest, context: Any) -> vllm_engine_pb2.EmbedResponse:
        """The prompt's embedding, as vLLM gives it for a decoder: of its last token, normalised."""
        self._last_receive = time.time()
        model = self._model()
        if not request.tokenized.input_ids:
            text = "tokenized must have token ids (input_ids), this service has no tokenizer"
            raise InvalidRequest(text, field="tokenized")
        submitted = scheduler_pb2.SubmitRequest(
            request_id=self._unused_id(request.request_id),
            prompt_token_ids=token_ids_to_bytes(request.tokenized.input_ids),
        )
        submitted.pooling.SetInParent()
        sink = GenerateSink(num_sequences=1, on_room=self._engine.unpark)
        sequences = requests_from_proto(submitted, sink=sink, config=self._engine.config, model_info=model)
        self._engine.sinks.add(sink)
        try:
            self._engine.submit(sequences, timeout_s=context.time_remaining() or 0.0)
            async for output in sink.outbox:
                embedding = np.frombuffer(output.embedding, dtype="<f4")
        finally:
            self._engine.close_sink(sink)
        if not embedding.size:  # it has ended without a failure
            raise PagodaError("the request was aborted", code=Code.CANCELLED)
        return vllm_engine_pb2.EmbedResponse(
            embedding=embedding, prompt_tokens=len(request.tokenized.input_ids), embedding_dim=embedding.size
        )

    def _unused_id(self, request_id: str) -> str:
        request_id = request_id or f"vllm-{secrets.token_hex(8)}"
        if request_id in self._engine.requests:
            raise InvalidRequest(f"request_id {request_id!r} is in use", field="request_id")
        return request_id

    async def HealthCheck(
        self, request: vllm_engine_pb2.HealthCheckRequest, context: Any
    ) -> vllm_engine_pb2.HealthCheckResponse:
        """Whether a group serves.

        Raises:
            NotReady: no model is known yet, so that a gateway waits.
        """
        self._model()
        is_ready = self._engine.is_ready
        message = "serving" if is_ready else self._engine.not_ready_reason
        return vllm_engine_pb2.HealthCheckResponse(healthy=is_ready, message=message)

    async def Abort(self, request: vllm_engine_pb2.AbortRequest, context: Any) -> vllm_engine_pb2.AbortResponse:
        """End requests by id."""
        self._engine.abort(request.request_ids)
        return vllm_engine_pb2.AbortResponse()

    async def GetModelInfo(
        self, request: vllm_engine_pb2.GetModelInfoRequest, context: Any
    ) -> vllm_engine_pb2.GetModelInfoResponse:
        """The loaded model."""
        model, config = self._model(), self._engine.config.model
        path = str(resolve_model(config.model))
        return vllm_engine_pb2.GetModelInfoResponse(
            model_path=path,
            is_generation=True,
            max_context_length=model.max_model_len,
            vocab_size=model.vocab_size,
            served_model_name=next(iter(config.served_model_name), config.model),
            tokenizer_path=config.tokenizer or path,
            model_type=model.architecture.removesuffix("ForCausalLM").lower(),
            architectures=[model.architecture],
            eos_token_ids=model.eos_token_ids,
            max_req_input_len=model.max_model_len - 1,
        )

    async def GetServerInfo(
        self, request: vllm_engine_pb2.GetServerInfoRequest, context: Any
    ) -> vllm_engine_pb2.GetServerInfoResponse:
        """Facts about this process for routers."""
        config, model = self._engine.config, self._state.model_info
        return vllm_engine_pb2.GetServerInfoResponse(
            active_requests=len(self._engine.requests),
            is_paused=not self._engine.is_ready,
            last_receive_timestamp=self._last_receive,
            uptime_seconds=time.monotonic() - self._started_at,
            server_type="vllm-grpc",
            data_parallel_size=1,  # groups are routed here, not by the caller
            kv_cache_dtype=config.cache.kv_cache_dtype,
            block_size=config.cache.block_size,
            model_dtype=model.dtype if model is not None else "",
            max_num_seqs=config.scheduler.max_num_seqs,
        )

    async def GetLoads(
        self, request: vllm_engine_pb2.GetLoadsRequest, context: Any
    ) -> vllm_engine_pb2.GetLoadsResponse:
        """The current load of all groups together."""
        response = vllm_engine_pb2.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(), version=VERSION, dp_rank_count=1
        )
        if not request.HasField("dp_rank") or request.dp_rank == 0:
            load = self._state.load()
            queries = load.prefix_cache_queries
            response.loads.add(
                num_running_reqs=load.num_running_reqs,
                num_waiting_reqs=load.num_waiting_reqs,
                num_total_reqs=load.num_running_reqs + load.num_waiting_reqs,
                num_used_tokens=load.num_used_blocks * load.block_size,
                max_total_num_tokens=load.num_total_blocks * load.block_size,
                token_usage=_share(load.num_used_blocks, load.num_total_blocks),
                cache_hit_rate=_share(load.prefix_cache_hits, queries),
                utilization=_share(load.num_running_reqs, self._max_running(load)),
                max_running_requests=self._max_running(load),
            )
        return response

    async def FlushCache(self, request: common_pb2.FlushCacheRequest, context: Any) -> common_pb2.FlushCacheResponse:
        """Drop every cached prefix; requests continue."""
        count = sum(core.scheduler.kv.reset_cache() for core in self._engine.cores)
        return common_pb2.FlushCacheResponse(success=True, message=f"{count} blocks forgotten")

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: Any
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        """The tokenizer's files as a zip archive."""
        config = self._engine.config.model
        archive, digest = tokenizer_archive(config.tokenizer or config.model)
        for start in range(0, len(archive), CHUNK_BYTES):
            is_last = start + CHUNK_BYTES >= len(archive)
            data = archive[start : start + CHUNK_BYTES]
            yield common_pb2.GetTokenizerChunk(data=data, sha256=digest if is_last else "")

    async def SubscribeKvEvents(
        self, request: common_pb2.SubscribeKvEventsRequest, context: Any
    ) -> AsyncIterator[common_pb2.KvEventBatch]:
        """Blocks that the prefix caches store and drop, and the load."""
        log = self._engine.kv_events
        if log is None:
            advice = """start the scheduler with --kv-events-config '{"enable_kv_cache_events": true}'"""
            raise PagodaError(f"KV cache events are off: {advice}", code=Code.UNIMPLEMENTED)
        await context.send_initial_metadata(())  # a gateway subscribes again after silence
        async for batch in stream_events(
            log,
            start=request.start_sequence_number,
            before_first=request.load_records_before_first_batch,
            block_size=self._engine.config.cache.block_size,
            load=self._load_record,
        ):
            yield batch

    def _model(self) -> types_pb2.ModelInfo:
        model = self._state.model_info
        if model is None:
            raise NotReady(f"not ready: {self._engine.not_ready_reason}", retry_after_s=1)
        return model

    def _load_record(self) -> common_pb2.EngineLoad:
        load = self._state.load()
        self._num_samples += 1
        record = common_pb2.EngineLoad(
            running_requests=load.num_running_reqs,
            waiting_requests=load.num_waiting_reqs,
            token_usage=_share(load.num_used_blocks, load.num_total_blocks),
            max_running_requests=self._max_running(load),
            sample=self._num_samples,
            cache_hit_rate=_share(load.prefix_cache_hits, load.prefix_cache_queries),
            num_used_tokens=load.num_used_blocks * load.block_size,
            max_total_num_tokens=load.num_total_blocks * load.block_size,
            engine_reports_steps=True,
        )
        if load.num_running_reqs or load.num_waiting_reqs:
            record.engine_silence_ms = load.silence_ms
        return record

    def _max_running(self, load: types_pb2.EngineLoad) -> int:
        return self._engine.config.scheduler.max_num_seqs * max(1, load.num_groups)


def add_vllm_engine(server: grpc.aio.Server, *, engine: Engine, state: SchedulerState) -> None:
    """Serve VllmEngine on `server`."""
    servicer = VllmEngineServicer(engine=engine, state=state)
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(servicer, server)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0

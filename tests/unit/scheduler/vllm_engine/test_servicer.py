"""VllmEngineServicer without a server: every field of its answers to a gateway, and the requests that it makes."""

import asyncio
from typing import Any

import pytest

pytest.importorskip("smg_grpc_proto")

from smg_grpc_proto import vllm_engine_pb2
from smg_grpc_proto.generated import common_pb2

from pagoda.v1 import types_pb2
from pagoda_common.config.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pagoda_common.errors import Code, InvalidRequest, NotReady, PagodaError
from pagoda_common.version import VERSION
from pagoda_scheduler.core.step import ModelRunnerOutput
from pagoda_scheduler.engine.engine import Engine
from pagoda_scheduler.engine.engine_core import EngineCore
from pagoda_scheduler.engine.load import Counters, Load
from pagoda_scheduler.groups.worker_groups import WorkerGroups
from pagoda_scheduler.kv.cache_group import CacheSizes
from pagoda_scheduler.kv.kv_events import KVEventLog
from pagoda_scheduler.rpc.scheduler_state import SchedulerState
from pagoda_scheduler.vllm_engine import servicer as module
from pagoda_scheduler.vllm_engine.servicer import VllmEngineServicer
from tests.unit.scheduler.engine.test_engine_core import Group, answer
from tests.unit.scheduler.rpc.test_scheduler_servicer import Context

INFO = types_pb2.ModelInfo(
    model="m",
    architecture="Qwen3ForCausalLM",
    dtype="bfloat16",
    max_model_len=64,
    vocab_size=1000,
    eos_token_ids=[7, 8],
    embedding_size=2,
)
LOAD = Load(
    num_running_reqs=3,
    num_waiting_reqs=5,
    num_used_blocks=20,
    num_total_blocks=50,
    silence_ms=9,
    num_groups=2,
    counters=Counters(prefix_cache_queries=40, prefix_cache_hits=10),
)


class Stack:
    """The servicer over an engine, with one group."""

    def __init__(self, *, model: types_pb2.ModelInfo | None = INFO, has_group: bool = True, **config: Any) -> None:
        config.setdefault("cache", CacheConfig(block_size=4))
        config.setdefault("scheduler", SchedulerConfig(max_num_seqs=8))
        self.config = EngineConfig(**config)
        self.engine = Engine(config=self.config)
        groups = WorkerGroups(config=self.config, engine=self.engine, session_epoch=7)
        groups.model_info = model
        state = SchedulerState(session_epoch=7, engine=self.engine, groups=groups)
        self.servicer = VllmEngineServicer(engine=self.engine, state=state)
        self.group = Group()
        self.core = EngineCore(
            config=self.config,
            executor=self.group,
            sizes=CacheSizes(50),
            max_model_len=64,
            vocab_size=1000,
            deliver=self.engine.deliver,
        )
        if has_group:
            self.engine.add_core(self.core)

    async def settle(self) -> None:
        """Let tasks run, and the group answer one step."""
        for _ in range(5):
            await asyncio.sleep(0)
        self.core.step()


def generate(name: str = "a", **more: Any) -> vllm_engine_pb2.GenerateRequest:
    params = vllm_engine_pb2.SamplingParams(max_tokens=2, n=1, **more.pop("params", {}))
    return vllm_engine_pb2.GenerateRequest(
        request_id=name,
        tokenized=vllm_engine_pb2.TokenizedInput(input_ids=[1, 2, 3, 4, 5]),
        sampling_params=params,
        **more,
    )


@pytest.mark.parametrize("streams", [True, False])
async def test_a_request_is_computed_with_the_models_end_tokens_and_forgotten(streams: bool) -> None:
    stack = Stack()
    stream = aiter(stack.servicer.Generate(generate(stream=streams), Context(6.0)))
    first = asyncio.ensure_future(anext(stream))
    await stack.settle()
    open_request = stack.engine.requests["a"]
    assert open_request.sequences[0].eos_token_ids == (7, 8)
    assert [entry[3] for entry in stack.engine._open._deadlines._heap] == [6.0]
    for number, token in enumerate((30, 31)):
        output = answer(stack.group.sent[number], token=token)
        stack.core._note_answer(output)
        stack.core.step(output)
    responses = [await first] + [response async for response in stream]
    chunks = [response.chunk for response in responses if response.HasField("chunk")]
    assert [list(chunk.token_ids) for chunk in chunks] == ([[30], [31]] if streams else [])
    assert list(responses[-1].complete.output_ids) == [30, 31]
    assert (stack.engine.requests, stack.engine.sinks) == ({}, set())


async def test_an_id_that_is_in_use_is_refused_and_one_that_is_missing_is_made() -> None:
    stack = Stack()
    first = asyncio.ensure_future(anext(aiter(stack.servicer.Generate(generate(), Context()))))
    nameless = asyncio.ensure_future(anext(aiter(stack.servicer.Generate(generate(""), Context()))))
    await stack.settle()
    with pytest.raises(InvalidRequest, match="request_id 'a' is in use"):
        await anext(aiter(stack.servicer.Generate(generate(), Context())))
    embed = vllm_engine_pb2.EmbedRequest(request_id="a", tokenized=vllm_engine_pb2.TokenizedInput(input_ids=[1]))
    with pytest.raises(InvalidRequest, match="request_id 'a' is in use"):
        await stack.servicer.Embed(embed, Context())
    named, made = stack.engine.requests
    assert (named, made[:5], len(made)) == ("a", "vllm-", 21)
    for task in (first, nameless):
        task.cancel()
    await asyncio.wait([first, nameless])
    assert stack.engine.requests == {}


async def test_an_embedding_is_of_the_whole_prompt() -> None:
    stack = Stack()
    request = vllm_engine_pb2.EmbedRequest(tokenized=vllm_engine_pb2.TokenizedInput(input_ids=[1, 2, 3]))
    embedding = asyncio.ensure_future(stack.servicer.Embed(request, Context(4.0)))
    await stack.settle()
    assert [entry[3] for entry in stack.engine._open._deadlines._heap] == [4.0]
    slot = stack.group.sent[0].slots[0]
    values = b"\0\0\x80?\0\0\0@"
    output = ModelRunnerOutput(1, [0], [], pooled={slot: values})
    stack.core._note_answer(output)
    stack.core.step(output)
    answered = await embedding
    assert (list(answered.embedding), answered.prompt_tokens, answered.embedding_dim) == ([1.0, 2.0], 3, 2)
    assert (stack.engine.requests, stack.engine.sinks) == ({}, set())


async def test_an_embedding_that_was_aborted_is_cancelled() -> None:
    stack = Stack()
    request = vllm_engine_pb2.EmbedRequest(request_id="e", tokenized=vllm_engine_pb2.TokenizedInput(input_ids=[1, 2]))
    embedding = asyncio.ensure_future(stack.servicer.Embed(request, Context()))
    await stack.settle()
    await stack.servicer.Abort(vllm_engine_pb2.AbortRequest(request_ids=["e"]), Context())
    with pytest.raises(PagodaError, match="the request was aborted") as caught:
        await embedding
    assert caught.value.code is Code.CANCELLED
    nothing = vllm_engine_pb2.EmbedRequest(request_id="e")
    with pytest.raises(InvalidRequest, match="tokenized must have token ids"):
        await stack.servicer.Embed(nothing, Context())


async def test_nothing_is_there_before_a_model_is_known() -> None:
    stack = Stack(model=None, has_group=False)
    calls = (
        stack.servicer.HealthCheck(vllm_engine_pb2.HealthCheckRequest(), Context()),
        stack.servicer.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest(), Context()),
        stack.servicer.Embed(vllm_engine_pb2.EmbedRequest(), Context()),
        anext(aiter(stack.servicer.Generate(generate(), Context()))),
    )
    for call in calls:
        with pytest.raises(NotReady, match="not ready: no worker has registered yet") as caught:
            await call
        assert caught.value.retry_after_s == 1
    info = await stack.servicer.GetServerInfo(vllm_engine_pb2.GetServerInfoRequest(), Context())
    assert (info.model_dtype, info.is_paused) == ("", True)


async def test_health_is_whether_a_group_serves() -> None:
    stack = Stack()
    health = await stack.servicer.HealthCheck(vllm_engine_pb2.HealthCheckRequest(), Context())
    assert (health.healthy, health.message) == (True, "serving")
    stack.engine.remove_core(stack.core, "the worker is gone")
    health = await stack.servicer.HealthCheck(vllm_engine_pb2.HealthCheckRequest(), Context())
    assert (health.healthy, health.message) == (False, "the worker is gone")


@pytest.mark.parametrize(
    ("model", "name", "tokenizer"),
    [
        (ModelConfig(model="/models/m"), "/models/m", "/models/m"),
        (ModelConfig(model="/models/m", served_model_name=("one", "two"), tokenizer="/t"), "one", "/t"),
    ],
)
async def test_every_fact_of_the_model_is_told(
    model: ModelConfig, name: str, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "resolve_model", lambda path: path)
    info = await _servicer_of(model).GetModelInfo(vllm_engine_pb2.GetModelInfoRequest(), Context())
    assert (info.model_path, info.served_model_name, info.tokenizer_path) == ("/models/m", name, tokenizer)
    assert (info.max_context_length, info.max_req_input_len, info.vocab_size) == (64, 63, 1000)
    assert (info.model_type, list(info.architectures), list(info.eos_token_ids)) == (
        "qwen3",
        ["Qwen3ForCausalLM"],
        [7, 8],
    )
    assert info.is_generation


def _servicer_of(model: ModelConfig) -> VllmEngineServicer:
    config = EngineConfig(model=model)
    engine = Engine(config=config)
    groups = WorkerGroups(config=config, engine=engine, session_epoch=7)
    groups.model_info = INFO
    return VllmEngineServicer(engine=engine, state=SchedulerState(session_epoch=7, engine=engine, groups=groups))


async def test_every_fact_of_the_process_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"monotonic": 100.0, "time": 5000.0}
    for name in clock:
        monkeypatch.setattr(module.time, name, lambda name=name: clock[name])
    stack = Stack(cache=CacheConfig(block_size=4, kv_cache_dtype="int8"))
    request = vllm_engine_pb2.GetServerInfoRequest()
    info = await stack.servicer.GetServerInfo(request, Context())
    assert (info.last_receive_timestamp, info.uptime_seconds, info.active_requests) == (0.0, 0.0, 0)
    clock["monotonic"] = 112.5
    waiting = asyncio.ensure_future(anext(aiter(stack.servicer.Generate(generate(), Context()))))
    await asyncio.sleep(0)
    info = await stack.servicer.GetServerInfo(request, Context())
    assert (info.last_receive_timestamp, info.uptime_seconds, info.active_requests) == (5000.0, 12.5, 1)
    assert (info.is_paused, info.server_type, info.data_parallel_size) == (False, "vllm-grpc", 1)
    assert (info.kv_cache_dtype, info.block_size, info.model_dtype, info.max_num_seqs) == ("int8", 4, "bfloat16", 8)
    waiting.cancel()
    await asyncio.wait([waiting])
    clock["time"] = 6000.0
    with pytest.raises(InvalidRequest):
        await stack.servicer.Embed(vllm_engine_pb2.EmbedRequest(), Context())
    info = await stack.servicer.GetServerInfo(request, Context())
    assert info.last_receive_timestamp == 6000.0


async def test_every_part_of_the_load_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = Stack()
    monkeypatch.setattr(stack.engine, "load", lambda: LOAD)
    answered = await stack.servicer.GetLoads(vllm_engine_pb2.GetLoadsRequest(), Context())
    assert (answered.version, answered.dp_rank_count) == (VERSION, 1)
    (load,) = answered.loads
    assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (3, 5, 8)
    assert (load.num_used_tokens, load.max_total_num_tokens) == (80, 200)
    assert (load.token_usage, load.cache_hit_rate) == (pytest.approx(0.4), pytest.approx(0.25))
    assert (load.max_running_requests, load.utilization) == (16, pytest.approx(3 / 16))
    for rank, count in ((0, 1), (1, 0)):
        answered = await stack.servicer.GetLoads(vllm_engine_pb2.GetLoadsRequest(dp_rank=rank), Context())
        assert (len(answered.loads), answered.dp_rank_count) == (count, 1)


async def test_the_load_beside_events_says_how_long_a_busy_engine_was_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = Stack()
    monkeypatch.setattr(stack.engine, "load", lambda: LOAD)
    for sample in (1, 2):
        record = stack.servicer._load_record()
        assert (record.running_requests, record.waiting_requests, record.sample) == (3, 5, sample)
        assert (record.num_used_tokens, record.max_total_num_tokens, record.max_running_requests) == (80, 200, 16)
        assert (record.token_usage, record.cache_hit_rate) == (pytest.approx(0.4), pytest.approx(0.25))
        assert (record.engine_silence_ms, record.engine_reports_steps) == (9, True)
    for running, waiting, is_told in ((0, 0, False), (1, 0, True), (0, 1, True)):
        idle = Load(running, waiting, 0, 0, 9, 0)
        monkeypatch.setattr(stack.engine, "load", lambda idle=idle: idle)
        record = stack.servicer._load_record()
        assert record.HasField("engine_silence_ms") is is_told
        assert (record.token_usage, record.cache_hit_rate, record.max_running_requests) == (0.0, 0.0, 8)


async def test_cached_blocks_are_forgotten() -> None:
    stack = Stack()
    waiting = asyncio.ensure_future(anext(aiter(stack.servicer.Generate(generate(), Context()))))
    await stack.settle()
    flushed = await stack.servicer.FlushCache(common_pb2.FlushCacheRequest(), Context())
    assert (flushed.success, flushed.message) == (True, "1 blocks forgotten")
    waiting.cancel()
    await asyncio.wait([waiting])


@pytest.mark.parametrize(("size", "sizes"), [(3, [3]), (4, [4]), (5, [4, 1]), (8, [4, 4])])
async def test_an_archive_comes_in_chunks_and_its_digest_with_the_last(
    size: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert module.CHUNK_BYTES == 1 << 20
    monkeypatch.setattr(module, "CHUNK_BYTES", 4)
    asked: list[str] = []
    monkeypatch.setattr(module, "tokenizer_archive", lambda name: asked.append(name) or (b"x" * size, "digest"))
    servicer = _servicer_of(ModelConfig(model="/m", tokenizer="/t"))
    chunks = [chunk async for chunk in servicer.GetTokenizer(common_pb2.GetTokenizerRequest(), Context())]
    assert [len(chunk.data) for chunk in chunks] == sizes
    assert [chunk.sha256 for chunk in chunks] == [""] * (len(sizes) - 1) + ["digest"]
    _ = [chunk async for chunk in _servicer_of(ModelConfig(model="/m")).GetTokenizer(None, Context())]
    assert asked == ["/t", "/m"]


async def test_events_that_are_off_say_how_they_are_turned_on() -> None:
    stack = Stack()
    with pytest.raises(PagodaError, match="KV cache events are off: start the scheduler with") as caught:
        await anext(aiter(stack.servicer.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), Context())))
    assert caught.value.code is Code.UNIMPLEMENTED


async def test_events_are_those_of_the_log_from_where_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []

    async def stream(log: KVEventLog, **more: Any) -> Any:
        given.append({"log": log, **more})
        yield common_pb2.KvEventBatch(sequence_number=4)

    monkeypatch.setattr(module, "stream_events", stream)
    told: list[object] = []

    class Call(Context):
        async def send_initial_metadata(self, metadata: object) -> None:
            told.append(metadata)

    stack = Stack()
    stack.engine.kv_events = log = KVEventLog()
    request = common_pb2.SubscribeKvEventsRequest(start_sequence_number=3, load_records_before_first_batch=True)
    batches = [batch async for batch in stack.servicer.SubscribeKvEvents(request, Call())]
    assert ([batch.sequence_number for batch in batches], told) == ([4], [()])
    load = stack.servicer._load_record
    assert given == [{"log": log, "start": 3, "before_first": True, "block_size": 4, "load": load}]

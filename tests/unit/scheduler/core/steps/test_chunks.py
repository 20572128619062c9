"""Steps become smaller where they are slow and others decode, and full again where they are not."""

from pagoda_common.config.engine_config import CacheConfig, SchedulerConfig
from pagoda_common.params.pooling_params import PoolingParams
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_scheduler.core.chunks import MIN_TOKENS, TARGET_NS, Chunks
from pagoda_scheduler.core.request import Request
from pagoda_scheduler.core.scheduler import Scheduler
from pagoda_scheduler.core.step import ModelRunnerOutput, StepTimings
from pagoda_scheduler.kv.cache_group import CacheSizes
from tests.unit.scheduler.stories import make_request

MAX_TOKENS = 2048
MS = 1_000_000


def decoding(name: str = "a") -> Request:
    request = make_request(name, 5)
    request.num_computed_tokens = 5
    return request


def make_chunks(**fields: object) -> Chunks:
    return Chunks(config=SchedulerConfig(max_num_batched_tokens=MAX_TOKENS, **fields))  # type: ignore[arg-type]  # any


def test_steps_shrink_to_their_target_and_grow_again() -> None:
    chunks, running = make_chunks(), [decoding()]
    assert chunks.budget(running) == MAX_TOKENS
    chunks.took(1000, 100 * MS)
    assert chunks.budget(running) == MAX_TOKENS, "a full step takes 205 ms"
    chunks.took(1000, 300 * MS)  # 0.2 ms a token now
    assert chunks.budget(running) == 1 + TARGET_NS // (MS // 5)
    for _ in range(20):
        chunks.took(1000, 2000 * MS)
    assert chunks.budget(running) == 1 + MIN_TOKENS
    for _ in range(40):
        chunks.took(1000, 50 * MS)
    assert chunks.budget(running) == MAX_TOKENS


def test_small_steps_and_those_without_a_time_tell_nothing() -> None:
    chunks = make_chunks()
    chunks.took(MIN_TOKENS // 2 - 1, 10_000 * MS)
    chunks.took(MAX_TOKENS, 0)
    assert chunks.budget([decoding()]) == MAX_TOKENS


def test_only_sequences_that_decode_are_spared() -> None:
    chunks = make_chunks()
    chunks.took(1000, 5000 * MS)
    pooled, last = decoding("pooled"), decoding("last")
    pooled.pooling = PoolingParams(task="embed")
    last.max_num_tokens = last.num_tokens
    assert chunks.budget([make_request("prompt", 30), pooled, last]) == MAX_TOKENS
    assert chunks.budget([make_request("prompt", 30), decoding("a"), decoding("b")]) == MIN_TOKENS + 2


def test_prompts_that_cannot_be_cut_are_never_held_back() -> None:
    chunks = make_chunks(enable_chunked_prefill=False)
    chunks.took(1000, 5000 * MS)
    assert chunks.budget([decoding()]) == MAX_TOKENS


def test_a_small_configured_step_stays_what_it_is() -> None:
    chunks = Chunks(config=SchedulerConfig(max_num_batched_tokens=300))
    chunks.took(300, 5000 * MS)
    assert chunks.budget([decoding()]) == 300


def test_long_prompts_come_in_smaller_steps_beside_a_stream_on_a_slow_device() -> None:
    scheduler = Scheduler(
        config=SchedulerConfig(max_num_batched_tokens=MAX_TOKENS),
        cache=CacheConfig(block_size=16),
        sizes=CacheSizes(1000),
        max_model_len=4096,
    )
    params = SamplingParams(temperature=0, max_tokens=50)
    for name, length in (("stream", 8), ("long", 4000)):
        scheduler.add(
            Request(request_id=name, prompt_token_ids=list(range(length)), sampling_params=params, max_model_len=4096)
        )
    sizes = []
    for _ in range(5):
        output = scheduler.schedule()
        assert output is not None
        sizes.append(output.num_tokens)
        timings = StepTimings(forward_ns=output.num_tokens * MS)
        num_sampled = [1, int(sum(sizes) == 4008 + 4)]
        answer = ModelRunnerOutput(output.step, num_sampled, [7] * sum(num_sampled), timings=timings)
        scheduler.update(answer)
    assert sizes == [MAX_TOKENS, MIN_TOKENS + 1, MIN_TOKENS + 1, MIN_TOKENS + 1, 4009 - MAX_TOKENS - 3 * MIN_TOKENS]

"""LLMEngine in front of a fake scheduler: requests come and go between steps, errors name their request's fault."""

import asyncio
from collections.abc import Iterator

import pytest

from pagoda import LLM, AsyncEngineArgs, AsyncLLM, LLMEngine, PoolingParams, RequestOutputKind, SamplingParams
from pagoda.lora.request import LoRARequest
from pagoda_common.errors import InvalidRequest, PagodaError, QueueFull
from pagoda_common.params.outputs import RequestOutput
from tests.fakes.fake_scheduler import FakeScheduler
from tests.service.client.conftest import FakeSchedulerThread
from tests.service.client.test_llm import eventually


@pytest.fixture
def fake(scheduler_thread: FakeSchedulerThread) -> Iterator[FakeScheduler]:
    fake = scheduler_thread.fake
    yield fake
    fake.step_s = 0.001


@pytest.fixture
def engine(llm: LLM, fake: FakeScheduler) -> LLMEngine:
    return llm.llm_engine


def finish(engine: LLMEngine) -> dict[str, RequestOutput]:
    outputs = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert isinstance(output, RequestOutput)
            outputs[output.request_id] = output
    return outputs


def test_requests_are_added_while_others_run(engine: LLMEngine) -> None:
    assert engine.step() == []
    engine.add_request("a", "Hello", SamplingParams(max_tokens=3))
    first = {output.request_id: output for output in engine.step()}  # on a busy machine all of it
    engine.add_request("b", [1, 2, 3], SamplingParams(max_tokens=5, n=2))
    assert engine.get_num_unfinished_requests() >= 1
    outputs = first | finish(engine)
    assert [len(outputs[name].outputs[0].token_ids) for name in "ab"] == [3, 5]
    assert len(outputs["b"].outputs) == 2
    assert all(output.finished for output in outputs.values())
    assert engine.get_num_unfinished_requests() == 0


def test_outputs_are_of_the_kind_that_was_asked_for(engine: LLMEngine) -> None:
    params = SamplingParams(max_tokens=4, output_kind=RequestOutputKind.FINAL_ONLY)
    engine.add_request("final", [7], params)
    assert [output.finished for output in engine.step()] == [True]
    engine.add_request("delta", [7], SamplingParams(max_tokens=4, output_kind=RequestOutputKind.DELTA))
    token_ids: list[int] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert isinstance(output, RequestOutput)
            token_ids += output.outputs[0].token_ids
    assert token_ids == [8, 9, 10, 11]


def test_an_aborted_request_gives_nothing_more(engine: LLMEngine, fake: FakeScheduler) -> None:
    fake.step_s = 0.05
    engine.add_request("gone", [7], SamplingParams(max_tokens=200, ignore_eos=True))
    engine.step()
    engine.abort_request(["gone", "unknown"])
    assert not engine.has_unfinished_requests()
    assert engine.step() == []
    engine.add_request("gone", [7], SamplingParams(max_tokens=1))  # the id is free again
    assert list(finish(engine)) == ["gone"]


def test_a_prompt_may_be_embedded(engine: LLMEngine, fake: FakeScheduler) -> None:
    fake.model_info.embedding_size = 4
    engine.add_request("e", "Hello", PoolingParams())
    (output,) = engine.step()
    assert output.request_id == "e"
    assert output.finished
    assert not engine.has_unfinished_requests()


def test_what_is_wrong_is_said_before_anything_is_submitted(engine: LLMEngine) -> None:
    with pytest.raises(InvalidRequest, match="lora_request 'style' has no lora_path"):
        engine.add_request("l", "Hi", SamplingParams(), lora_request=LoRARequest("style", 1, ""))
    with pytest.raises(InvalidRequest, match="prompt is empty"):
        engine.add_request("p", "", SamplingParams())
    with pytest.raises(InvalidRequest, match="request_id must be a text"):
        engine.add_request(5, "Hi", SamplingParams())  # type: ignore[arg-type]  # wrong on purpose
    assert not engine.has_unfinished_requests()


def test_an_id_is_used_once_at_a_time(engine: LLMEngine, fake: FakeScheduler) -> None:
    fake.step_s = 0.05
    engine.add_request("twice", [7], SamplingParams(max_tokens=100, ignore_eos=True))
    with pytest.raises(InvalidRequest, match="'twice' is in use"):
        engine.add_request("twice", [7], SamplingParams())
    engine.abort_request("twice")


def test_every_failure_is_raised_by_a_step_of_its_own_and_the_others_go_on(
    engine: LLMEngine, fake: FakeScheduler
) -> None:
    fake.step_s = 0.02
    fake.reject.update({name: QueueFull(name) for name in ("first", "second")})
    try:
        engine.add_request("whole", [7], SamplingParams(max_tokens=3, ignore_eos=True))
        for name in ("first", "second"):
            engine.add_request(name, [7], SamplingParams(max_tokens=3))
        failed, outputs = set(), dict[str, RequestOutput]()
        while engine.has_unfinished_requests():
            try:
                outputs |= {output.request_id: output for output in engine.step() if isinstance(output, RequestOutput)}
            except PagodaError as error:
                failed.add(error.message)
        assert failed == {"first", "second"}
        assert len(outputs["whole"].outputs[0].token_ids) == 3
    finally:
        fake.reject.clear()


def test_a_failure_is_unfinished_until_a_step_has_raised_it(engine: LLMEngine, fake: FakeScheduler) -> None:
    fake.reject["alone"] = QueueFull("alone")
    try:
        engine.add_request("alone", [7], SamplingParams(max_tokens=3))
        eventually(lambda: engine.get_num_unfinished_requests() == 0)
        assert engine.has_unfinished_requests()
        with pytest.raises(PagodaError, match="alone"):
            engine.step()
        assert not engine.has_unfinished_requests()
    finally:
        fake.reject.clear()


def test_a_model_that_only_pools_has_no_prefix_cache(engine: LLMEngine) -> None:
    info = engine._async_llm.model_info
    info.only_pools = True
    try:
        assert not engine.vllm_config.cache_config.enable_prefix_caching
    finally:
        info.only_pools = False


def test_the_model_is_described_under_vllms_names(engine: LLMEngine, llm: LLM) -> None:
    config = engine.model_config
    assert config == llm.model_config
    assert engine.vllm_config.cache_config.enable_prefix_caching
    assert engine.vllm_config.scheduler_config.max_num_seqs == engine.vllm_config.scheduler.max_num_seqs
    assert config.max_model_len == llm.model_config.max_model_len > 0
    assert config.get_vocab_size() == config.vocab_size
    assert engine.get_tokenizer().eos_token_id == llm.get_tokenizer().eos_token_id


async def test_an_asynchronous_engine_comes_from_arguments_and_ends_without_being_awaited(
    scheduler_thread: FakeSchedulerThread,
) -> None:
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(max_num_seqs=8), usage_context=None)
    assert engine.config.scheduler.max_num_seqs == 8
    with pytest.raises(PagodaError, match="stat_loggers"):
        AsyncLLM.from_engine_args(AsyncEngineArgs(), stat_loggers=[object])
    joined = AsyncLLM(address=scheduler_thread.address)
    await joined.start()
    joined.shutdown()
    await asyncio.sleep(0)
    await joined.shutdown()

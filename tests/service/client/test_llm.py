"""LLM against a fake scheduler: outputs in order, vLLM's shapes, bad prompts refused before anything is submitted."""

import asyncio
import gc
import logging
import threading
import time
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from pagoda import LLM, AsyncLLM, SamplingParams
from pagoda.llm.prompts import PromptInput
from pagoda_common.errors import (
    Code,
    ConfigError,
    InvalidRequest,
    NotReady,
    PagodaError,
    QueueFull,
    RequestTooLong,
)
from tests.fakes.fake_scheduler import FakeScheduler
from tests.service.client.conftest import FakeSchedulerThread

PARAMS = SamplingParams(max_tokens=5)


@pytest.fixture
def fake(scheduler_thread: FakeSchedulerThread) -> FakeScheduler:
    """The module's fake, as new."""
    fake = scheduler_thread.fake
    fake.script, fake.step_s, fake.tokens_per_step, fake.num_cached_tokens = None, 0.0, 1, 0
    fake.is_paused, fake.drop_after = False, None
    for record in (fake.reject, fake.fail_at, fake.submits, fake.aborted):
        record.clear()
    return fake


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_no_text_is_made_where_none_is_wanted(llm: LLM, fake: FakeScheduler) -> None:
    [output] = llm.generate("hello", SamplingParams(max_tokens=3, detokenize=False, logprobs=1), use_tqdm=False)
    [completion] = output.outputs
    assert (completion.text, len(completion.token_ids)) == ("", 3)
    assert completion.logprobs
    assert {entry.decoded_token for row in completion.logprobs for entry in row.values()} == {None}


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM, fake: FakeScheduler) -> None:
    prompts = [f"Prompt number {i}" for i in range(50)]
    params = [SamplingParams(max_tokens=1 + i % 7) for i in range(50)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    for output, param in zip(outputs, params, strict=True):
        completion = output.outputs[0]
        assert output.finished
        assert completion.finish_reason == "length"
        assert completion.finished()
        assert completion.token_ids == fake.tokens(output.prompt_token_ids, param.max_tokens or 0)
        tokenizer = llm.get_tokenizer()
        whole = tokenizer.decode(output.prompt_token_ids + completion.token_ids)
        assert output.prompt + completion.text == whole


def test_every_form_of_prompt_is_taken(llm: LLM, fake: FakeScheduler) -> None:
    ids = llm.get_tokenizer().encode("Hello")
    for prompts in ("Hello", ["Hello"], {"prompt": "Hello"}, [{"prompt_token_ids": ids}], ids, [ids]):
        (output,) = llm.generate(prompts, PARAMS, use_tqdm=False)
        assert output.prompt_token_ids == ids
    assert llm.generate([], PARAMS, use_tqdm=False) == []


def test_a_conversation_is_rendered_by_the_template(llm: LLM, fake: FakeScheduler) -> None:
    message = {"role": "user", "content": "Hi"}
    (one,) = llm.chat([message], PARAMS, use_tqdm=False)
    assert one.prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert one.prompt_token_ids[0] == 1
    assert len(llm.chat([[message], [message, message]], PARAMS, use_tqdm=False)) == 2


def test_logprobs_have_vllms_shape(llm: LLM, fake: FakeScheduler) -> None:
    fake.num_cached_tokens = 3
    (output,) = llm.generate("Hello", SamplingParams(max_tokens=5, logprobs=2), use_tqdm=False)
    completion = output.outputs[0]
    assert completion.logprobs is not None
    assert [next(iter(entry)) for entry in completion.logprobs] == completion.token_ids
    first = completion.logprobs[0][completion.token_ids[0]]
    assert (first.logprob, first.rank) == (-0.5, 1)
    assert first.decoded_token == llm.get_tokenizer().backend.token_text(completion.token_ids[0])
    assert completion.cumulative_logprob == -2.5
    assert output.num_cached_tokens == 3
    (plain,) = llm.generate("Hello", PARAMS, use_tqdm=False)
    assert plain.outputs[0].logprobs is None
    assert plain.outputs[0].cumulative_logprob is None


def test_several_sequences_are_outputs_of_one_request(llm: LLM, fake: FakeScheduler) -> None:
    (output,) = llm.generate("Hello", SamplingParams(n=3, max_tokens=4), use_tqdm=False)
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert output.outputs[2].token_ids == fake.tokens(output.prompt_token_ids, 4, 2)


def test_a_stop_string_is_the_stop_reason(llm: LLM, fake: FakeScheduler) -> None:
    fake.script = llm.get_tokenizer().encode("one two three")
    (output,) = llm.generate("Hello", SamplingParams(max_tokens=50, stop="two"), use_tqdm=False)
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("one ", "two")


def test_without_parameters_the_checkpoints_defaults_are_taken(llm: LLM, fake: FakeScheduler) -> None:
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.7, top_p=0.9, max_tokens=7)
    (output,) = llm.generate("Hello", use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 7
    assert fake.submits[-1].sampling_params.temperature == pytest.approx(0.7)


def test_each_request_draws_another_seed_the_same_in_each_run(
    scheduler_thread: FakeSchedulerThread, fake: FakeScheduler
) -> None:
    seeds = []
    owns: list[dict[str, Any]] = [{"seed": 5}, {"seed": 5}, {"seed": 6}, {"seed": 0}, {}]
    for own in owns:
        with LLM(address=scheduler_thread.address, **own) as llm:
            fake.submits.clear()
            llm.generate(["a", "b"], PARAMS, use_tqdm=False)
            seeds.append([submit.sampling_params.seed for submit in fake.submits])
    assert seeds[0] == seeds[1]
    assert seeds[3] == seeds[4], "the default"
    assert len({seed for pair in seeds for seed in pair}) == 6, "other requests and other engines draw others"


@pytest.mark.parametrize(
    ("prompts", "error", "message"),
    [
        (["ok", ""], InvalidRequest, "prompt is empty"),
        ([{"prompt_token_ids": []}], InvalidRequest, "prompt is empty"),
        (["ok", "word " * 600], RequestTooLong, "maximum context length is 512 tokens"),
        ([[5] * 512], RequestTooLong, "at least one must be left"),
        ([[3072]], InvalidRequest, "prompt has token 3072"),
        ([[-1]], InvalidRequest, "prompt has token -1"),
        ([{"prompt_token_ids": [1, "2"]}], InvalidRequest, "prompt has token '2'"),
        (["ok", 7], InvalidRequest, "must be a text or a list of token ids"),
        (None, InvalidRequest, "prompts must be"),
    ],
)
def test_a_bad_prompt_is_refused_before_anything_is_submitted(
    llm: LLM, fake: FakeScheduler, prompts: object, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        llm.generate(prompts, PARAMS, use_tqdm=False)  # type: ignore[arg-type]
    assert fake.submits == []


def test_lists_of_another_length_are_refused(llm: LLM, fake: FakeScheduler) -> None:
    with pytest.raises(InvalidRequest, match="sampling_params has 1 entries, there are 2 prompts"):
        llm.generate(["a", "b"], [PARAMS])
    with pytest.raises(InvalidRequest, match="priority has 1 entries"):
        llm.generate(["a", "b"], PARAMS, priority=[1])
    with pytest.raises(InvalidRequest, match="allowed_token_ids has token 9999"):
        llm.generate("a", SamplingParams(allowed_token_ids=[9999]))
    assert fake.submits == []


def test_a_rejection_is_raised(llm: LLM, fake: FakeScheduler) -> None:
    fake.reject["*"] = QueueFull("too many")
    with pytest.raises(Exception, match="too many"):
        llm.generate(["a", "b"], PARAMS, use_tqdm=False)


def test_one_failed_request_leaves_the_others_whole(
    llm: LLM, fake: FakeScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    prefix, number = llm._async_llm._id_prefix, next(llm._async_llm._ids)
    fake.fail_at[f"{prefix}-{number + 2}"] = 3
    with caplog.at_level(logging.ERROR):
        outputs = llm.generate(["a", "b", "c"], PARAMS, use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    assert "the fake failed this request" in caplog.text


def test_a_broken_stream_does_not_show(llm: LLM, fake: FakeScheduler) -> None:
    fake.drop_after, fake.step_s = 3, 0.001
    outputs = llm.generate(["a", "b", "c"], SamplingParams(max_tokens=40, ignore_eos=True), use_tqdm=False)
    for output in outputs:
        assert output.outputs[0].token_ids == fake.tokens(output.prompt_token_ids, 40)


def test_an_interrupt_aborts_what_runs(llm: LLM, fake: FakeScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.step_s = 0.01
    import concurrent.futures

    def interrupted(self: object, timeout: float | None = None) -> None:
        eventually(lambda: fake.num_open_sequences == 2)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(concurrent.futures.Future, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b"], SamplingParams(max_tokens=300), use_tqdm=False)
    eventually(lambda: len(fake.aborted) == 2)
    fake.step_s = 0
    assert llm.generate("a", PARAMS, use_tqdm=False)[0].finished


def test_a_progress_bar_counts_prompts(llm: LLM, fake: FakeScheduler, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], PARAMS)
    printed = capsys.readouterr().err
    assert "Processed prompts" in printed
    assert "2/2" in printed
    assert "output tokens/s" in printed
    llm.generate(["a", "b"], PARAMS, use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_after_shutdown_it_says_so(scheduler_thread: FakeSchedulerThread) -> None:
    llm = LLM(address=scheduler_thread.address)
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(NotReady, match="shut down"):
        llm.generate("a")


def test_a_forgotten_llm_ends_its_thread(scheduler_thread: FakeSchedulerThread) -> None:
    before = threading.active_count()
    llm = LLM(address=scheduler_thread.address)
    assert llm.generate("a", PARAMS, use_tqdm=False)[0].finished
    del llm
    gc.collect()
    eventually(lambda: threading.active_count() <= before + 1)  # tokenizers are loaded on a pool thread


def test_nobody_at_the_address_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda.llm.async_llm.CONNECT_TIMEOUT_S", 0.3)
    with pytest.raises(NotReady, match=r"127\.0\.0\.1:1"):
        LLM(address="127.0.0.1:1")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_expert_parallel": True}, "not supported"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0, must be at least 1"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2 is not supported"),
        ({"max_modle_len": 5}, "unknown argument 'max_modle_len'"),
        ({"dtype": "float8"}, "dtype is 'float8'"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
    ],
)
def test_a_bad_argument_is_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(**options)  # type: ignore[arg-type]


async def test_async_outputs_are_cumulative(scheduler_thread: FakeSchedulerThread, fake: FakeScheduler) -> None:
    fake.step_s = 0.001
    async with AsyncLLM(address=scheduler_thread.address) as llm:
        outputs = [output async for output in llm.generate("Hello", SamplingParams(max_tokens=20), "mine")]
        assert outputs[-1].finished
        assert not outputs[0].finished
        assert outputs[-1].request_id == "mine"
        assert outputs[-1].outputs[0].token_ids == fake.tokens(outputs[-1].prompt_token_ids, 20)
        lengths = [len(output.outputs[0].token_ids) for output in outputs]
        assert lengths == sorted(set(lengths))
        async with aclosing(llm.generate("Hello", SamplingParams(max_tokens=400), "left")) as stream:
            await anext(stream)
    eventually(lambda: "left" in fake.aborted)


def test_a_model_sleeps_and_wakes_up(llm: LLM, fake: FakeScheduler) -> None:
    llm.sleep(level=2)
    assert llm.is_sleeping()
    with pytest.raises(NotReady, match=r"the model sleeps: call wake_up\(\) first"):
        llm.generate("a", PARAMS, use_tqdm=False)
    llm.wake_up(tags=["weights"])
    assert llm.is_sleeping()
    llm.wake_up()
    assert not llm.is_sleeping()
    assert llm.generate("a", PARAMS, use_tqdm=False)[0].finished
    assert [request.level for request in fake.sleeps] == [2]
    for call, field in ((lambda: llm.sleep(level=3), "level"), (lambda: llm.sleep(mode="wait"), "mode")):
        with pytest.raises(InvalidRequest, match=f"{field} is ") as caught:
            call()
        assert caught.value.field == field


def test_other_weights_are_asked_for_by_directory(llm: LLM, fake: FakeScheduler, tmp_path: Path) -> None:
    llm.reload_weights(tmp_path, revision="main")
    assert [(request.model, request.revision) for request in fake.reloads] == [(str(tmp_path), "main")]
    with pytest.raises(PagodaError, match="model 'missing' is not a directory") as caught:
        llm.reload_weights("missing")
    assert caught.value.code is Code.FAILED_PRECONDITION


async def test_what_comes_to_a_sleeping_model_waits(scheduler_thread: FakeSchedulerThread, fake: FakeScheduler) -> None:
    async with AsyncLLM(address=scheduler_thread.address) as llm:
        await llm.sleep()

        async def last() -> str:
            return [output async for output in llm.generate("a", PARAMS)][-1].outputs[0].text

        waiting = asyncio.create_task(last())
        while not fake.submits:  # noqa: ASYNC110 (the fake is on another thread)
            await asyncio.sleep(0.005)
        assert not waiting.done()
        await llm.wake_up()
        assert await waiting


def test_the_salt_of_each_prompt_reaches_the_engine(llm: LLM, fake: FakeScheduler) -> None:
    ids = llm.get_tokenizer().encode("Hello")
    prompts: list[PromptInput] = [
        {"prompt": "Hello", "cache_salt": "mine"},
        "Hello",
        {"prompt_token_ids": ids, "cache_salt": "yours"},
    ]
    llm.generate(prompts, PARAMS, use_tqdm=False, priority=[3, -2, 0])
    submits = sorted(fake.submits, key=lambda submit: submit.priority)
    assert [(submit.priority, submit.cache_salt) for submit in submits] == [(-2, ""), (0, "yours"), (3, "mine")]

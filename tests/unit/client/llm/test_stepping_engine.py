"""What LLMEngine makes of its arguments and of its requests' news, over an engine that is only asked."""

import asyncio
import random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pagoda import PoolingParams, RequestOutputKind, SamplingParams
from pagoda.llm import llm_engine
from pagoda.llm.llm_engine import LLMEngine, _Generation
from pagoda.llm.request_output import RequestOutputBuilder
from pagoda.lora.request import LoRARequest
from pagoda_common.engine.stream import EngineRequest
from pagoda_common.errors import Code, InvalidRequest, PagodaError, QueueFull, RequestFailed
from pagoda_common.text.tokenizer import Tokenizer
from tests.unit.client.llm.llm_harness import PROMPT, Harness, Loop, Stream, delta


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load("pagoda-tiny")


def generation(*deltas: Any, kind: RequestOutputKind = RequestOutputKind.CUMULATIVE) -> tuple[_Generation, Stream]:
    params = SamplingParams(output_kind=kind)
    request = EngineRequest(request_id="r", prompt_token_ids=[5], sampling_params=params)
    tokenizer = Tokenizer.load("pagoda-tiny")
    stream = Stream(request, list(deltas))
    builder = RequestOutputBuilder(request=request, prompt=PROMPT, tokenizer=tokenizer)
    return _Generation(cast("Any", stream), builder), stream


@pytest.mark.parametrize(
    ("kind", "text", "at_least", "num_news"),
    [
        (RequestOutputKind.CUMULATIVE, "ab", 1, 2),
        (RequestOutputKind.DELTA, "ab", 1, 2),
        (RequestOutputKind.FINAL_ONLY, "ab", 64, 1),
    ],
)
async def test_a_request_of_the_stepping_engine_tells_its_news(
    kind: RequestOutputKind, text: str, at_least: int, num_news: int
) -> None:
    made, stream = generation(delta("a"), delta("b", reason="stop"), kind=kind)
    news: list[bool] = []
    on_news: Any = SimpleNamespace(set=lambda: news.append(made.is_finished))
    await made.follow(on_news)
    assert (news, stream.at_least, stream.num_closed) == ([False, True][-num_news:], [at_least] * 2, 1)
    assert (made.is_finished, made.has_news) == (True, True)
    output: Any = made.output()
    assert (output.outputs[0].text, made.has_news, output.prompt_logprobs) == (text, False, [None])
    again: Any = made.output()
    assert again.outputs[0].text == ("" if kind is RequestOutputKind.DELTA else text)


async def test_a_request_that_fails_alone_ends_and_another_failure_is_raised() -> None:
    made, stream = generation(delta("a"), RequestFailed("lost"))
    on_news = asyncio.Event()
    await made.follow(on_news)
    output: Any = made.output()
    assert (output.outputs[0].finish_reason, output.outputs[0].text, on_news.is_set()) == ("error", "a", True)
    assert (made.is_finished, stream.num_closed) == (True, 1)
    made, stream = generation(QueueFull("full"))
    with pytest.raises(PagodaError) as caught:
        await made.follow(asyncio.Event())
    assert (caught.value.code, stream.num_closed) == (Code.RESOURCE_EXHAUSTED, 1)


def test_the_stepping_engine_reads_the_options_of_tokenization(tokenizer: Tokenizer) -> None:
    harness, loop = Harness(tokenizer, address="a:1", seed=3), Loop()
    engine = LLMEngine(harness.llm_async, cast("Any", loop))
    text, params = "one two three", SamplingParams()
    engine.add_request("a", text, params, tokenization_kwargs={"truncate_prompt_tokens": 2})
    (request,) = harness.requests
    assert request.prompt_token_ids == tokenizer.encode(text)[-2:]
    assert params.truncate_prompt_tokens is None
    for given in (params, PoolingParams()):
        with pytest.raises(InvalidRequest, match="tokenization_kwargs has 'padding', must be add_special_tokens and"):
            engine.add_request("b", text, given, tokenization_kwargs={"padding": True})
    assert engine.get_num_unfinished_requests() == 1
    engine.abort_request("a")
    loop.run(asyncio.sleep(0))
    loop.close()


def test_the_stepping_engine_gives_each_request_its_arguments(tokenizer: Tokenizer) -> None:
    harness, loop = Harness(tokenizer, address="a:1", seed=3), Loop()
    engine = LLMEngine(harness.llm_async, cast("Any", loop))
    style, text = LoRARequest("style", 1, "/s"), "one two three"
    assert engine.step() == []
    assert engine.add_request("a", text, SamplingParams(seed=4), lora_request=style, priority=7) == "a"
    engine.add_request("b", text, given := SamplingParams(), tokenization_kwargs={"add_special_tokens": False})
    engine.add_request("c", text, SamplingParams())
    assert engine.get_num_unfinished_requests() == 3
    first, second, third = harness.requests
    assert (first.request_id, first.priority, first.lora, first.sampling_params.seed) == ("a", 7, style.adapter, 4)
    draw = random.Random(3)
    drawn = [draw.getrandbits(63) for _ in range(2)]
    assert [second.sampling_params.seed, third.sampling_params.seed] == drawn
    assert given.seed is None
    texts: dict[str, str] = {}
    while engine.has_unfinished_requests():
        for output in cast("Any", engine.step()):
            texts[output.request_id] = output.outputs[0].text
    assert texts == {"a": "ab", "b": "ab", "c": "ab"}
    assert engine.get_num_unfinished_requests() == 0
    for wrong, message in ((5, "request_id must be a text, got 5"), ("", "request_id must be a text, got ''")):
        with pytest.raises(InvalidRequest, match=message) as caught:
            engine.add_request(cast("Any", wrong), text, SamplingParams())
        assert caught.value.field == "request_id"
    engine.add_request("d", text, SamplingParams())
    with pytest.raises(InvalidRequest, match="request_id 'd' is in use"):
        engine.add_request("d", text, SamplingParams())
    with pytest.raises(InvalidRequest, match="trace_headers is not supported"):
        engine.add_request("e", text, SamplingParams(), trace_headers={"a": "b"})
    engine.abort_request("d")
    assert not engine.has_unfinished_requests()
    loop.close()


async def test_an_engine_and_its_loop_are_shut_down_together() -> None:
    done: list[str] = []

    class Async:
        def shutdown(self) -> Any:
            async def close() -> None:
                done.append("engine")

            return close()

    class Thread:
        def run(self, call: Any) -> None:
            call.close()
            done.append("run")
            raise RuntimeError("it is gone")

        def close(self) -> None:
            done.append("loop")

    with pytest.raises(RuntimeError):
        llm_engine.shut_down(cast("Any", Async()), cast("Any", Thread()))
    assert done == ["run", "loop"], "the loop ends however the engine does"

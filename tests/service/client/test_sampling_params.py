"""SamplingParams of vLLM's programs through LLM and AsyncLLM: every field is obeyed or refused by name."""

from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from pagoda import LLM, AsyncLLM, SamplingParams
from pagoda.options.llm_options import engine_config_from_options
from pagoda_common.errors import InvalidRequest
from pagoda_common.params.outputs import RequestOutput
from pagoda_common.params.sampling_params import RequestOutputKind
from tests.service.client.conftest import FakeSchedulerThread


@pytest.fixture
async def outputs_of(scheduler_thread: FakeSchedulerThread) -> AsyncIterator[object]:
    async with AsyncLLM(address=scheduler_thread.address) as llm:

        async def outputs(kind: RequestOutputKind) -> list[RequestOutput]:
            params = SamplingParams(max_tokens=6, n=2, logprobs=0, output_kind=kind)
            async with aclosing(llm.generate([5, 6], params)) as stream:
                return [output async for output in stream]

        yield outputs


async def test_every_kind_of_output_tells_the_same(outputs_of) -> None:  # type: ignore[no-untyped-def]
    whole = (await outputs_of(RequestOutputKind.CUMULATIVE))[-1]
    [final] = await outputs_of(RequestOutputKind.FINAL_ONLY)
    deltas = await outputs_of(RequestOutputKind.DELTA)
    assert final.finished
    assert len(deltas) > 1
    for index, expected in enumerate(whole.outputs):
        parts = [output.outputs[index] for output in deltas]
        assert final.outputs[index] == expected
        assert "".join(part.text for part in parts) == expected.text
        assert [token for part in parts for token in part.token_ids] == expected.token_ids
        assert [entry for part in parts for entry in part.logprobs or ()] == expected.logprobs
        assert parts[-1].finish_reason == expected.finish_reason


def test_words_arguments_and_truncation_reach_the_engine(scheduler_thread: FakeSchedulerThread) -> None:
    scheduler_thread.fake.submits.clear()
    with LLM(address=scheduler_thread.address) as llm:
        params = SamplingParams(
            max_tokens=2, bad_words=["cat", "dog"], extra_args={"weight": 1}, truncate_prompt_tokens=3
        )
        outputs = llm.generate([[1, 2, 3, 4, 5], [6, 7]], params, use_tqdm=False)
        assert [output.prompt_token_ids for output in outputs] == [[3, 4, 5], [6, 7]]
        everything = SamplingParams(max_tokens=2, truncate_prompt_tokens=-1)
        [output] = llm.generate([[5] * 2000], everything, use_tqdm=False)
        assert len(output.prompt_token_ids) == llm._async_llm.model_info.max_model_len - 2
        cat = tuple(llm.get_tokenizer().encode("cat", add_special_tokens=False))
    for submit in scheduler_thread.fake.submits[:2]:
        words = [tuple(word.ids) for word in submit.sampling_params.bad_words_token_ids]
        assert cat in words
        assert len(words) >= 2
        assert submit.sampling_params.extra_args_json == '{"weight": 1}'


def test_callables_per_request_are_refused_with_the_way_to_do_it() -> None:
    with pytest.raises(InvalidRequest, match="--logits-processors") as caught:
        SamplingParams(logits_processors=[lambda ids, logits: logits])  # type: ignore[arg-type]
    assert caught.value.field == "logits_processors"


def test_processors_and_overrides_of_llm_are_as_in_vllm() -> None:
    config = engine_config_from_options(
        model="pagoda-tiny", logits_processors=["some:One", RequestOutput], override_generation_config={"top_k": 5}
    )
    assert config.model.logits_processors == ("some:One", "pagoda_common.params.outputs:RequestOutput")
    assert config.model.override_generation_config == '{"top_k": 5}'

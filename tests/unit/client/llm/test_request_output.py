"""Defaults of a checkpoint and vLLM's shapes of outputs."""

import json

import pytest

from pagoda.llm.prompts import Prompt
from pagoda.llm.request_output import RequestOutputBuilder, default_sampling_params, logprobs_by_token
from pagoda.options.llm_options import engine_config_from_options
from pagoda_common.config.engine_config import EMBEDDED_MODEL
from pagoda_common.engine.stream import EngineRequest
from pagoda_common.errors import ConfigError
from pagoda_common.params.outputs import FinishReason, SequenceDelta, TokenLogprobs
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_common.text.tokenizer import Tokenizer


def test_the_checkpoints_recommendations_become_parameters() -> None:
    config = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 50, "eos_token_id": 2, "do_sample": True}
    assert default_sampling_params(json.dumps(config)) == SamplingParams(temperature=0.6, top_k=20, max_tokens=50)
    assert default_sampling_params("") == SamplingParams()


def test_a_recommendation_that_is_no_parameter_is_left_out() -> None:
    assert default_sampling_params('{"temperature": -3, "top_p": 0.5}') == SamplingParams(top_p=0.5)


def test_ranks_are_the_sampled_tokens_own_and_the_places_of_the_others() -> None:
    entry = TokenLogprobs(token_ids=[9, 7, 8], logprobs=[-4.0, -0.5, -1.0], sampled_rank=40)
    shaped = logprobs_by_token(entry, Tokenizer.load(EMBEDDED_MODEL))
    assert {token_id: logprob.rank for token_id, logprob in shaped.items()} == {9: 40, 7: 1, 8: 2}
    sampled_on_top = TokenLogprobs(token_ids=[7, 7, 8], logprobs=[-0.5, -0.5, -1.0], sampled_rank=1)
    shaped = logprobs_by_token(sampled_on_top, Tokenizer.load(EMBEDDED_MODEL))
    assert {token_id: logprob.rank for token_id, logprob in shaped.items()} == {7: 1, 8: 2}


def test_vllms_arguments_become_the_config() -> None:
    config = engine_config_from_options(
        model="m", max_model_len=100, scheduling_policy="priority", num_gpu_blocks_override=7, enforce_eager=True
    )
    assert (config.model.model, config.model.max_model_len) == ("m", 100)
    assert (config.scheduler.policy, config.cache.num_blocks_override) == ("priority", 7)
    assert config.model.enforce_eager
    assert engine_config_from_options(max_num_seqs=None).scheduler.max_num_seqs == 256


def test_an_unknown_argument_is_named() -> None:
    with pytest.raises(ConfigError, match="unknown argument 'max_modle_len'") as caught:
        engine_config_from_options(max_modle_len=5)
    assert caught.value.field == "max_modle_len"


def make_builder() -> RequestOutputBuilder:
    params = SamplingParams(n=2, logprobs=0)
    request = EngineRequest(request_id="a", prompt_token_ids=[1], sampling_params=params)
    return RequestOutputBuilder(
        request=request, prompt=Prompt(text="x", token_ids=[1]), tokenizer=Tokenizer.load(EMBEDDED_MODEL)
    )


def delta(index: int, text: str, token_id: int, finish_reason: FinishReason | None = None) -> SequenceDelta:
    logprobs = [TokenLogprobs(token_ids=[token_id], logprobs=[-1.0], sampled_rank=1)]
    return SequenceDelta(
        index=index, text=text, token_ids=[token_id], offset=0, logprobs=logprobs, finish_reason=finish_reason
    )


def test_what_was_taken_is_not_given_again() -> None:
    builder = make_builder()
    builder.append([delta(0, "a", 7), delta(0, "b", 8)])
    builder.append([delta(1, "c", 9, finish_reason="stop")])
    first = builder.take()
    assert [(one.text, one.token_ids) for one in first.outputs] == [("ab", [7, 8]), ("c", [9])]
    assert not first.finished
    builder.append([delta(0, "d", 10, finish_reason="length")])
    second = builder.take()
    assert [(one.text, one.token_ids) for one in second.outputs] == [("d", [10]), ("", [])]
    assert [[list(entry) for entry in one.logprobs or ()] for one in second.outputs] == [[[10]], []]
    assert (second.finished, second.outputs[0].cumulative_logprob) == (True, -3.0)
    assert builder.num_output_tokens == 4
    assert [(one.text, one.token_ids) for one in first.outputs] == [("ab", [7, 8]), ("c", [9])]


def test_a_snapshot_stays_as_it_is() -> None:
    builder = make_builder()
    builder.append([delta(0, "a", 7)])
    first = builder.build()
    builder.append([delta(0, "b", 8, finish_reason="stop")])
    second = builder.build()
    assert [(output.outputs[0].text, output.outputs[0].token_ids) for output in (first, second)] == [
        ("a", [7]),
        ("ab", [7, 8]),
    ]
    assert first.metrics is not None
    assert first.metrics.num_generation_tokens == 1


def test_cached_tokens_are_told_once_and_stay() -> None:
    builder = make_builder()
    first = delta(0, "a", 7)
    first.num_cached_tokens = 16
    builder.append([first, delta(1, "b", 8)])
    assert builder.build().num_cached_tokens == 16


def test_a_failure_leaves_the_ends_of_sequences_that_had_ended() -> None:
    builder = make_builder()
    builder.append([delta(0, "a", 7, finish_reason="stop")])
    builder.fail()
    output = builder.build()
    assert [one.finish_reason for one in output.outputs] == ["stop", "error"]
    assert output.finished

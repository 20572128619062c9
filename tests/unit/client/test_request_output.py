"""Defaults of a checkpoint and vLLM's shapes of outputs."""

import json

import pytest

from pagoda.llm_options import engine_config_from_options
from pagoda.request_output import default_sampling_params, logprobs_by_token
from pagoda_common.config import EMBEDDED_MODEL
from pagoda_common.errors import ConfigError
from pagoda_common.outputs import TokenLogprobs
from pagoda_common.sampling_params import SamplingParams
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

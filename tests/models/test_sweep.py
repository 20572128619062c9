"""The short form of the sweep: types that differ in what modules ask of attention, positions and names."""

import signal

import pytest

from tests.models.sweep import MAX_REASON, sweep

SHORT = {
    "helium": "exact",  # plain
    "granitemoe": "exact",  # stacked experts
    "deepseek_v3": "exact",  # values narrower than keys, experts in groups, merged from separate tensors
    "cohere2_moe": "exact",  # windows beside full attention
    "vaultgemma": "exact",  # soft caps
    "flint": "exact",  # sinks
    "bert": "exact",  # a head whose bias is tied
    "roberta": "exact",  # positions from after the padding token
    "bart": "exact",  # a decoder that counts positions itself
    "mamba": "exact",  # recurrent layers alone
    "rwkv": "refused",
    "xglm": "refused",
    "doge": "refused",
}


@pytest.mark.parametrize("model_type", SHORT)
def test_a_type_is_exact_or_refused(model_type: str) -> None:
    (outcome,) = sweep([model_type])
    assert outcome.verdict == SHORT[model_type], outcome.reason
    assert len(outcome.reason) < MAX_REASON


def test_a_family_of_ours_equals_transformers_module() -> None:
    (outcome,) = sweep(["qwen3"], "transformers")
    assert (outcome.verdict, outcome.implementation) == ("exact", "transformers"), outcome.reason


def test_no_alarm_is_left() -> None:
    assert signal.alarm(0) == 0

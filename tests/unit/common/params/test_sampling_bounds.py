"""SamplingParams, BeamSearchParams, truncation and structured outputs take their bounds and nothing beyond."""

import math
from typing import Any

import pytest

from pagoda_common.errors import InvalidRequest
from pagoda_common.params.beam_search import BeamSearchParams
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_common.params.structured_outputs import StructuredOutputsParams
from pagoda_common.params.truncation import Truncation, truncation_of

INF, NAN = math.inf, math.nan
NUMBERS: list[tuple[str, tuple[Any, ...], tuple[Any, ...]]] = [
    ("n", (1, 16384), (0, 16385, True, 1.0)),
    ("presence_penalty", (-2, 2), (-2.01, 2.01, NAN, True, "1")),
    ("frequency_penalty", (-2, 2), (-2.01, 2.01, NAN, True)),
    ("repetition_penalty", (0.001, 100), (0, -1, INF, NAN)),
    ("temperature", (0.5, 2), (-0.01, 2.01, NAN, True)),
    ("top_p", (0.001, 1), (0, 1.01, NAN)),
    ("top_k", (0, 1, 2**31 - 1), (-2, 2**31, 1.5)),
    ("min_p", (0, 1), (-0.01, 1.01)),
    ("seed", (None, 0, 2**63, 2**64 - 1), (-(2**63) - 1, 2**64, True, 1.5)),
    ("max_tokens", (None, 1, 2**31 - 1), (0, 2**31, True)),
    ("min_tokens", (0, 16), (-1, 17, True)),
    ("logprobs", (None, -1, 0, 100), (-2, True, 1.0)),
    ("prompt_logprobs", (None, -1, 0, 100), (-2, True)),
    ("truncate_prompt_tokens", (None, -1, 0, 1, 2**31 - 1), (-2, 2**31)),
    ("stop", (["a"] * 128, ["a" * 4096], ["é" * 2048]), (["a"] * 129, [""], ["a", ""], [1], 1, ["é" * 2049])),
    ("stop_token_ids", ([0, 2**32 - 1], list(range(1024))), ([-1], [2**32], "12", [True], 5, [1] * 1025)),
    ("allowed_token_ids", (None, (0, 2**32 - 1), tuple(range(16384))), ([], [-1], [2**32], [1] * 16385)),
    ("logprob_token_ids", (tuple(range(128)),), (list(range(129)), [-1], [2**32])),
    ("bad_words", (["x"] * 128, ["x" * 4096]), (["x"] * 129, ["a", " "], "word", [1], ["x" * 4097], ["é" * 2049])),
    ("bad_words_token_ids", ([[1] * 256] * 128,), ([[1] * 257], [[1]] * 129)),
    (
        "logit_bias",
        ({0: 1.0, 2**32 - 1: -1.0}, dict.fromkeys(range(1024), 1.0)),
        ({-1: 1.0}, {2**32: 1.0}, {1: NAN}, {1: INF}, {True: 1.0}, dict.fromkeys(range(1025), 1.0)),
    ),
    (
        "extra_args",
        (None, {"a": 2**63 - 1, "b": -(2**63), "c": [1.5, None, True, "x"]}, {"a": [1] * 4094}, {"a": "x" * 32_000}),
        ({"a": [1] * 4095}, {"a": "x" * 32_768}, {"a": "🙂" * 8192}, {"x" * 33_000: 1}, {1: 1}, {"a": {"b"}}, [1]),
    ),
]


@pytest.mark.parametrize(("name", "good", "bad"), NUMBERS, ids=[name for name, *_ in NUMBERS])
def test_a_field_takes_its_bounds_and_nothing_beyond(name: str, good: tuple[Any, ...], bad: tuple[Any, ...]) -> None:
    for value in good:
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in bad:
        with pytest.raises(InvalidRequest) as caught:
            SamplingParams(**{name: value})
        field = "bad_words" if name == "bad_words_token_ids" else name
        assert caught.value.field == field, value


def test_a_changed_copy_shares_what_is_large_and_checks_nothing_again() -> None:
    extra = {"a": [1, 2]}
    params = SamplingParams(n=3, seed=5, extra_args=extra)
    copied = params.with_changes(n=1, seed=6)
    assert (params.n, params.seed, copied.n, copied.seed) == (3, 5, 1, 6)
    assert copied.extra_args is extra


def test_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    shown = {name: getattr(params, name) for name in SamplingParams.__slots__}
    assert shown.pop("output_kind").value == 0
    assert shown == {
        "n": 1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": None,
        "stop": [],
        "stop_token_ids": [],
        "ignore_eos": False,
        "max_tokens": 16,
        "min_tokens": 0,
        "logprobs": None,
        "prompt_logprobs": None,
        "detokenize": True,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "include_stop_str_in_output": False,
        "logit_bias": None,
        "allowed_token_ids": None,
        "bad_words_token_ids": (),
        "bad_words": [],
        "logprob_token_ids": (),
        "truncate_prompt_tokens": None,
        "structured_outputs": None,
        "extra_args": None,
        "logits_processors": None,
    }


def test_small_temperatures_are_raised_and_tiny_ones_are_greedy() -> None:
    assert SamplingParams(temperature=0.001).temperature == 0.01
    assert SamplingParams(temperature=0.01).temperature == 0.01
    assert SamplingParams(temperature=1e-5).temperature == 0.01
    greedy = SamplingParams(temperature=9e-6, top_p=0.5, top_k=7, min_p=0.1)
    assert (greedy.temperature, greedy.top_p, greedy.top_k, greedy.min_p) == (0.0, 1.0, 0, 0.0)
    assert greedy.is_greedy
    assert not SamplingParams(temperature=1e-5).is_greedy
    with pytest.raises(InvalidRequest, match="n must be 1 when temperature is 0"):
        SamplingParams(temperature=0, n=2)


def test_what_means_the_same_is_stored_alike() -> None:
    assert SamplingParams(top_k=-1).top_k == 0
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(seed=-2).seed == 2**64 - 2
    assert SamplingParams(stop="x").stop == ["x"]
    assert SamplingParams(stop=["x", "y"]).stop_strings == ("x", "y")
    assert SamplingParams(stop_token_ids=[3, 1, 3]).stop_token_ids == [3, 1]
    biased = SamplingParams(logit_bias={1: 101.0, 2: -101.0, 3: 100.0, 4: -3.5}).logit_bias
    assert biased == {1: 100.0, 2: -100.0, 3: 100.0, 4: -3.5}
    assert SamplingParams(max_tokens=None, min_tokens=10**6).min_tokens == 10**6


def test_stop_strings_need_text() -> None:
    with pytest.raises(InvalidRequest, match="detokenize=True"):
        SamplingParams(stop="x", detokenize=False)
    SamplingParams(detokenize=False, stop_token_ids=[1])


def test_log_probabilities_of_given_tokens_are_as_many_as_they_are() -> None:
    for given in (None, 0, 2):
        assert SamplingParams(logprob_token_ids=[5, 6], logprobs=given).logprobs == 0
    for given in (1, 3, -1):
        with pytest.raises(InvalidRequest, match=r"must be the number of logprob_token_ids \(2\)"):
            SamplingParams(logprob_token_ids=[5, 6], logprobs=given)
    assert SamplingParams(logprobs=3).logprobs == 3


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value", [{1: 2}, {"a": 2**63}, {"a": -(2**63) - 1}, {"a": INF}, {"a": [{"b": NAN}]}, {"a": object()}, [1]]
)
def test_extra_args_hold_what_json_can_carry(value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(extra_args=value)
    assert caught.value.field == "extra_args"


def test_extra_args_are_nested_at_most_64_levels_deep() -> None:
    SamplingParams(extra_args={"a": nested(63)})
    with pytest.raises(InvalidRequest, match="at most 64 levels"):
        SamplingParams(extra_args={"a": nested(64)})


def test_processors_and_constraints_of_other_types_are_refused() -> None:
    for fields in ({"logits_processors": [print]}, {"structured_outputs": {"regex": "a"}}):
        (name,) = fields
        with pytest.raises(InvalidRequest) as caught:
            SamplingParams(**fields)  # type: ignore[arg-type]  # wrong on purpose
        assert caught.value.field == name


def test_beams_take_their_bounds() -> None:
    BeamSearchParams(beam_width=1, length_penalty=10, early_stopping="never")
    BeamSearchParams(beam_width=1, length_penalty=-10.0, early_stopping="first")
    assert (BeamSearchParams(beam_width=2).length_penalty, BeamSearchParams(beam_width=2).early_stopping) == (
        1.0,
        "heuristic",
    )
    for name, value in (
        *(("beam_width", value) for value in (0, -1, True, 1.0)),
        *(("length_penalty", value) for value in (10.01, -10.01, NAN, INF, True, "1")),
        ("early_stopping", "soon"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            BeamSearchParams(**{"beam_width": 2, name: value})  # type: ignore[arg-type]  # wrong on purpose
        assert caught.value.field == name


def test_a_prompt_is_cut_at_the_side_that_was_asked_for() -> None:
    ids = [1, 2, 3, 4]
    assert Truncation(num_tokens=3).apply(ids) == [2, 3, 4]
    assert Truncation(num_tokens=3, side="right").apply(ids) == [1, 2, 3]
    assert Truncation(num_tokens=4).apply(ids) == ids
    assert Truncation(num_tokens=0).apply(ids) == []
    assert Truncation(num_tokens=0, side="right").apply(ids) == []


def test_a_truncation_leaves_room_for_the_output() -> None:
    def cut(num: int | None, max_tokens: int | None, side: Any = None) -> Truncation | None:
        return truncation_of(num, side, max_tokens=max_tokens, max_model_len=10)

    assert cut(None, 99) is None
    assert cut(-1, None) == Truncation(num_tokens=9)
    assert cut(-1, 0) == Truncation(num_tokens=10)
    assert cut(-1, 9, "right") == Truncation(num_tokens=1, side="right")
    assert cut(7, 3) == Truncation(num_tokens=7)
    assert cut(0, 3, "left") == Truncation(num_tokens=0, side="left")
    for num, max_tokens, field in ((8, 3, "truncate_prompt_tokens"), (-2, 3, "truncate_prompt_tokens")):
        with pytest.raises(InvalidRequest) as caught:
            cut(num, max_tokens)
        assert caught.value.field == field
    with pytest.raises(InvalidRequest, match="max_tokens must be less than") as caught:
        cut(1, 10)
    assert caught.value.field == "max_tokens"


KIB = 1024


@pytest.mark.parametrize(
    ("fields", "is_good"),
    [
        ({"regex": "a" * 256 * KIB}, True),
        ({"regex": "a" * 256 * KIB + "a"}, False),
        ({"grammar": "é" * 128 * KIB}, True),
        ({"grammar": "é" * 128 * KIB + "a"}, False),
        ({"regex": ""}, False),
        ({"regex": "a\0"}, False),
        ({"regex": "\ud800"}, False),
        ({"choice": ["a"]}, True),
        ({"choice": [str(i) for i in range(10_000)]}, True),
        ({"choice": [str(i) for i in range(10_001)]}, False),
        ({"choice": []}, False),
        ({"choice": ["a", ""]}, False),
        ({"choice": "abc"}, False),
        ({"choice": ["x" * 200 * KIB, "y" * 57 * KIB]}, False),
        ({"choice": ["x" * 200 * KIB, "y" * 56 * KIB]}, True),
        ({"json_object": True}, True),
        ({"json_object": 1}, False),
        ({"json_object": False}, False),
        ({"json": True}, True),
        ({"json": [1]}, False),
        ({"json": "{"}, False),
        ({"structural_tag": True}, False),
        ({"json": {"a": nested(62)}}, True),
        ({"json": {"a": nested(64)}}, False),
        ({"json": {"a": NAN}}, False),
        ({"regex": "a", "choice": ["b"]}, False),
        ({"regex": "a", "json_object": False}, True),
        ({}, False),
        ({"regex": "a", "start_after_token_ids": [0] * 63 + [2**32 - 1]}, True),
        ({"regex": "a", "start_after_token_ids": [0] * 65}, False),
        ({"regex": "a", "start_after_token_ids": [2**32]}, False),
        ({"regex": "a", "start_after_token_ids": [-1]}, False),
        ({"regex": "a", "start_after_token_ids": [True]}, False),
        ({"json": {}, "whitespace_pattern": ""}, False),
        ({"json": {}, "disable_any_whitespace": 1}, False),
        ({"json": {}, "disable_additional_properties": 0}, False),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_constraint_takes_its_bounds_and_nothing_beyond(fields: dict[str, Any], is_good: bool) -> None:
    if is_good:
        assert StructuredOutputsParams(**fields).kind in fields
        return
    with pytest.raises(InvalidRequest) as caught:
        StructuredOutputsParams(**fields)
    assert caught.value.field == "structured_outputs"


def test_a_constraint_is_stored_as_compact_text_and_its_choices_once() -> None:
    assert StructuredOutputsParams(json={"a": ["é", 1]}).json == '{"a":["é",1]}'
    assert StructuredOutputsParams(json='{ "a" : 1 }').json == '{"a":1}'
    assert StructuredOutputsParams(choice=["b", "a", "b"]).choice == ("b", "a")
    constraint = StructuredOutputsParams(regex="a", start_after_token_ids=[3, 3])
    assert constraint.start_after_token_ids == (3, 3), "a run may have a token twice"
    assert (constraint.disable_any_whitespace, constraint.disable_additional_properties) == (False, False)

"""The table of sampling fields row by row, and what messages say of values out of bounds, word by word."""

import math
from typing import Any

import pytest

from pagoda_common.errors import InvalidRequest
from pagoda_common.params.beam_search import BeamSearchParams
from pagoda_common.params.fields import FINITE, UNSIGNED_32, SamplingField, names_as_in_chat, names_by_chat_name
from pagoda_common.params.logprobs_bound import exceeds_max_logprobs
from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_common.params.outputs import CompletionOutput, RequestStateStats, SequenceDelta
from pagoda_common.params.pooling_params import POOLED, TASKS, PoolingParams, task_refusal
from pagoda_common.params.sampling_params import SAMPLING_FIELDS, RequestOutputKind, SamplingParams
from pagoda_common.params.structured_outputs import StructuredOutputsParams
from pagoda_common.params.truncation import truncation_of

INF = math.inf
ALL4 = ("chat", "completions", "responses", "messages")
ROWS: dict[str, tuple[str, tuple[str, ...], str | None, str | None, str, str | None, float, float, bool]] = {
    # kind, apis, proto, generation_config, search, column, low, high, is_low_open
    "n": ("integer", ALL4[:2], "n", None, "fine", None, 1, 16384, False),
    "presence_penalty": ("number", ALL4, "presence_penalty", None, "refused", "float32", -2, 2, False),
    "frequency_penalty": ("number", ALL4, "frequency_penalty", None, "refused", "float32", -2, 2, False),
    "repetition_penalty": (
        *("number", ALL4, "repetition_penalty", "repetition_penalty", "refused", "float32"),
        *(0, INF, True),
    ),
    "temperature": ("number", ALL4, "temperature", "temperature", "ignored", "float32", 0, 2, False),
    "top_p": ("number", ALL4, "top_p", "top_p", "ignored", "float32", 0, 1, True),
    "top_k": ("integer", ALL4, "top_k", "top_k", "ignored", "int64", -1, 2**31 - 1, False),
    "min_p": ("number", ALL4, "min_p", "min_p", "ignored", "float32", 0, 1, False),
    "seed": ("integer", ALL4, "seed", None, "fine", None, -(2**63), 2**64 - 1, False),
    "stop": ("texts", ALL4, None, None, "fine", None, -INF, INF, False),
    "stop_token_ids": ("token_ids", ALL4, "stop_token_ids", None, "fine", None, -INF, INF, False),
    "ignore_eos": ("flag", ALL4, "ignore_eos", None, "fine", None, -INF, INF, False),
    "max_tokens": ("integer", ALL4, "max_tokens", "max_new_tokens", "fine", None, 1, 2**31 - 1, False),
    "min_tokens": ("integer", ALL4, "min_tokens", None, "refused", "int64", 0, 2**31 - 1, False),
    "logprobs": ("integer", ALL4[:3], "logprobs", None, "fine", None, -1, INF, False),
    "prompt_logprobs": ("integer", ALL4[:2], "prompt_logprobs", None, "refused", None, -1, INF, False),
    "detokenize": ("flag", ALL4[:2], None, None, "fine", None, -INF, INF, False),
    "skip_special_tokens": ("flag", ALL4, None, None, "fine", None, -INF, INF, False),
    "spaces_between_special_tokens": ("flag", ALL4[:3], None, None, "fine", None, -INF, INF, False),
    "include_stop_str_in_output": ("flag", ALL4, None, None, "fine", None, -INF, INF, False),
    "logit_bias": ("other", ALL4, "logit_bias", None, "refused", None, -INF, INF, False),
    "allowed_token_ids": ("token_ids", ALL4, "allowed_token_ids", None, "refused", None, -INF, INF, False),
    "bad_words_token_ids": ("other", (), "bad_words_token_ids", None, "refused", None, -INF, INF, False),
    "bad_words": ("texts", ALL4, None, None, "refused", None, -INF, INF, False),
    "logprob_token_ids": ("token_ids", ALL4[:2], "logprob_token_ids", None, "refused", None, -INF, INF, False),
    "truncate_prompt_tokens": ("integer", ALL4[:3], None, None, "fine", None, -1, 2**31 - 1, False),
    "structured_outputs": ("other", ALL4, "structured_output", None, "fine", None, -INF, INF, False),
    "extra_args": ("other", ALL4, "extra_args_json", None, "refused", None, -INF, INF, False),
    "output_kind": ("other", (), None, None, "fine", None, -INF, INF, False),
    "logits_processors": ("other", (), None, None, "fine", None, -INF, INF, False),
}


def test_the_table_has_its_rows_in_order() -> None:
    assert list(SAMPLING_FIELDS) == list(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_a_row_says_where_its_field_goes(name: str) -> None:
    row = SAMPLING_FIELDS[name]
    told = (row.kind, row.apis, row.proto, row.generation_config, row.search, row.column)
    assert (*told, row.low, row.high, row.is_low_open) == ROWS[name]
    assert row.name == name


def test_what_may_be_none_and_how_many_token_ids_there_are() -> None:
    assert [name for name, row in SAMPLING_FIELDS.items() if row.is_optional] == [
        *("seed", "max_tokens", "logprobs", "prompt_logprobs", "allowed_token_ids", "truncate_prompt_tokens"),
    ]
    assert {name: row.max_items for name, row in SAMPLING_FIELDS.items() if row.max_items is not None} == {
        "stop_token_ids": 1024,
        "allowed_token_ids": 16384,
        "logprob_token_ids": 128,
    }


def test_names_that_bodies_have_of_their_own() -> None:
    assert {name: dict(row.names) for name, row in SAMPLING_FIELDS.items() if row.names} == {
        "stop": {"messages": "stop_sequences"},
        "max_tokens": {"responses": "max_output_tokens"},
        "logprobs": {"chat": "top_logprobs", "responses": "top_logprobs"},
        "truncate_prompt_tokens": {"responses": "truncation"},
        "extra_args": dict.fromkeys(ALL4, "vllm_xargs"),
    }
    row = SAMPLING_FIELDS["logprobs"]
    assert [row.name_in(api) for api in ("chat", "completions", "responses", "messages")] == [
        *("top_logprobs", "logprobs", "top_logprobs", None),
    ]
    assert names_by_chat_name(SAMPLING_FIELDS, "responses") == {
        "max_tokens": "max_output_tokens",
        "logprobs": "top_logprobs",
        "truncate_prompt_tokens": "truncation",
        "extra_args": "vllm_xargs",
    }
    assert names_by_chat_name(SAMPLING_FIELDS, "messages") == {"stop": "stop_sequences", "extra_args": "vllm_xargs"}
    assert names_by_chat_name(SAMPLING_FIELDS, "completions") == {
        "top_logprobs": "logprobs",
        "extra_args": "vllm_xargs",
    }
    alike = names_as_in_chat(SAMPLING_FIELDS, "messages")
    assert alike == tuple(
        *(
            [
                name if name != "extra_args" else "vllm_xargs"
                for name, row in ROWS.items()
                if row[1] == ALL4 and name != "stop"
            ],
        )
    )
    assert "logprobs" not in names_as_in_chat(SAMPLING_FIELDS, "completions")
    assert "top_logprobs" in names_as_in_chat(SAMPLING_FIELDS, "responses")


BOUNDS: list[tuple[Any, str]] = [
    (SAMPLING_FIELDS["temperature"], "in [0, 2]"),
    (SAMPLING_FIELDS["top_p"], "in (0, 1]"),
    (SAMPLING_FIELDS["repetition_penalty"], "finite and greater than 0"),
    (FINITE, "finite"),
    (SAMPLING_FIELDS["logprobs"], "at least -1"),
    (SAMPLING_FIELDS["n"], "between 1 and 16384"),
    (SAMPLING_FIELDS["stop_token_ids"], "at most 1024 token ids"),
    (SAMPLING_FIELDS["ignore_eos"], ""),
    (SAMPLING_FIELDS["stop"], ""),
    (UNSIGNED_32, "between 0 and 4294967295"),
]


@pytest.mark.parametrize(("row", "bound"), BOUNDS)
def test_the_words_of_a_bound(row: SamplingField, bound: str) -> None:
    assert row.bound == bound


def test_a_field_is_set_when_it_is_not_its_default() -> None:
    row = SAMPLING_FIELDS["top_k"]
    assert [row.is_set(value) for value in (None, 0, -1, 1)] == [False, False, True, True]
    stop = SAMPLING_FIELDS["stop"]
    assert [stop.is_set(value) for value in (None, [], (), {}, "", "a", ["a"])] == [False] * 5 + [True] * 2


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n must be between 1 and 16384, got 0"),
    ({"n": "1"}, "n must be an integer, got '1'"),
    ({"temperature": 3}, "temperature must be in [0, 2], got 3"),
    ({"temperature": None}, "temperature must be a number, got None"),
    ({"top_p": 0}, "top_p must be in (0, 1], got 0"),
    ({"repetition_penalty": 0}, "repetition_penalty must be finite and greater than 0, got 0"),
    ({"logprobs": -2}, "logprobs must be at least -1, got -2"),
    ({"stop_token_ids": "12"}, "stop_token_ids must be a list of token ids, got '12'"),
    ({"stop_token_ids": [1] * 1025}, "stop_token_ids must have at most 1024 token ids, got 1025"),
    ({"stop_token_ids": [-1]}, "stop_token_ids must be between 0 and 4294967295, got -1"),
    ({"max_tokens": 4, "min_tokens": 5}, "min_tokens must be at most max_tokens (4), got 5"),
    ({"stop": 1}, "stop must be a string or a list of strings, got 1"),
    ({"stop": ["a"] * 129}, "stop must have at most 128 strings, got 129"),
    ({"stop": ["a", ""]}, "stop must not contain an empty string"),
    ({"stop": ["é" * 2049]}, "stop must have at most 4096 bytes each, got 4098"),
    ({"stop": ["a"], "detokenize": False}, "stop strings need detokenize=True"),
    ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias must have at most 1024 entries, got 1025"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias must be between 0 and 4294967295, got -1"),
    ({"logit_bias": {1: "1"}}, "logit_bias must be a number, got '1'"),
    ({"logit_bias": {1: INF}}, "logit_bias must be finite, got inf"),
    ({"allowed_token_ids": ()}, "allowed_token_ids must not be empty"),
    (
        {"logprob_token_ids": [1, 2], "logprobs": 3},
        "logprobs must be the number of logprob_token_ids (2), got 3",
    ),
    ({"bad_words": "a"}, "bad_words must be a list of strings, got 'a'"),
    ({"bad_words": ["a"] * 129}, "bad_words must be at most 128 token sequences, got 129"),
    ({"bad_words_token_ids": [[1]] * 129}, "bad_words must be at most 128 token sequences, got 129"),
    ({"bad_words": [" "]}, "bad_words must not contain an empty string"),
    ({"bad_words": ["a" * 4097]}, "bad_words must have at most 4096 bytes each, got 4097"),
    ({"bad_words_token_ids": [[1] * 257]}, "bad_words must have at most 256 tokens each, got 257"),
    ({"extra_args": [1]}, "extra_args must be an object, got [1]"),
    ({"extra_args": {1: 2}}, "extra_args must have strings as keys, got 1"),
    ({"extra_args": {"a": 2**63}}, f"extra_args: integers must fit 64 bits, got {2**63}"),
    ({"extra_args": {"a": math.nan}}, "extra_args: numbers must be finite, got nan"),
    ({"extra_args": {"a": {1}}}, "extra_args: values must be of JSON's types, got {1}"),
    ({"extra_args": {"a": [1] * 5000}}, "extra_args must have at most 4096 values, got more"),
    ({"extra_args": {"a": "x" * 40_000}}, "extra_args must have at most 32768 bytes, got more"),
    ({"structured_outputs": 1}, "structured_outputs must be StructuredOutputsParams, got 1"),
    (
        {"logits_processors": []},
        "logits_processors are not per request: load a class with --logits-processors (or logits_processors of LLM) "
        "and give its arguments in extra_args",
    ),
    ({"temperature": 0, "n": 2}, "n must be 1 when temperature is 0 (greedy), got 2"),
]


@pytest.mark.parametrize(("values", "message"), REFUSALS, ids=[text[:50] for _, text in REFUSALS])
def test_what_a_refusal_says(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**values)
    assert str(caught.value) == message


def test_the_bytes_of_extra_args_are_counted_exactly() -> None:
    """Two of the object, those of the key and of the text; four of each character of a text that is not ASCII."""
    SamplingParams(extra_args={"ab": "x" * (32_768 - 4)})
    SamplingParams(extra_args={"ab": "é" * 8191})
    SamplingParams(extra_args={"ab": [1] * 4094})
    SamplingParams(extra_args={"a" * (32_768 - 4): 1})
    for one_more in ({"ab": "x" * (32_768 - 3)}, {"ab": "é" * 8192}, {"ab": [1] * 4095}, {"a" * (32_768 - 3): 1}):
        with pytest.raises(InvalidRequest, match="got more"):
            SamplingParams(extra_args=one_more)


def test_the_size_of_what_is_large() -> None:
    assert SamplingParams().num_bytes == 0
    assert SamplingParams(extra_args={"a": 1}).num_bytes == 32_768
    assert SamplingParams(extra_args={}).num_bytes == 0
    assert SamplingParams(logit_bias={1: 1.0, 2: 1.0}).num_bytes == 24
    assert SamplingParams(allowed_token_ids=[1, 2, 3]).num_bytes == 12
    assert SamplingParams(bad_words_token_ids=[[1, 2], [3]]).num_bytes == 12
    regex = StructuredOutputsParams(regex="abc")
    choice = StructuredOutputsParams(choice=["ab", "cde"])
    anything = StructuredOutputsParams(json_object=True)
    assert [one.num_bytes for one in (regex, choice, anything)] == [3, 5, 0]
    both = SamplingParams(structured_outputs=regex, logit_bias={1: 1.0}, allowed_token_ids=[1])
    assert both.num_bytes == 3 + 12 + 4


def test_what_is_not_text_is_shared_by_kinds_of_output() -> None:
    assert [(one.name, one.value) for one in RequestOutputKind] == [("CUMULATIVE", 0), ("DELTA", 1), ("FINAL_ONLY", 2)]
    assert SamplingParams(stop=("x",), stop_token_ids=(2, 1)).stop_token_ids == [2, 1]
    assert SamplingParams(allowed_token_ids=[2, 1, 2]).allowed_token_ids == (2, 1)
    assert SamplingParams(logprob_token_ids=[2, 1, 2]).logprob_token_ids == (2, 1)
    assert SamplingParams(bad_words=("a", "b")).bad_words == ["a", "b"]
    assert SamplingParams().stop_strings == ()
    assert "bad_words_token_ids" not in repr(SamplingParams())


def test_pooling_takes_its_bounds() -> None:
    assert TASKS == ("embed", "token_embed", "classify", "token_classify", "score", "sparse")
    plain = PoolingParams()
    assert (plain.task, plain.dimensions, plain.second_text_start) == (None, None, 0)
    assert (plain.normalizes, plain.max_document_tokens) == (None, 0)
    assert PoolingParams(dimensions=1).dimensions == 1
    assert PoolingParams(dimensions=1 << 20).dimensions == 1 << 20
    for size in (0, (1 << 20) + 1):
        with pytest.raises(InvalidRequest) as caught:
            PoolingParams(dimensions=size)
        assert str(caught.value) == f"dimensions is {size}, must be between 1 and 1048576"
        assert caught.value.field == "dimensions"
    with pytest.raises(InvalidRequest) as caught:
        PoolingParams(task="reward")  # type: ignore[arg-type]  # wrong on purpose
    told = "task is 'reward', must be one of embed, token_embed, classify, token_classify, score, sparse"
    assert (str(caught.value), caught.value.field) == (told, "task")
    with pytest.raises(InvalidRequest) as caught:
        PoolingParams(extra_kwargs={"other": 1})
    assert (str(caught.value), caught.value.field) == ("extra_kwargs has 'other', which is not known", "extra_kwargs")
    with pytest.raises(InvalidRequest) as caught:
        PoolingParams(extra_kwargs={"max_tokens_per_doc": -1})
    told = "max_tokens_per_doc must be a non-negative integer, got -1"
    assert (str(caught.value), caught.value.field) == (told, "extra_kwargs")
    kept = [PoolingParams(extra_kwargs={"max_tokens_per_doc": count}).max_document_tokens for count in (0, 1, 7, None)]
    assert kept == [0, 1, 7, 0]
    assert PoolingParams(extra_kwargs={"max_tokens_per_query": 3}).max_query_tokens == 3
    with pytest.raises(InvalidRequest, match="max_tokens_per_query must be a non-negative integer, got -2"):
        PoolingParams(extra_kwargs={"max_tokens_per_query": -2})


@pytest.mark.parametrize(
    ("normalize", "use_activation", "is_normalized"),
    [(None, None, None), (None, False, False), (None, True, True), (True, False, True), (False, True, False)],
)
def test_normalize_has_two_names(
    normalize: bool | None, use_activation: bool | None, is_normalized: bool | None
) -> None:
    assert PoolingParams(normalize=normalize, use_activation=use_activation).normalizes is is_normalized


@pytest.mark.parametrize(
    ("task", "tasks", "message"),
    [
        (
            "plugin",
            ("embed", "token_embed"),
            "No IOProcessor plugin installed. There are none for Pagoda; of this model, it can embed, token_embed.",
        ),
        (
            "token_embed",
            ("classify",),
            'Try switching the model\'s pooling_task via --pooler-config \'{"task": "token_embed"}\': now it can '
            "classify.",
        ),
        (
            "classify",
            ("token_embed",),
            "Unsupported task: 'classify'. Classification API is not supported by this model: it can token_embed.",
        ),
        (
            "embed",
            ("classify",),
            "Unsupported task: 'embed'. Embedding API is not supported by this model: it can classify.",
        ),
        (
            "token_embed",
            (),
            "Unsupported task: 'token_embed'. Embedding API is not supported by this model: it can only generate.",
        ),
        (
            "token_classify",
            ("embed",),
            "Unsupported task: 'token_classify'. Classification API is not supported by this model: it can embed.",
        ),
        (
            "score",
            ("embed",),
            "Unsupported task: 'score'. This model does not support the Scoring API: it can embed.",
        ),
        (
            "score",
            ("classify", "token_classify"),
            "Unsupported task: 'score'. Scoring API is only enabled for num_labels == 1: it can classify, "
            "token_classify.",
        ),
        ("x" * 41, ("embed",), f"Unsupported task: '{'x' * 40}'. It is not supported by this model: it can embed."),
    ],
)
def test_why_a_model_is_not_asked_for_a_task(task: str, tasks: tuple[str, ...], message: str) -> None:
    refusal = task_refusal(task, tasks, ("token_embed",) if tasks == ("classify",) else ())
    assert (str(refusal), refusal.field) == (message, "task")


def test_a_pooled_prompt_samples_nothing() -> None:
    assert (POOLED.temperature, POOLED.max_tokens, POOLED.detokenize, POOLED.n) == (0.0, 1, False, 1)


def test_a_lora_adapter_has_a_name_that_can_be_printed() -> None:
    adapter = LoraAdapter(name="a", path="/b", version=3, base_model_name="c")
    assert (adapter.key, adapter.digest_text, adapter.is_pinned) == (("a", "/b", 3), b"a\0/b\0" + b"3", False)
    assert adapter.pinned(True) == LoraAdapter(name="a", path="/b", version=3, base_model_name="c", is_pinned=True)
    assert adapter.pinned(True).pinned(False) == adapter
    plain = LoraAdapter(name="a")
    assert (plain.path, plain.version, plain.base_model_name, plain.is_pinned) == ("", 0, "", False)
    LoraAdapter(name="a" * 512, path="b" * 4096)
    for fields, message, field in (
        ({"name": "a" * 513}, "lora name has 513 characters, must have at most 512", "name"),
        ({"name": "a", "path": "b" * 4097}, "lora path has 4097 characters, must have at most 4096", "path"),
        ({"name": ""}, "lora name is '', must not be empty", "name"),
        ({"name": "a\n"}, "lora name and path must have printable characters alone", "name"),
        ({"name": "a", "path": "b\0"}, "lora name and path must have printable characters alone", "name"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            LoraAdapter(**fields)  # type: ignore[arg-type]  # texts alone
        assert (str(caught.value), caught.value.field) == (message, field)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"beam_width": 0}, "beam_width must be at least 1, got 0"),
        ({"length_penalty": "1"}, "length_penalty must be a finite number, got '1'"),
        ({"length_penalty": -10.5}, "length_penalty must be between -10 and 10, got -10.5"),
        ({"early_stopping": True}, "early_stopping must be heuristic, first or never, got True"),
    ],
)
def test_why_a_search_is_refused(value: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        BeamSearchParams(**{"beam_width": 2} | value)
    assert str(caught.value) == message


def test_why_a_truncation_is_refused() -> None:
    for num, max_tokens, message in (
        (
            1,
            10,
            "max_tokens must be less than the model's maximum context length (10) with truncate_prompt_tokens, got 10",
        ),
        (-2, 3, "truncate_prompt_tokens must be at least -1, got -2"),
        (
            10,
            None,
            "truncate_prompt_tokens must be at most 9 (the context without max_tokens), got 10. "
            "Please request a smaller truncation size.",
        ),
    ):
        with pytest.raises(InvalidRequest) as caught:
            truncation_of(num, None, max_tokens=max_tokens, max_model_len=10)
        assert str(caught.value) == message
    kept = truncation_of(9, None, max_tokens=None, max_model_len=10)
    assert kept is not None
    assert (kept.num_tokens, kept.side) == (9, "left")


@pytest.mark.parametrize(
    ("value", "bound", "is_over"),
    [
        (None, 0, False),
        (5, 5, False),
        (6, 5, True),
        (-1, 99, True),
        (-1, 100, False),
        (10**6, -1, False),
        (0, 0, False),
    ],
)
def test_log_probabilities_have_a_bound_of_the_engine(value: int | None, bound: int, is_over: bool) -> None:
    assert exceeds_max_logprobs(value, max_logprobs=bound, vocab_size=100) is is_over


def test_outputs_begin_empty() -> None:
    done = CompletionOutput(index=0, text="a", token_ids=[1])
    assert not done.finished()
    done.finish_reason = "stop"
    assert done.finished()
    delta = SequenceDelta(index=1, text="", token_ids=[5], offset=2)
    assert delta.is_empty, "tokens without text are nothing to read"
    assert not SequenceDelta(index=1, text="a", token_ids=[], offset=2).is_empty
    assert delta.token_text_offsets == []
    filled = RequestStateStats(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7)
    assert filled.copy() == filled
    assert filled.copy() is not filled

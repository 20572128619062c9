"""--logprobs-mode: raw and processed, normalised or not, against a plain reference; penalties step by step."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from pagoda_common.params.sampling_params import SamplingParams
from pagoda_worker.sampling.logprobs import logprob_columns
from tests.unit.worker.driver import Driver, Tracked

PROMPT = list(range(10, 43))
PENALTIES: dict[str, Any] = {"presence_penalty": 0.7, "frequency_penalty": 0.9, "repetition_penalty": 1.4}
NUM_TOKENS = 12


def generate(mode: str, **params: Any) -> Tracked:
    driver = Driver("pagoda-tiny", logprobs_mode=mode, max_logprobs=-1)
    asked = SamplingParams(**{"max_tokens": None, "logprobs": -1, "prompt_logprobs": 1, "seed": 3} | params)
    return driver.generate([PROMPT], asked, max_tokens=NUM_TOKENS)[0]


def rows(sequence: Tracked) -> np.ndarray:
    """[tokens, vocabulary]."""
    return np.array([[entries[token] for token in sorted(entries)] for entries in sequence.logprobs])


def penalised(logits: np.ndarray, output: list[int]) -> np.ndarray:
    result = logits.copy()
    for token in set(PROMPT) | set(output):
        result[token] = result[token] / 1.4 if result[token] > 0 else result[token] * 1.4
    for token in set(output):
        result[token] -= 0.9 * output.count(token) + 0.7
    return result


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@pytest.fixture(scope="module")
def raw() -> Tracked:
    return generate("raw_logits", temperature=0, **PENALTIES)


def test_penalties_count_what_was_generated_step_by_step(raw: Tracked) -> None:
    for step, logits in enumerate(rows(raw)):
        assert int(penalised(logits, raw.output[:step]).argmax()) == raw.output[step]
    assert len(set(raw.output)) > 3


def test_processed_logits_are_those_that_were_sampled_from(raw: Tracked) -> None:
    sequence = generate("processed_logits", temperature=0, **PENALTIES)
    assert sequence.output == raw.output
    for step, (logits, processed) in enumerate(zip(rows(raw), rows(sequence), strict=True)):
        np.testing.assert_allclose(processed, penalised(logits, raw.output[:step]), atol=2e-4)


def test_raw_logprobs_are_the_normalised_raw_logits(raw: Tracked) -> None:
    sequence = generate("raw_logprobs", temperature=0, **PENALTIES)
    assert sequence.output == raw.output
    np.testing.assert_allclose(rows(sequence), log_softmax(rows(raw)), atol=2e-4)
    assert sequence.ranks != [1] * NUM_TOKENS  # raw ranks: the penalties chose others


def test_processed_logprobs_include_temperature_and_filters(raw: Tracked) -> None:
    params: dict[str, Any] = {"temperature": 0.6, "top_k": 5, **PENALTIES}
    sequence = generate("processed_logprobs", **params)
    plain = generate("raw_logits", **params)
    assert sequence.output == plain.output
    for step, (logits, processed) in enumerate(zip(rows(plain), rows(sequence), strict=True)):
        expected = penalised(logits, plain.output[:step]) / 0.6
        kept = np.argsort(-expected)[:5]
        assert set(np.flatnonzero(np.isfinite(processed))) == set(kept)
        np.testing.assert_allclose(processed[kept], log_softmax(expected[kept]), atol=2e-4)
        assert math.isclose(np.exp(processed[kept]).sum(), 1.0, abs_tol=1e-3)


def test_more_entries_than_the_vocabulary_has_are_all_of_it() -> None:
    columns = logprob_columns(torch.randn(2, 5), np.array([1, 3]), np.array([9, 2]))
    assert columns is not None
    assert columns.counts.tolist() == [6, 3]
    assert sorted(columns.token_ids[1:6].tolist()) == [0, 1, 2, 3, 4]


def test_prompts_are_raw_in_every_mode_and_normalised_where_the_output_is() -> None:
    values = {}
    for mode in ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"):
        [chunk] = generate(mode, temperature=0, **PENALTIES).prompt_logprobs
        values[mode] = chunk.logprobs.logprobs
    np.testing.assert_array_equal(values["raw_logprobs"], values["processed_logprobs"])
    np.testing.assert_array_equal(values["raw_logits"], values["processed_logits"])
    assert (values["raw_logprobs"] <= 0).all()
    assert (values["raw_logits"] > 0).any()

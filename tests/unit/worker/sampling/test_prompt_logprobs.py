"""Log probabilities of long prompts: more rows than are held at once, several prompts in a step."""

from dataclasses import replace

import numpy as np
import pytest

from pagoda_common.params.sampling_params import SamplingParams
from pagoda_worker.sampling.prompt_logprobs import MAX_PROMPT_LOGPROB_ROWS
from tests.unit.worker.driver import Driver, Tracked

NUM_TOP = 2
PARAMS = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=NUM_TOP)
LENGTHS = (2 * MAX_PROMPT_LOGPROB_ROWS + 90, MAX_PROMPT_LOGPROB_ROWS + 2, 40)
"""Three pieces of rows, one and a single row, and less than one."""
ROUNDING = 1e-4
"""Other sizes of matrices sum in another order. Tokens as close as this may change places."""


def described(sequence: Tracked) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """[n - 1, 1 + top] tokens and log probabilities, and [n - 1] ranks, of the tokens after the first."""
    place, tokens, values, ranks = 1, [], [], []
    for chunk in sequence.prompt_logprobs:
        columns = chunk.logprobs
        (width,) = {*columns.counts.tolist()}
        assert chunk.start == place
        assert columns.rows.tolist() == list(range(columns.counts.size))
        place += columns.counts.size
        tokens.append(columns.token_ids.reshape(-1, width))
        values.append(columns.logprobs.reshape(-1, width))
        ranks.append(columns.sampled_ranks)
    return np.concatenate(tokens), np.concatenate(values), np.concatenate(ranks)


@pytest.fixture(scope="module")
def driver() -> Driver:
    return Driver("pagoda-tiny")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = np.random.default_rng(5)
    return [generator.integers(3, 2000, length).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def distributions(driver: Driver, prompts: list[list[int]]) -> list[np.ndarray]:
    """[n - 1, vocab_size] log probabilities of each prompt, by token, computed in short chunks."""
    found = []
    for sequence in driver.generate(prompts, replace(PARAMS, prompt_logprobs=-1), max_tokens=1, chunk=64):
        tokens, values, _ = described(sequence)
        by_token = np.full((tokens.shape[0], tokens.shape[1] - 1), np.nan)
        np.put_along_axis(by_token, tokens[:, 1:], values[:, 1:], axis=1)
        assert not np.isnan(by_token).any()
        found.append(by_token)
    return found


@pytest.mark.parametrize("chunk", [10_000, MAX_PROMPT_LOGPROB_ROWS + 44])
def test_long_prompts_are_described_as_in_short_chunks(
    driver: Driver, prompts: list[list[int]], distributions: list[np.ndarray], chunk: int
) -> None:
    whole = driver.generate(prompts, PARAMS, max_tokens=1, chunk=chunk)
    for prompt, sequence, right in zip(prompts, whole, distributions, strict=True):
        tokens, values, ranks = described(sequence)
        assert tokens.shape == (len(prompt) - 1, 1 + NUM_TOP)
        assert tokens[:, 0].tolist() == prompt[1:], "every token but the first, once"
        assert (tokens[:, 1] != tokens[:, 2]).all()
        np.testing.assert_allclose(values, np.take_along_axis(right, tokens, axis=1), atol=ROUNDING)
        np.testing.assert_allclose(values[:, 1:], -np.sort(-right, axis=1)[:, :NUM_TOP], atol=ROUNDING)
        own = np.take_along_axis(right, tokens[:, :1], axis=1)
        assert (ranks > (right > own + ROUNDING).sum(axis=1)).all()
        assert (ranks <= 1 + (right > own - ROUNDING).sum(axis=1)).all()

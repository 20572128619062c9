"""Log probabilities of long prompts: more rows than are held at once, several prompts in a step."""

import numpy as np
import pytest

from pagoda_common.params.sampling_params import SamplingParams
from pagoda_worker.sampling.prompt_logprobs import MAX_PROMPT_LOGPROB_ROWS
from tests.unit.worker.driver import Driver, Tracked

NUM_TOP = 2
PARAMS = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=NUM_TOP)
LENGTHS = (2 * MAX_PROMPT_LOGPROB_ROWS + 90, MAX_PROMPT_LOGPROB_ROWS + 2, 40)
"""Three pieces of rows, one and a single row, and less than one."""


def described(sequence: Tracked) -> tuple[list[int], np.ndarray, np.ndarray, np.ndarray]:
    """[n - 1, 1 + NUM_TOP] tokens and log probabilities, and [n - 1] ranks, of the tokens after the first."""
    place, tokens, values, ranks = 1, [], [], []
    for chunk in sequence.prompt_logprobs:
        columns = chunk.logprobs
        assert chunk.start == place
        assert columns.rows.tolist() == list(range(columns.counts.size))
        assert columns.counts.tolist() == [1 + NUM_TOP] * columns.counts.size
        place += columns.counts.size
        tokens.append(columns.token_ids.reshape(-1, 1 + NUM_TOP))
        values.append(columns.logprobs.reshape(-1, 1 + NUM_TOP))
        ranks.append(columns.sampled_ranks)
    return sequence.prompt, np.concatenate(tokens), np.concatenate(values), np.concatenate(ranks)


@pytest.mark.parametrize("chunk", [10_000, MAX_PROMPT_LOGPROB_ROWS + 44])
def test_long_prompts_are_described_as_in_short_chunks(chunk: int) -> None:
    generator = np.random.default_rng(5)
    prompts = [generator.integers(3, 2000, length).tolist() for length in LENGTHS]
    driver = Driver("pagoda-tiny")
    whole = driver.generate(prompts, PARAMS, max_tokens=1, chunk=chunk)
    pieces = driver.generate(prompts, PARAMS, max_tokens=1, chunk=64)
    for sequence, expected in zip(whole, pieces, strict=True):
        prompt, tokens, values, ranks = described(sequence)
        assert tokens[:, 0].tolist() == prompt[1:], "every token but the first, once"
        _, right_tokens, right_values, right_ranks = described(expected)
        assert (tokens == right_tokens).all()
        assert (ranks == right_ranks).all()
        np.testing.assert_allclose(values, right_values, atol=1e-4)

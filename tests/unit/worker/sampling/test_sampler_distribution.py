"""20,000 draws for each parameter follow the distribution that a plain reference gives: chi-square, fixed seeds."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from pagoda_common.params.sampling_params import SamplingParams
from pagoda_worker.sampling.logits_state import LogitsBatch
from pagoda_worker.sampling.sampler import Sampler
from pagoda_worker.sampling.sampling_columns import SamplingColumns

VOCAB_SIZE = 60
NUM_SLOTS, NUM_ROUNDS = 2000, 10
PROMPT, OUTPUT, EOS = (3, 17, 17, 30), (5, 9, 9, 9, 30, 11), (2,)

Floats = npt.NDArray[np.float64]

CASES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "low temperature": {"temperature": 0.4},
    "high temperature": {"temperature": 1.8},
    "top_p": {"top_p": 0.7},
    "top_k": {"top_k": 7},
    "min_p": {"min_p": 0.15},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 0.8},
    "negative penalties": {"presence_penalty": -1.0, "frequency_penalty": -0.5},
    "repetition_penalty": {"repetition_penalty": 1.6},
    "logit_bias": {"logit_bias": {4: 2.5, 9: -3.0, 40: -100.0, 41: 1.0}},
    "allowed_token_ids": {"allowed_token_ids": (1, 5, 9, 21, 22, 23, 59)},
    "bad_words": {"bad_words_token_ids": ((7,), (30, 11, 12), (11, 13), (5, 14))},
    "min_tokens": {"min_tokens": len(OUTPUT) + 1, "stop_token_ids": (8, 9)},
    "filters after penalties": {"temperature": 0.7, "top_k": 20, "top_p": 0.85, "repetition_penalty": 1.3},
    "everything": {
        "temperature": 1.3,
        "top_k": 12,
        "top_p": 0.95,
        "min_p": 0.02,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
        "logit_bias": {5: 2.0, 21: -1.0},
        "allowed_token_ids": tuple(range(2, 40)),
        "bad_words_token_ids": ((11, 20),),
        "min_tokens": len(OUTPUT) + 5,
    },
}


def reference(logits: Floats, params: SamplingParams) -> Floats:
    """Probabilities by the documentation's own words, one token at a time."""
    scores = logits.copy()
    for token in range(VOCAB_SIZE):
        if params.allowed_token_ids and token not in params.allowed_token_ids:
            scores[token] = -math.inf
        scores[token] += (params.logit_bias or {}).get(token, 0.0)
    for *beginning, last in params.bad_words_token_ids:
        if not beginning or tuple(beginning) == OUTPUT[-len(beginning) :]:
            scores[last] = -math.inf
    if len(OUTPUT) < params.min_tokens:
        for token in (*EOS, *(params.stop_token_ids or ())):
            scores[token] = -math.inf
    for token in set(PROMPT) | set(OUTPUT):
        better = scores[token] > 0
        scores[token] = (
            scores[token] / params.repetition_penalty if better else scores[token] * params.repetition_penalty
        )
    for token in set(OUTPUT):
        scores[token] -= params.frequency_penalty * OUTPUT.count(token) + params.presence_penalty
    scores = scores / params.temperature
    probs = np.exp(scores - scores.max())
    probs /= probs.sum()
    probs[probs < params.min_p * probs.max()] = 0.0
    ranking = sorted(range(VOCAB_SIZE), key=lambda token: -probs[token])
    if params.top_k:
        probs[ranking[params.top_k :]] = 0.0
    probs /= probs.sum()
    mass, kept = 0.0, set()
    for token in ranking:
        if mass < params.top_p:
            kept.add(token)
        mass += probs[token]
    probs[[token for token in range(VOCAB_SIZE) if token not in kept]] = 0.0
    result: Floats = probs / probs.sum()
    return result


def critical_value(degrees: int) -> float:
    """Of chi-square at p = 0.001 (Wilson and Hilferty 1931)."""
    part = 2 / (9 * degrees)
    return float(degrees * (1 - part + 3.0902 * math.sqrt(part)) ** 3)


@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_reference(name: str) -> None:
    logits = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(3)) * 1.5
    params = SamplingParams(**{"temperature": 1.0, "max_tokens": None, "seed": 0} | CASES[name])
    columns = SamplingColumns(max_num_seqs=NUM_SLOTS, vocab_size=VOCAB_SIZE)
    for slot in range(NUM_SLOTS):
        columns.set(slot, params, EOS)
    log = np.array(PROMPT + OUTPUT, dtype=np.int32)
    batch = LogitsBatch(
        slots=np.arange(NUM_SLOTS),
        tokens=np.tile(log, (NUM_SLOTS, 1)),
        num_prompt_tokens=np.full(NUM_SLOTS, len(PROMPT)),
        num_tokens=np.full(NUM_SLOTS, log.size),
    )
    sampler, counts = Sampler(columns=columns), np.zeros(VOCAB_SIZE)
    for number in range(NUM_ROUNDS):
        columns.seed[:] = np.arange(NUM_SLOTS, dtype=np.uint64) + np.uint64(number * NUM_SLOTS + 12345)
        output = sampler.sample(logits.expand(NUM_SLOTS, -1), batch)
        assert not output.is_bad.any()
        counts += np.bincount(output.token_ids, minlength=VOCAB_SIZE)
    expected = reference(logits.double().numpy(), params) * counts.sum()
    assert counts[expected == 0].sum() == 0
    is_rare = expected < 5
    observed = np.append(counts[~is_rare], counts[is_rare].sum())
    wanted = np.append(expected[~is_rare], expected[is_rare].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    assert wanted.size >= 4
    chi_square = float(((observed - wanted) ** 2 / wanted).sum())
    assert chi_square < critical_value(wanted.size - 1), f"{chi_square} with {wanted.size - 1} degrees of freedom"

"""Random numbers, filters and penalties: known answers, plain references, distributions."""

import numpy as np
import pytest
import torch

from pagoda_kernels.sampling.apply_penalties import apply_token_penalties, count_tokens
from pagoda_kernels.sampling.philox import philox4x32, philox_keys
from pagoda_kernels.sampling.sample_tokens import filter_logits, sample_tokens, sample_tokens_reference
from pagoda_kernels.sampling.token_exponentials import token_exponentials, token_exponentials_reference


def test_philox_gives_the_published_answer() -> None:
    # Random123's known answer for counter 0; the others use counter words that are always 0 here.
    words = philox4x32(np.zeros(1, dtype=np.uint64), np.zeros(1, dtype=np.uint64))
    assert [f"{int(word):08x}" for word in words[:, 0]] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]


def test_keys_are_a_pure_function_of_seed_and_offset() -> None:
    generator = np.random.default_rng(0)
    seeds = generator.integers(0, 2**64, 1000, dtype=np.uint64)
    offsets = generator.integers(0, 2**40, 1000, dtype=np.uint64)
    together = philox_keys(seeds, offsets)
    alone = [philox_keys(seeds[i : i + 1], offsets[i : i + 1])[0] for i in range(1000)]
    assert together.tolist() == alone
    assert len(set(alone)) == 1000


def test_exponentials_equal_the_reference() -> None:
    keys = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 123456789])
    token_ids = torch.tensor([0, 1, 2, 150_000, 2**31])
    actual = token_exponentials(keys, token_ids)
    torch.testing.assert_close(actual, token_exponentials_reference(keys, token_ids))
    assert (actual > 0).all()
    assert torch.equal(token_exponentials(keys, token_ids.expand(6, -1)), actual)


@pytest.mark.parametrize("axis", ["seed", "offset", "token"])
def test_exponentials_are_exponential_along_seeds_offsets_and_tokens(axis: str) -> None:
    count, bins = 20_000, 50
    counter, fixed = np.arange(count, dtype=np.uint64), np.full(count, 7, dtype=np.uint64)
    if axis == "token":
        values = token_exponentials(torch.tensor([7]), torch.arange(count))[0]
    else:
        keys = philox_keys(counter, fixed) if axis == "seed" else philox_keys(fixed, counter)
        values = token_exponentials(torch.from_numpy(keys), torch.tensor([5]))[:, 0]
    uniforms = torch.exp(-values).numpy()
    observed = np.histogram(uniforms, bins=bins, range=(0, 1))[0]
    chi_square = float(((observed - count / bins) ** 2 / (count / bins)).sum())
    assert chi_square < 85.4  # 49 degrees of freedom, p = 0.001
    assert abs(np.corrcoef(uniforms[:-1], uniforms[1:])[0, 1]) < 0.03


def test_rounding_of_the_logits_hardly_ever_changes_a_draw() -> None:
    generator = torch.Generator().manual_seed(0)
    n = 2000
    logits = torch.randn(n, 3000, generator=generator) * 2
    noise = torch.randn(n, 3000, generator=generator) * 2e-6
    keys = torch.from_numpy(philox_keys(np.arange(n, dtype=np.uint64), np.zeros(n, np.uint64)))
    assert torch.equal(sample_tokens(logits, keys), sample_tokens(logits + noise, keys))


@pytest.mark.parametrize("vocab_size", [1, 5, 257, 5000])
@pytest.mark.parametrize("spread", [0.0, 1.0, 5.0])
@pytest.mark.parametrize("filters", ["", "k", "p", "m", "kp", "kpm"])
def test_filters_equal_the_reference(vocab_size: int, spread: float, filters: str) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    n = 16
    logits = torch.randn(n, vocab_size, generator=generator) * spread
    logits[:, ::3] = logits[:, :1].clone()  # many ties
    keys = torch.randint(-(2**63), 2**63 - 1, (n,), generator=generator)
    top_k = torch.randint(0, vocab_size + 2, (n,), generator=generator)
    top_k[::2] %= 50
    top_p = torch.rand(n, generator=generator) * 0.99 + 0.01
    top_p[::4] = 1.0
    options = {"k": ("top_k", top_k), "p": ("top_p", top_p), "m": ("min_p", torch.rand(n, generator=generator))}
    chosen = dict(options[letter] for letter in filters)
    expected = sample_tokens_reference(logits, keys, **chosen)
    assert sample_tokens(logits, keys, **chosen).tolist() == expected.tolist()
    for row in range(n):
        only = slice(row, row + 1)
        alone = sample_tokens(logits[only], keys[only], **{name: column[only] for name, column in chosen.items()})
        assert alone.tolist() == [int(expected[row])]


def test_a_token_without_probability_is_never_drawn() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 1.0, -torch.inf], [-torch.inf, 3.0, -torch.inf, -torch.inf]])
    for key in range(500):
        keys = torch.full((2,), key * 2**40)
        for options in ({}, {"top_p": torch.tensor([0.99, 0.99])}):
            first, second = sample_tokens(logits, keys, **options).tolist()
            assert first in (0, 2)
            assert second == 1


def test_draws_follow_the_distribution() -> None:
    count = 20_000
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(3))
    keys = torch.from_numpy(philox_keys(np.full(count, 42, np.uint64), np.arange(count, dtype=np.uint64)))
    expected = logits[0].softmax(-1).double() * count
    drawn = torch.bincount(sample_tokens(logits.expand(count, -1), keys), minlength=12)
    assert float(((drawn - expected) ** 2 / expected).sum()) < 31.3  # 11 degrees of freedom, p = 0.001


def test_draws_follow_the_filtered_distribution() -> None:
    count = 20_000
    logits = torch.randn(1, 400, generator=torch.Generator().manual_seed(3)) * 2
    keys = torch.from_numpy(philox_keys(np.arange(count, dtype=np.uint64), np.zeros(count, np.uint64)))
    kept = logits[0].topk(10).indices
    drawn = sample_tokens(logits.expand(count, -1), keys, top_k=torch.full((count,), 10))
    assert set(drawn.tolist()) == set(kept.tolist())
    expected = logits[0, kept].softmax(-1).double() * count
    observed = torch.bincount(drawn, minlength=400)[kept]
    assert float(((observed - expected) ** 2 / expected).sum()) < 27.9  # 9 degrees of freedom, p = 0.001


def test_penalties_equal_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    n, vocab_size, longest = 9, 30, 64
    logits = torch.randn(n, vocab_size, generator=generator)
    tokens = torch.randint(0, vocab_size, (n, longest), generator=generator)
    num_tokens = torch.tensor([1, 2, 15, 16, 17, 63, 64, 5, 5])
    num_prompt = torch.tensor([1, 1, 15, 1, 10, 63, 3, 4, 2])
    presence, frequency = torch.randn(n, generator=generator), torch.randn(n, generator=generator)
    repetition = torch.rand(n, generator=generator) + 0.5
    expected = logits.clone()
    for row in range(n):
        log = tokens[row, : num_tokens[row]].tolist()
        output = log[int(num_prompt[row]) :]
        for token in set(log):
            value = expected[row, token]
            expected[row, token] = value / repetition[row] if value > 0 else value * repetition[row]
        for token in set(output):
            expected[row, token] -= frequency[row] * output.count(token) + presence[row]
    in_prompt, counts = count_tokens(tokens, num_prompt, num_tokens, vocab_size=vocab_size)
    actual = apply_token_penalties(
        logits, in_prompt, counts, presence=presence, frequency=frequency, repetition=repetition
    )
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("filters", ["k", "p", "m", "kp", "kpm"])
def test_filtered_logits_keep_exactly_what_can_be_drawn(filters: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 40, generator=generator)
    logits[:, ::3] = logits[:, :1].clone()  # many ties
    count = 4000
    options = {
        "k": ("top_k", torch.tensor([7])),
        "p": ("top_p", torch.tensor([0.6])),
        "m": ("min_p", torch.tensor([0.3])),
    }
    chosen = dict(options[letter] for letter in filters)
    keys = torch.from_numpy(philox_keys(np.arange(count, dtype=np.uint64), np.zeros(count, np.uint64)))
    drawn = sample_tokens(
        logits.expand(count, -1), keys, **{name: value.expand(count) for name, value in chosen.items()}
    )
    kept = filter_logits(logits, **chosen)
    is_kept = torch.isfinite(kept[0])
    assert set(drawn.tolist()) == set(is_kept.nonzero().squeeze(1).tolist())
    assert torch.equal(kept[0, is_kept], logits[0, is_kept])
    assert torch.equal(filter_logits(logits, top_k=torch.tensor([0]), top_p=torch.tensor([1.0])), logits)

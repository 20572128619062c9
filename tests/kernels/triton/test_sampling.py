"""The Triton sampler draws the same tokens as PyTorch for the same keys; log probabilities equal a log softmax."""

import pytest
import torch

from pagoda_kernels.sampling.sample_tokens import sample_tokens, sample_tokens_reference
from pagoda_kernels.sampling.top_logprobs import top_logprobs, top_logprobs_reference
from pagoda_kernels.selection import use_references
from tests.kernels.triton.outputs import nan_filled_outputs


@pytest.mark.parametrize("vocab_size", [1, 5, 257, 5000])
@pytest.mark.parametrize("filters", ["", "k", "p", "m", "kp", "kpm"])
def test_tokens_equal_the_reference(vocab_size: int, filters: str) -> None:
    n = 6
    logits = torch.randn(n, vocab_size) * torch.tensor([0.0, 1.0, 5.0]).repeat(2)[:, None]
    logits[:, ::3] = logits[:, :1].clone()  # many ties
    keys = torch.randint(-(2**63), 2**63 - 1, (n,))
    temperature = torch.rand(n) + 0.5
    top_k = torch.randint(0, vocab_size + 2, (n,))
    top_k[::2] %= 50
    top_p = torch.rand(n) * 0.99 + 0.01
    top_p[::4] = 1.0
    options = {"k": ("top_k", top_k), "p": ("top_p", top_p), "m": ("min_p", torch.rand(n))}
    chosen = dict(options[letter] for letter in filters)
    with nan_filled_outputs():
        actual = sample_tokens(logits, keys, temperature=temperature, **chosen)
    assert actual.tolist() == sample_tokens_reference(logits / temperature[:, None], keys, **chosen).tolist()


def test_rows_may_be_a_part_of_wider_ones() -> None:
    logits, keys = torch.randn(5, 300), torch.randint(-(2**63), 2**63 - 1, (5,))
    narrow = logits[:, :200]
    assert sample_tokens(narrow, keys).tolist() == sample_tokens_reference(narrow, keys).tolist()


def test_many_draws_equal_those_of_torch() -> None:
    logits, keys = torch.randn(50, 1000) * 2, torch.randint(-(2**63), 2**63 - 1, (50,))
    top_p = torch.full((50,), 0.3)
    actual = sample_tokens(logits, keys, top_p=top_p)
    use_references(["sample_tokens"])
    try:
        assert torch.equal(actual, sample_tokens(logits, keys, top_p=top_p))
    finally:
        use_references(())


def test_a_token_without_probability_is_never_drawn() -> None:
    logits = torch.full((8, 40), -torch.inf)
    logits[:, 7] = 3.0
    keys = torch.randint(-(2**63), 2**63 - 1, (8,))
    for options in ({}, {"top_p": torch.full((8,), 0.99)}, {"top_k": torch.full((8,), 3)}):
        assert sample_tokens(logits, keys, **options).tolist() == [7] * 8


def test_the_random_numbers_whose_bits_are_all_ones() -> None:
    # The exponential of this key and token 17 is the smallest there is: it wins, but not without a probability.
    keys = torch.tensor([-5786151744590384058])
    logits = torch.zeros(1, 40)
    assert sample_tokens(logits, keys).tolist() == sample_tokens_reference(logits, keys).tolist() == [17]
    logits[0, 17] = -torch.inf
    assert sample_tokens(logits, keys).tolist() == sample_tokens_reference(logits, keys).tolist()


@pytest.mark.parametrize("vocab_size", [1, 5, 257, 5000])
def test_top_logprobs(vocab_size: int) -> None:
    logits = torch.randn(7, vocab_size) * 5
    logits[:, 1::3] = -torch.inf
    token_ids = torch.randint(0, vocab_size, (7,))
    num_top = min(vocab_size, 5)
    actual = top_logprobs(logits, token_ids, num_top)
    expected = top_logprobs_reference(logits, token_ids, num_top)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_an_empty_batch() -> None:
    assert sample_tokens(torch.empty(0, 30), torch.empty(0, dtype=torch.int64)).shape == (0,)
    shapes = [part.shape for part in top_logprobs(torch.empty(0, 30), torch.empty(0, dtype=torch.int64), 2)]
    assert shapes == [(0,), (0,), (0, 2), (0, 2)]

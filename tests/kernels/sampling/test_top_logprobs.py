"""top_logprobs: ranks with ties, the likeliest tokens in order, and probabilities that sum to one."""

import pytest
import torch

from pagoda_kernels.sampling.top_logprobs import top_logprobs, top_logprobs_reference


@pytest.mark.parametrize("compute", [top_logprobs, top_logprobs_reference])
@pytest.mark.parametrize(
    ("token_id", "rank"), [(0, 2), (1, 5), (2, 1), (3, 2), (4, 2)], ids=["tie", "last", "first", "tie 3", "tie 4"]
)
def test_a_rank_is_one_more_than_the_tokens_that_are_likelier(compute: object, token_id: int, rank: int) -> None:
    logits = torch.tensor([[1.0, -3.0, 2.0, 1.0, 1.0]])
    assert callable(compute)
    own, ranks, values, ids = compute(logits, torch.tensor([token_id]), 2)
    assert ranks.tolist() == [rank], "equal ones share the best"
    torch.testing.assert_close(own, logits.log_softmax(dim=-1)[:, token_id])
    assert ids[0, 0] == 2
    assert ids[0, 1] in (0, 3, 4)
    torch.testing.assert_close(values, logits.log_softmax(dim=-1)[:, [2, 0]])


def test_a_row_alone_gives_what_it_gives_beside_others() -> None:
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(0)) * 3
    token_ids = torch.arange(7) * 5
    own, ranks, values, ids = top_logprobs(logits, token_ids, 50)
    assert values.shape == ids.shape == (7, 50)
    torch.testing.assert_close(values.exp().sum(dim=-1), torch.ones(7))
    assert (values.diff(dim=-1) <= 0).all()
    for row in range(7):
        alone = top_logprobs(logits[row : row + 1], token_ids[row : row + 1], 3)
        torch.testing.assert_close(alone[0][0], own[row])
        assert alone[1][0] == ranks[row] == ids[row].tolist().index(int(token_ids[row])) + 1
        assert ids[row, :3].tolist() == alone[3][0].tolist()
    assert top_logprobs(logits, token_ids, 0)[3].shape == (7, 0)

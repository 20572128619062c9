"""route_tokens: which experts a token goes to, held against what is written out by hand and against transformers."""

import pytest
import torch
from torch import Tensor

from pagoda_kernels.moe.route_tokens import Routing, route_tokens

LOGITS = torch.tensor([[1.0, 3.0, 2.0, -1.0, 0.5, 2.5], [0.0, -2.0, 4.0, 4.5, 1.0, -3.0]])


def dense(weights: Tensor, experts: Tensor, num_experts: int = 6) -> Tensor:
    """[num_tokens, num_experts], 0 where a token does not go."""
    return torch.zeros(weights.shape[0], num_experts).scatter_(1, experts, weights)


def test_softmax_weights_sum_to_one_where_they_are_normalized() -> None:
    weights, experts = route_tokens(LOGITS, Routing(top_k=2))
    assert experts.sort(dim=-1).values.tolist() == [[1, 5], [2, 3]]
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(2))
    chosen = LOGITS.gather(1, experts).softmax(dim=-1)
    torch.testing.assert_close(weights, chosen)


def test_weights_are_probabilities_over_all_experts_where_they_are_not_normalized() -> None:
    weights, experts = route_tokens(LOGITS, Routing(top_k=3, is_normalized=False))
    torch.testing.assert_close(weights, LOGITS.softmax(dim=-1).gather(1, experts))


def test_a_correction_decides_the_choice_and_not_the_weights() -> None:
    correction = torch.tensor([0.0, -1.0, 0.0, 1.0, 0.0, 0.0])
    routing = Routing(top_k=2, scoring="sigmoid", is_normalized=False)
    weights, experts = route_tokens(LOGITS, routing, correction=correction)
    assert experts.sort(dim=-1).values.tolist() == [[3, 5], [2, 3]]
    torch.testing.assert_close(weights, LOGITS.sigmoid().gather(1, experts))


def test_all_experts_of_a_token_are_in_its_groups() -> None:
    _, experts = route_tokens(LOGITS, Routing(top_k=2, num_groups=3, top_groups=1))
    assert experts.sort(dim=-1).values.tolist() == [[0, 1], [2, 3]]


def test_two_scores_may_choose_another_group_than_the_highest_one() -> None:
    logits = torch.tensor([[3.0, -5.0, 2.0, 2.0]])
    of_max = route_tokens(logits, Routing(top_k=2, num_groups=2, scoring="sigmoid", group_score="max"))[1]
    of_two = route_tokens(logits, Routing(top_k=2, num_groups=2, scoring="sigmoid", group_score="top2"))[1]
    assert sorted(of_max[0].tolist()) == [0, 1]
    assert sorted(of_two[0].tolist()) == [2, 3]


def test_a_scale_and_a_least_sum_are_on_the_weights() -> None:
    plain = route_tokens(LOGITS, Routing(top_k=2, scoring="sigmoid", is_normalized=False))[0]
    scaled = route_tokens(LOGITS, Routing(top_k=2, scoring="sigmoid", is_normalized=False, scale=2.5))[0]
    torch.testing.assert_close(scaled, 2.5 * plain)
    least = route_tokens(LOGITS, Routing(top_k=2, scoring="sigmoid", norm_min=10.0))[0]
    torch.testing.assert_close(least, plain / 10)


def test_top_sigmoid_chooses_by_logits() -> None:
    weights, experts = route_tokens(LOGITS, Routing(top_k=1, scoring="top_sigmoid", is_normalized=False))
    assert experts.tolist() == [[1], [3]]
    torch.testing.assert_close(weights, torch.tensor([[3.0], [4.5]]).sigmoid())


@pytest.mark.parametrize("num_tokens", [0, 1, 65])
def test_routes_as_deepseek_does(num_tokens: int) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    config = transformers.DeepseekV3Config(
        hidden_size=16, n_routed_experts=12, num_experts_per_tok=4, n_group=3, topk_group=2, routed_scaling_factor=1.7
    )
    torch.manual_seed(num_tokens)
    router = DeepseekV3TopkRouter(config)
    router.weight.data.normal_()
    router.e_score_correction_bias.normal_(std=0.3)
    x = torch.randn(num_tokens, 16)
    logits, weights, experts = router(x)
    routing = Routing(
        top_k=4,
        scoring="sigmoid",
        is_normalized=config.norm_topk_prob,
        num_groups=3,
        top_groups=2,
        group_score="top2",
        scale=1.7,
    )
    ours = route_tokens(logits, routing, correction=router.e_score_correction_bias)
    torch.testing.assert_close(dense(*ours, 12), dense(weights.detach(), experts, 12))

"""The router of a mixture of experts: a token's experts and their weights, from one score an expert."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

Scoring: TypeAlias = Literal["softmax", "sigmoid", "top_sigmoid"]
GroupScore: TypeAlias = Literal["max", "top2"]
GROUP_SCORES: tuple[GroupScore, ...] = ("max", "top2")
SCORINGS: tuple[Scoring, ...] = ("softmax", "sigmoid", "top_sigmoid")


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """How a router chooses."""

    top_k: int
    """Experts of a token."""
    scoring: Scoring = "softmax"
    """What becomes of the router's logits before the choice: softmax over all experts, or each one's sigmoid.
    top_sigmoid chooses by the logits and takes their sigmoid as weights (Llama 4)."""
    is_normalized: bool = True
    """The weights of a token's experts sum to 1."""
    norm_min: float = 0.0
    """Their sum counts as at least this much (ERNIE 4.5)."""
    norm_added: float = 0.0
    """Added to their sum before it divides them (LFM2)."""
    scale: float = 1.0
    """On the weights."""
    num_groups: int = 1
    """Experts are in so many groups of equal size."""
    top_groups: int = 1
    """A token's experts are all in so many groups."""
    group_score: GroupScore = "max"
    """Which groups these are: those of the highest score, or of the highest sum of two scores."""


def route_tokens(logits: Tensor, routing: Routing, *, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose each token's experts.

    Args:
        logits: [num_tokens, num_experts], of any floating data type.
        correction: [num_experts] float32, added to the scores while they are compared, and not to the weights.

    Returns:
        weights [num_tokens, top_k] float32, experts [num_tokens, top_k] int64.

    Source: softmax and top-k, Shazeer et al. 2017 (arXiv 1701.06538); groups and sigmoid, DeepSeek-AI 2024 (arXiv
    2405.04434, 2412.19437).
    """
    scores = logits.float()
    if routing.scoring == "softmax":
        scores = scores.softmax(dim=-1)
    elif routing.scoring == "sigmoid":
        scores = scores.sigmoid()
    choice = scores if correction is None else scores + correction
    if routing.num_groups > 1:
        choice = choice.masked_fill(~_in_top_groups(choice, routing), float("-inf"))
    experts = choice.topk(routing.top_k, dim=-1).indices
    weights = scores.gather(1, experts)
    if routing.scoring == "top_sigmoid":
        weights = weights.sigmoid()
    if routing.is_normalized:
        total = weights.sum(dim=-1, keepdim=True) + routing.norm_added
        weights = weights / total.clamp(min=max(routing.norm_min, 1e-20))
    return weights * routing.scale if routing.scale != 1.0 else weights, experts


def _in_top_groups(choice: Tensor, routing: Routing) -> Tensor:
    """[num_tokens, num_experts] whether an expert is in a group that the token may go to."""
    grouped = choice.view(choice.shape[0], routing.num_groups, choice.shape[1] // routing.num_groups)
    if routing.group_score == "max":
        of_groups = grouped.amax(dim=-1)
    else:
        of_groups = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
    chosen = of_groups.topk(routing.top_groups, dim=-1).indices
    is_chosen = torch.zeros_like(of_groups, dtype=torch.bool).scatter_(1, chosen, True)
    return is_chosen[:, :, None].expand_as(grouped).reshape(choice.shape)

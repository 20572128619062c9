"""Pooler: computes vectors, labels and scores from a step's hidden states. Knows a model's heads; no requests, no
steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda_common.config.pooler_config import PoolingType
from pagoda_common.params.pooling_params import PoolingParams, PoolingTask
from pagoda_worker.pooling.dense import Dense
from pagoda_worker.pooling.sequence_pooling import pool_sequences


class Heads(Protocol):
    """The pooling of a model's hidden states."""

    def classify(self, pooled: Tensor) -> Tensor:
        """[n, size], one vector per text, to [n, num_labels] float32 logits."""

    def classify_tokens(self, hidden: Tensor) -> Tensor:
        """[n, size], one vector per token, to [n, num_labels or vocab_size] float32 logits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolerSpec:
    """How a model's hidden states are pooled."""

    tasks: tuple[PoolingTask, ...]
    """Pooling tasks, the default first."""
    unserved_tasks: tuple[PoolingTask, ...] = ()
    """Tasks that the pooler config leaves out."""
    poolings: tuple[PoolingType, ...] = ("last",)
    normalizes: bool = True
    """Unless a request says otherwise."""
    activation: str = ""
    """Activation for labels: softmax, sigmoid, or empty for none."""
    uses_activation: bool = True
    """Unless a request says otherwise."""
    is_sparse: bool = False
    """Whether an embedding consists of weights of the vocabulary."""
    sparse_sums: bool = False
    dimensions: int | None = None
    """Length to which embeddings are shortened unless a request says otherwise."""
    step_tag_id: int | None = None
    """For token_classify: the token whose values are returned."""
    returned_token_ids: tuple[int, ...] = ()
    """For token_classify: the columns that are returned."""
    lexical_ends: tuple[int | None, int | None] = (None, None)
    """Tokens without a lexical weight at the beginning or end of a text."""
    num_values: int = 0
    """Length of an embedding."""
    labels: tuple[str, ...] = ()
    matryoshka: tuple[int, ...] | None = None
    """Lengths to which embeddings may be shortened; empty: any length; None: not at all."""


class Pooler:
    """The pooler of one model."""

    def __init__(
        self,
        *,
        spec: PoolerSpec,
        heads: Heads | None = None,
        denses: Sequence[Dense] = (),
        classifier: Dense | None = None,
        token_dense: Dense | None = None,
        lexical: Dense | None = None,
    ) -> None:
        """
        Args:
            heads: of the model; None if it has none.
            denses: applied after pooling, or to each token.
            classifier: replaces the model's head.
            token_dense: replaces `denses` for token_embed (bge-m3).
            lexical: for token_classify: one weight per token (bge-m3).
        """
        self.spec = spec
        self._heads = heads
        self._denses = list(denses)
        self._classifier = classifier
        self._token_dense = token_dense
        self._lexical = lexical

    def pool(self, hidden: Tensor, ids: Tensor, starts: Sequence[int], params: Sequence[PoolingParams]) -> list[Tensor]:
        """The result of each sequence, float32 on the device.

        Args:
            hidden: [num_tokens, size], packed sequences, with all tokens if a task needs them.
            ids: [num_tokens] int64.
            starts: first token of each sequence, then the number of tokens.
            params: one per sequence.
        """
        tasks = [self.task_of(one) for one in params]
        results: dict[int, Tensor] = {}
        for task in dict.fromkeys(tasks):
            places = [place for place, one in enumerate(tasks) if one == task]
            parts = self._of_task(task, hidden, ids, starts, places, params)
            results.update(zip(places, parts, strict=True))
        return [results[place] for place in range(len(params))]

    def task_of(self, params: PoolingParams) -> PoolingTask:
        """The task of a request; the model's first task if the model lacks it."""
        return params.task if params.task in self.spec.tasks else self.spec.tasks[0]

    def _of_task(
        self,
        task: PoolingTask,
        hidden: Tensor,
        ids: Tensor,
        starts: Sequence[int],
        places: list[int],
        params: Sequence[PoolingParams],
    ) -> list[Tensor]:
        if task in ("token_embed", "token_classify", "sparse") or self.spec.is_sparse:
            spans = [(starts[place], starts[place + 1], params[place]) for place in places]
            one = {"token_embed": self._token_embed, "token_classify": self._token_classify}.get(task, self._sparse)
            return [one(hidden[start:end], ids[start:end], asked) for start, end, asked in spans]
        pooled = pool_sequences(hidden.float(), starts, self.spec.poolings)[torch.tensor(places, device=hidden.device)]
        if task == "embed":
            for dense in self._denses:
                pooled = dense(pooled)
            return [self._finished(row, params[place]) for place, row in zip(places, pooled, strict=True)]
        logits = self._logits(pooled, hidden.dtype)
        return [self._activated(row, params[place]) for place, row in zip(places, logits, strict=True)]

    def _logits(self, pooled: Tensor, dtype: torch.dtype) -> Tensor:
        if self._classifier is not None:
            return self._classifier(pooled)
        assert self._heads is not None, "labels need a head"
        return self._heads.classify(pooled.to(dtype))

    def _token_embed(self, hidden: Tensor, ids: Tensor, params: PoolingParams) -> Tensor:
        values = hidden.float()
        if self._token_dense is not None:
            values = self._token_dense(values)[min(1, values.shape[0] - 1) :]  # as bge-m3 does, without its first token
        else:
            for dense in self._denses:
                values = dense(values)
        return self._finished(values, params)

    def _token_classify(self, hidden: Tensor, ids: Tensor, params: PoolingParams) -> Tensor:
        if self._lexical is not None:
            return self._lexical(hidden.float())[self._weighted(ids)]
        if self._classifier is not None:
            values = self._activated(self._classifier(hidden.float()), params)
        elif self._heads is not None:
            values = self._activated(self._heads.classify_tokens(hidden), params)
        else:
            values = hidden.float()
        if self.spec.returned_token_ids:
            values = values[:, list(self.spec.returned_token_ids)]
        if self.spec.step_tag_id is not None:
            values = values[ids == self.spec.step_tag_id]
        return values

    def _weighted(self, ids: Tensor) -> slice:
        """The tokens of a text that have a lexical weight."""
        first, last = self.spec.lexical_ends
        start, end = int(int(ids[0]) == first), len(ids) - int(int(ids[-1]) == last)
        return slice(start, max(start, end))

    def _sparse(self, hidden: Tensor, ids: Tensor, params: PoolingParams) -> Tensor:
        assert self._heads is not None, "weights of the vocabulary need its head"
        weights = torch.log1p(torch.relu(self._heads.classify_tokens(hidden)))
        return weights.sum(0) if self.spec.sparse_sums else weights.amax(0)

    def _finished(self, values: Tensor, params: PoolingParams) -> Tensor:
        """[..., size] shortened and normalised."""
        size = params.dimensions or self.spec.dimensions
        values = values if size is None else values[..., :size]
        normalizes = params.normalize if params.normalize is not None else self.spec.normalizes
        return F.normalize(values, dim=-1) if normalizes else values

    def _activated(self, logits: Tensor, params: PoolingParams) -> Tensor:
        uses = params.use_activation if params.use_activation is not None else self.spec.uses_activation
        if not uses or not self.spec.activation:
            return logits
        return logits.softmax(-1) if self.spec.activation == "softmax" else logits.sigmoid()


LAST_TOKEN = PoolerSpec(tasks=("embed",))
"""Default pooling of a generative model."""

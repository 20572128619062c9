"""EncoderModel: a transformers module that sees whole texts at once. Knows no checkpoint files and no steps."""

import inspect
import itertools
import re
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from pagoda_common.config.pooler_config import PoolingType
from pagoda_common.errors import ConfigError, ModelLoadError
from pagoda_worker.models.cache_groups import CacheGroup
from pagoda_worker.models.encoders.backbone import build_encoder
from pagoda_worker.models.encoders.hosted_activation import host_activations
from pagoda_worker.models.encoders.hosted_norm import host_norms
from pagoda_worker.models.encoders.packed_attention import PACKED, PackedRun
from pagoda_worker.models.forward_context import ForwardContext
from pagoda_worker.models.model import BuildConfig, Head, PoolingHeads
from pagoda_worker.models.transformers_model.hosted_layers import HostedLinear, host_layers, hosted_linears
from pagoda_worker.models.transformers_model.hosted_model import HostedModel
from pagoda_worker.models.transformers_model.model import longest_sequence
from pagoda_worker.models.transformers_model.positions import position_offset
from pagoda_worker.models.weights import WeightNames
from pagoda_worker.parallel.tensor_parallel import ALONE, TensorParallel

_ANY = re.compile("")


def _label_pooling(config: Any, head: Head, *, is_decoder: bool) -> PoolingType:
    """
    Raises:
        ModelLoadError: the head needs another vector of a text than the first token's, the last token's or the mean.
    """
    if is_decoder:
        return "last"
    option = {"sequence": "classifier_pooling", "none": "emb_pooler"}.get(head, "")
    name = str(getattr(config, option, None) or "cls")
    names: dict[str, PoolingType] = {"cls": "cls", "bos": "cls", "mean": "mean"}
    if name not in names:
        raise ModelLoadError(f"{option} {name[:40]!r} is not supported; supported are {', '.join(names)}")
    return names[name]


class EncoderModel(HostedModel, PoolingHeads):
    """Whole sequences in one pass, without a cache."""

    only_pools = True

    def __init__(
        self, *, config: BuildConfig, head: Head = "none", prefix: str = "", parallel: TensorParallel = ALONE
    ) -> None:
        """See ModelFactory.

        Raises:
            ModelLoadError: transformers has no such module, or it cannot run here.
            ConfigError: there are several ranks.
        """
        super().__init__()
        if parallel.world_size > 1:
            raise ConfigError(f"world_size is {parallel.world_size}, must be 1 for encoders", field="world_size")
        checkpoint = config.checkpoint
        self.architecture = str((checkpoint.get("architectures") or [checkpoint.get("model_type")])[0])
        self.head: Head = head
        try:
            built = build_encoder(checkpoint, head)
            self.backbone, self._is_packed = built.module, built.is_packed
            self._drop_unused()
            host_layers(self.backbone, prefix=prefix, parallel=parallel)
            host_activations(self.backbone)
            host_norms(self.backbone)
        except ModelLoadError as error:
            raise ModelLoadError(f"transformers cannot run {self.architecture} here: {error}") from error
        for _, linear in hosted_linears(self.backbone):
            linear.takes_many_rows = True
        self.take_buffers()
        inner: Any = self.backbone if head == "none" else self.backbone.base_model
        self._inner = (inner,)  # in a tuple: it is a part of the backbone
        self._compute = inner.forward
        self._arguments = frozenset(inspect.signature(self._compute).parameters)
        num_types = getattr(self.backbone.config, "type_vocab_size", None)
        self._has_token_types = "token_type_ids" in self._arguments and (num_types is None or num_types > 1)
        self._given: Tensor | None = None
        if head != "none":
            inner.forward = self._inner_forward
        parsed = self.backbone.config
        text = parsed.get_text_config(decoder=True)
        self.attention_layers = ()
        self.num_layers = int(getattr(text, "num_hidden_layers", 0) or 0)
        self.vocab_size, self.embedding_size = int(text.vocab_size), int(text.hidden_size)
        self.num_labels = int(parsed.num_labels) if head in ("sequence", "token") else 0
        self.label_pooling = _label_pooling(parsed, head, is_decoder=built.is_decoder)
        self._counts_itself = any(hasattr(module, "create_position_ids_from_input_ids") for module in inner.modules())
        self._position_offset = position_offset(self.backbone)
        self.max_position_embeddings = longest_sequence(text) - self._position_offset

    def _drop_unused(self) -> None:
        """Remove the first token's transformation, which no head uses."""
        if self.head == "none" and getattr(self.backbone, "pooler", None) is not None:
            self.backbone.pooler = None

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """The model keeps no data of a sequence."""
        return (CacheGroup("none", tuple(range(max(1, self.num_layers)))),)

    def weights(self, stored: Collection[str]) -> WeightNames:
        """See Model; the checkpoint may have tensors of heads that the model lacks."""
        names = super().weights(stored)
        return replace(names, ignored=(*names.ignored, _ANY))

    @torch.inference_mode()
    def forward(self, input_ids: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """See Model; the context has the lengths of the sequences."""
        if self._is_packed:
            return self._forward_packed(input_ids, positions, context)
        return self._forward_by_length(input_ids, context)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See Model; the model generates nothing, so every row is zeros."""
        return torch.zeros((hidden.shape[0], self.vocab_size), device=hidden.device)

    def classify(self, pooled: Tensor) -> Tensor:
        """See PoolingHeads."""
        score: nn.Module | None = getattr(self.backbone, "score", None)
        return (self._run_head(pooled[:, None]) if score is None else score(pooled)).float()

    def classify_tokens(self, hidden: Tensor) -> Tensor:
        """See PoolingHeads; a head for texts takes each token as one."""
        if self.head == "sequence":
            return self.classify(hidden)
        return self._run_head(hidden[None])[0].float()

    def _run_head(self, hidden: Tensor) -> Tensor:
        self._given = hidden
        try:
            ids = torch.ones(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
            output = self.backbone(input_ids=ids, attention_mask=ids)
        finally:
            self._given = None
        return output.logits  # type: ignore[no-any-return]  # transformers: Any

    def _inner_forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._given is None:
            return self._compute(*args, **kwargs)
        pooler: nn.Module | None = getattr(self._inner[0], "pooler", None)
        pooled = None
        if isinstance(pooler, HostedLinear):  # ALBERT: its activation stands beside it
            pooled = self._inner[0].pooler_activation(pooler(self._given[:, 0]))
        elif pooler is not None:
            pooled = pooler(self._given)
        return BaseModelOutputWithPooling(last_hidden_state=self._given, pooler_output=pooled)

    def _forward_packed(self, input_ids: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        starts = context.starts
        if self._counts_itself:
            positions = self._own_positions(input_ids, starts)
        elif self._position_offset:
            positions = positions + self._position_offset
        named = {"input_ids": input_ids[None], "position_ids": positions[None]}
        if context.token_types is not None and self._has_token_types:
            named["token_type_ids"] = context.token_types[None]
        PACKED.running = PackedRun(starts)
        try:
            output = self._compute(**{name: value for name, value in named.items() if name in self._arguments})
            if PACKED.running.num_calls == 0:
                raise ModelLoadError(f"the attention of {self.architecture} is not transformers' AttentionInterface")
        finally:
            PACKED.running = None
        return output.last_hidden_state[0]  # type: ignore[no-any-return]  # transformers: Any

    def _own_positions(self, input_ids: Tensor, starts: Collection[int]) -> Tensor:
        """RoBERTa's positions: padding tokens share one position and do not count."""
        padding = self._position_offset - 1
        is_counted = (input_ids != padding).long()
        counted = is_counted.cumsum(0)
        firsts = torch.tensor(list(starts)[:-1], device=input_ids.device)
        lengths = torch.tensor(list(starts), device=input_ids.device).diff()
        before = (counted - is_counted).index_select(0, firsts).repeat_interleave(lengths)
        return (counted - before) * is_counted + padding

    def _forward_by_length(self, input_ids: Tensor, context: ForwardContext) -> Tensor:
        by_length: dict[int, list[int]] = {}
        starts = context.starts
        for start, end in itertools.pairwise(starts):
            by_length.setdefault(end - start, []).append(start)
        hidden: Tensor | None = None
        for length, firsts in by_length.items():
            device = input_ids.device
            rows = torch.tensor(firsts, device=device)[:, None] + torch.arange(length, device=device)
            named = {"input_ids": input_ids[rows], "attention_mask": torch.ones_like(rows)}
            if context.token_types is not None and self._has_token_types:
                named["token_type_ids"] = context.token_types[rows]
            part = self._compute(**named).last_hidden_state
            if hidden is None:
                hidden = part.new_empty((input_ids.shape[0], part.shape[-1]))
            hidden[rows.reshape(-1)] = part.reshape(-1, part.shape[-1])
        assert hidden is not None, "a step has sequences"
        return hidden

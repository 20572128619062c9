"""JinaBERT, the encoder of jina-embeddings-v2 and jina-reranker-v1: BERT without positions, with linear biases in both
directions (ALiBi) and gated feed-forward layers.

There are two forms. The first (`jina-bert-implementation`) has one norm after each of its halves. The second
(`jina-bert-v2-qk-post-norm`, jina-embeddings-v2-base-code) norms queries and keys as well, adds each half's input twice
to the first half's output, and has the gate in the other half of its matrix.
Source: Günther et al. 2023 (arXiv 2310.19923).
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.bert.modeling_bert import (
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertPooler,
    BertPreTrainedModel,
    BertSelfOutput,
)

from pagoda_common.errors import ModelLoadError
from pagoda_worker.models.alibi import alibi_slopes
from pagoda_worker.models.encoders.packed_attention import attend
from pagoda_worker.models.hf_config import HfConfig
from pagoda_worker.models.model import Head

_GATES = {"geglu": "gelu", "reglu": "relu"}
"""Activation by feed_forward_type."""
_QK_NORM = "jina-bert-v2-qk-post-norm"


def is_jina_bert(config: HfConfig) -> bool:
    """Whether a checkpoint of model_type bert is a JinaBERT."""
    names = config.get("architectures") or [""]
    has_biases = config.get("model_type") == "bert" and config.get("position_embedding_type") == "alibi"
    return has_biases or str(names[0]).startswith("JinaBert")


def build_jina_bert(config: HfConfig, head: Head) -> BertPreTrainedModel:
    """The module of a checkpoint.

    Raises:
        ModelLoadError: the model has positions, or feed-forward layers without a gate.
    """
    kind = config.get("position_embedding_type")
    if kind != "alibi":
        raise ModelLoadError(f"position_embedding_type is {str(kind)[:40]!r}, must be 'alibi'")
    gate = str(config.get("feed_forward_type", "original"))
    if gate not in _GATES:
        raise ModelLoadError(f"feed_forward_type is {gate[:40]!r}, must be {' or '.join(_GATES)}")
    code = config.get("auto_map")
    named = [config.get("_name_or_path"), *(code.values() if isinstance(code, dict) else ())]
    parsed = BertConfig(
        **{name: value for name, value in config.items() if name not in ("model_type", "auto_map", "architectures")},
        has_qk_norm=any(_QK_NORM in str(name) for name in named),
    )
    classes: dict[Head, Any] = {
        "none": JinaBertModel,
        "sequence": JinaBertForSequenceClassification,
        "token": JinaBertForTokenClassification,
        "vocabulary": JinaBertForMaskedLM,
    }
    return classes[head]._from_config(parsed, dtype=torch.float32)


class _Embeddings(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None) -> Tensor:
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        out: Tensor = self.LayerNorm(self.word_embeddings(input_ids) + self.token_type_embeddings(types))
        return out


class _SelfAttention(nn.Module):
    slopes: Tensor

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, self.num_heads = config.hidden_size, config.num_attention_heads
        self.query, self.key, self.value = (nn.Linear(size, size) for _ in range(3))
        self.layer_norm_q: nn.Module = nn.Identity()
        self.layer_norm_k: nn.Module = nn.Identity()
        if config.has_qk_norm:
            self.layer_norm_q, self.layer_norm_k = (nn.LayerNorm(size, eps=config.layer_norm_eps) for _ in range(2))
        self.register_buffer("slopes", torch.tensor(alibi_slopes(self.num_heads)), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        projected = (self.layer_norm_q(self.query(hidden)), self.layer_norm_k(self.key(hidden)), self.value(hidden))
        heads = [one[0].unflatten(-1, (self.num_heads, -1)) for one in projected]
        return attend(*heads, slopes=self.slopes).flatten(1)[None]


class _Attention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.self = _SelfAttention(config)
        self.output = BertSelfOutput(config)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.output(self.self(hidden), hidden)
        return out


class _FeedForward(nn.Module):
    """gated_layers, wo and layernorm, with the gate in the first half."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.act = ACT2FN[_GATES[config.feed_forward_type]]
        self.gated_layers = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.wo = nn.Linear(config.intermediate_size, config.hidden_size)
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.gated_layers(hidden).chunk(2, dim=-1)
        out: Tensor = self.layernorm(self.wo(self.act(gate) * up) + hidden)
        return out


class _SwappedFeedForward(nn.Module):
    """up_gated_layer and down_layer, with the gate in the second half."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.act = ACT2FN[_GATES[config.feed_forward_type]]
        self.up_gated_layer = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_layer = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        up, gate = self.up_gated_layer(hidden).chunk(2, dim=-1)
        out: Tensor = self.down_layer(up * self.act(gate))
        return out


class _Layer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.attention = _Attention(config)
        self.mlp = _FeedForward(config)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.mlp(self.attention(hidden))
        return out


class _QkNormLayer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.attention = _Attention(config)
        self.mlp = _SwappedFeedForward(config)
        self.layer_norm_1, self.layer_norm_2 = (
            nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) for _ in range(2)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        attended = self.layer_norm_1(hidden + self.attention(hidden))
        out: Tensor = self.layer_norm_2(attended + self.mlp(attended))
        return out


class _Encoder(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        layer = _QkNormLayer if config.has_qk_norm else _Layer
        self.layer = nn.ModuleList(layer(config) for _ in range(config.num_hidden_layers))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layer:
            hidden = layer(hidden)
        return hidden


class JinaBertModel(BertPreTrainedModel):  # type: ignore[misc]  # transformers: Any
    """Token ids to hidden states, of packed sequences."""

    def __init__(self, config: Any, add_pooling_layer: bool = True) -> None:
        super().__init__(config)
        self.embeddings = _Embeddings(config)
        self.encoder = _Encoder(config)
        self.pooler = BertPooler(config) if add_pooling_layer else None
        self.post_init()

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None = None) -> BaseModelOutputWithPooling:
        """[1, num_tokens] ids, of a packed pass, to [1, num_tokens, hidden_size]."""
        return BaseModelOutputWithPooling(last_hidden_state=self.encoder(self.embeddings(input_ids, token_type_ids)))


class JinaBertForSequenceClassification(BertForSequenceClassification):  # type: ignore[misc]  # transformers: Any
    """With labels of a text."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.bert = JinaBertModel(config)


class JinaBertForTokenClassification(BertForTokenClassification):  # type: ignore[misc]  # transformers: Any
    """With labels of each token."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.bert = JinaBertModel(config, add_pooling_layer=False)


class JinaBertForMaskedLM(BertForMaskedLM):  # type: ignore[misc]  # transformers: Any
    """With logits of the vocabulary."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.bert = JinaBertModel(config, add_pooling_layer=False)

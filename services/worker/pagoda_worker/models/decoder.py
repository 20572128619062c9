"""The decoder core: embedding, layers of paged attention and feed-forward, logits. Knows tensors; no requests."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pagoda_kernels.decoder.composed_layers import ComposedLayers, has_composed_layers
from pagoda_kernels.decoder.decoder_layers import (
    DecoderLayers,
    EndWeights,
    has_decoder_layers,
)
from pagoda_kernels.native.library import native
from pagoda_worker.lora.lora_rows import HEAD, LoraRows
from pagoda_worker.models.alt_up import Streams
from pagoda_worker.models.attention import Attention
from pagoda_worker.models.decoder_layer import DecoderLayer
from pagoda_worker.models.feed_forward import MixtureOfExperts
from pagoda_worker.models.forward_context import ForwardContext
from pagoda_worker.models.gemma_layers import Gemma3nLayer, Gemma4Layer
from pagoda_worker.models.layer_inputs import LayerInputs
from pagoda_worker.models.layers import Embedding, Linear, Norm
from pagoda_worker.models.model import AttentionLayer, Model
from pagoda_worker.models.recurrent import recurrent_layers
from pagoda_worker.models.rope import RotaryTable
from pagoda_worker.models.sharding import Sharding
from pagoda_worker.models.spec import DecoderSpec, RopeSpec, TemperatureSpec
from pagoda_worker.models.weights import MadeWeights, WeightNames
from pagoda_worker.models.zamba_layer import ZambaLayer, share_blocks
from pagoda_worker.parallel.tensor_parallel import ALONE, TensorParallel


def attention_layers(spec: DecoderSpec) -> tuple[AttentionLayer, ...]:
    """Attention options of each layer with its own keys and values, of a model or a rank's part."""
    return tuple(_attention_layer(spec.of_layer(i), i) for i in range(spec.num_layers) if spec.keeps_tokens(i))


def _attention_layer(spec: DecoderSpec, layer: int) -> AttentionLayer:
    latent = spec.latent
    return AttentionLayer(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim if latent is None else latent.kv_rank + spec.head_dim,
        scale=spec.scale(layer),
        window=spec.window(layer),
        chunk=spec.chunk(layer),
        softcap=spec.attention_softcap,
        has_biases=bool(spec.alibi_slopes),
        has_sinks=spec.has_sinks,
        latent_rank=0 if latent is None else latent.kv_rank,
    )


def _query_scales(temperature: TemperatureSpec, positions: Tensor) -> Tensor:
    """[num_tokens, 1, 1] float32."""
    steps = torch.floor((positions.float() + 1.0) / temperature.step)
    return (torch.log1p(steps) * temperature.scale + 1.0)[:, None, None]


class Decoder(Model):
    """A decoder-only language model, or one rank's part. Build it on the meta device; the loader gives it weights."""

    sharding: Sharding
    lora: LoraRows | None = None
    """Adapter rows for the head, which may be tied to the embedding table."""

    def __init__(
        self,
        *,
        spec: DecoderSpec,
        prefix: str = "",
        parallel: TensorParallel = ALONE,
        names: WeightNames | None = None,
    ) -> None:
        """
        Args:
            spec: of the whole model.
            names: of a checkpoint's tensors; None: the model is never read from one.

        Raises:
            ConfigError: the ranks cannot share the model.
        """
        super().__init__()
        self.sharding = Sharding(spec, parallel)
        self._names = names
        spec = self.sharding.local_spec
        self.architecture = spec.architecture
        self.vocab_size = spec.vocab_size
        self.embedding_size = spec.embedding_dim or spec.hidden_size
        self.max_position_embeddings = spec.max_position_embeddings
        self.num_layers = spec.num_layers
        self.attention_layers = attention_layers(spec)
        self.recurrent_layers = recurrent_layers(spec)
        self._parallel = parallel
        self._head_rows = parallel.part(spec.vocab_size)
        self.spec = spec
        dim = spec.embedding_dim or spec.hidden_size
        self.embed_tokens = Embedding(
            num_rows=spec.vocab_size,
            dim=dim,
            is_head=spec.tie_word_embeddings and parallel.world_size == 1,
            prefix=f"{prefix}embed_tokens",
        )
        self.embed_positions: Embedding | None = None
        self.embedding_norm: Norm | None = None
        if spec.has_embedding_norm:
            self.embedding_norm = Norm(spec=spec, shape=(spec.hidden_size,), prefix=f"{prefix}embedding_norm")
        if spec.has_learned_positions:
            rows = spec.max_position_embeddings + spec.position_offset
            self.embed_positions = Embedding(num_rows=rows, dim=spec.hidden_size, prefix=f"{prefix}embed_positions")
        self.project_in: Linear | None = None
        self.project_out: Linear | None = None
        if dim != spec.hidden_size:
            hidden = spec.hidden_size
            self.project_in = Linear(in_features=dim, out_features=hidden, bias=False, prefix=f"{prefix}project_in")
            self.project_out = Linear(in_features=hidden, out_features=dim, bias=False, prefix=f"{prefix}project_out")
        self.layer_inputs: LayerInputs | None = None
        if spec.layer_inputs is not None:
            self.layer_inputs = LayerInputs(spec=spec, inputs=spec.layer_inputs, prefix=f"{prefix}layer_inputs")
        self.streams: Streams | None = None
        layer_class: type[DecoderLayer | Gemma3nLayer | Gemma4Layer | ZambaLayer] = DecoderLayer
        if spec.alt_up is not None:
            self.streams = Streams(spec=spec, alt_up=spec.alt_up, prefix=f"{prefix}streams")
            layer_class = Gemma3nLayer
        elif spec.has_layer_scale:
            layer_class = Gemma4Layer
        elif spec.shared_blocks is not None:
            layer_class = ZambaLayer
        self.layers = nn.ModuleList(
            layer_class(spec=spec, layer=layer, prefix=f"{prefix}layers.{layer}", parallel=parallel)
            for layer in range(spec.num_layers)
        )
        if spec.shared_blocks is not None:
            share_blocks(self.layers, spec.shared_blocks.num_blocks)
        self.norm: Norm | None = None
        if spec.has_final_norm:
            self.norm = Norm(spec=spec, shape=(spec.hidden_size,), prefix=f"{prefix}norm")
        self.lm_head: Linear | None = None
        if not spec.tie_word_embeddings:
            rows = len(self._head_rows)
            self.lm_head = Linear(in_features=dim, out_features=rows, bias=False, prefix=f"{prefix}lm_head")
        self.lm_head_bias: nn.Parameter | None = None
        if spec.head_bias:
            self.lm_head_bias = nn.Parameter(torch.empty(len(self._head_rows)), requires_grad=False)
        self._embedding_multiplier = spec.embedding_multiplier
        self._rotary: dict[RopeSpec, RotaryTable] = {}

    @property
    def identity(self) -> Mapping[str, object]:
        """The options of the whole model."""
        spec = self.sharding.spec
        return {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}

    def weights(self, stored: Collection[str]) -> WeightNames:
        """See Model; the family knows all names. Of two ways to make a parameter, the one with existing tensors is
        used."""
        names = self._names
        assert names is not None, "a model that is read from a checkpoint has names"
        if not names.made:
            return names
        known = {name.removeprefix(prefix) for name in stored for prefix in (*names.prefixes, "")}
        there = [made for made in names.made if made.names[0] in known]
        filled = {parameter for made in there for parameter in made.parameters}
        one_by_one = {source.parameter for source in names.sources if not known or source.name in known}
        for made in names.made:  # the first way of what no tensor is there for: its names are missing
            if filled.isdisjoint(made.parameters) and one_by_one.isdisjoint(made.parameters):
                there.append(made)
                filled.update(made.parameters)
        sources = [source for source in names.sources if source.parameter not in filled]
        return dataclasses.replace(names, sources=sources, made=tuple(there))

    @property
    def ways_to_make(self) -> tuple[MadeWeights, ...]:
        """All ways of the family's checkpoints to make parameters of several tensors."""
        return () if self._names is None else self._names.made

    def dummy_value(self, parameter: str) -> float | None:
        """Norms of ones, biases of zeros."""
        if parameter.endswith(("bias", "decay_log", "sinks")):
            return 0.0
        if parameter.endswith(("output_scale", "skip", "layer_scale", "router_scale", "expert_scale")):
            return 1.0
        return 1.0 - self.spec.norm_weight_offset if "norm" in parameter else None

    @property
    def what_waits(self) -> str | None:
        """See Model."""
        mixtures = (module for module in self.modules() if isinstance(module, MixtureOfExperts))
        is_plain = any(not mixture.is_grouped for mixture in mixtures)
        return "the host has to hear which tokens an expert gets" if is_plain else None

    def prepare(self, *, max_model_len: int, device: torch.device) -> None:
        """Build tables that are not weights, for positions below `max_model_len`."""
        self._rotary = {
            rope: RotaryTable(spec=rope, head_dim=self.spec.head_dim, max_positions=max_model_len, device=device)
            for rope in self.spec.ropes
        }
        slopes = torch.tensor(self.spec.alibi_slopes, dtype=torch.float32, device=device)
        for module in self.modules():
            if isinstance(module, Attention):
                module.prepare(max_model_len=max_model_len, dtype=self._dtype, device=device)
                module.alibi_slopes = slopes if self.spec.alibi_slopes else None
        self._embedding_multiplier = float(torch.tensor(self.spec.embedding_multiplier, dtype=self._dtype))

    @property
    def _dtype(self) -> torch.dtype:
        return self.embed_tokens.dtype

    def rotary(self, positions: Tensor) -> dict[RopeSpec, tuple[Tensor, Tensor]]:
        """Cosines and sines for ForwardContext, in the order of the spec's ropes; none with learned positions."""
        return {rope: table(positions) for rope, table in self._rotary.items()}

    def forward(self, input_ids: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """The last hidden state, ready for `compute_logits`.

        Args:
            input_ids, positions: [num_tokens] int64.
        """
        if self.spec.temperature is not None:
            context = dataclasses.replace(context, query_scales=_query_scales(self.spec.temperature, positions))
        x: Tensor = self.embed_tokens(input_ids)
        if self._embedding_multiplier != 1.0:
            x = x * self._embedding_multiplier
        if self.project_in is not None:
            x = self.project_in(x)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        if self.embed_positions is not None:
            x = x + self.embed_positions(positions + self.spec.position_offset)
        if context.fused is not None:
            batch = x, context.plans, context.slot_mappings, positions
            if isinstance(context.fused, DecoderLayers):
                x = context.fused(*batch, context.adapters)
            else:
                x = context.fused(*batch)
        else:
            if self.layer_inputs is not None:
                context = dataclasses.replace(context, layer_inputs=self.layer_inputs(input_ids, x))
            if self.spec.shared_blocks is not None:
                context = dataclasses.replace(context, embedded=x)
            if self.streams is not None:
                x = self.streams.opened(x)
            for layer in self.layers:
                x = layer(x, context)
            if self.streams is not None:
                x = self.streams.joined(x)
        if self.norm is not None:
            x = self.norm(x)
        return x if self.project_out is None else self.project_out(x)

    def fuse_layers(
        self, *, k_caches: Sequence[Tensor], v_caches: Sequence[Tensor], places: Mapping[int, tuple[int, int]]
    ) -> DecoderLayers | ComposedLayers | None:
        """A call that runs all layers over these caches; None if it does not support one of their operations. It is
        valid while weights and caches keep their addresses.

        Args:
            places: as in ForwardContext.
        """
        if not k_caches or not k_caches[0].is_cpu or k_caches[0].dtype != self._dtype:
            return None
        asked = [layer.fused_weights() for layer in self.layers if isinstance(layer, DecoderLayer)]
        layers = [layer for layer in asked if layer is not None]
        if len(layers) < len(self.layers) or len({cache.shape[2:] for cache in k_caches}) > 1:
            return None
        rotations = [table.tables for table in self._rotary.values()]
        groups, buffers = zip(*(places[layer] for layer in range(len(layers))), strict=True)
        k_caches, v_caches = [k_caches[buffer] for buffer in buffers], [v_caches[buffer] for buffer in buffers]
        if has_decoder_layers(layers, self._dtype):
            return DecoderLayers(
                layers,
                k_caches=k_caches,
                v_caches=v_caches,
                groups=groups,
                num_heads=self.spec.num_heads,
                rotations=rotations,
                ends=self._end_weights(is_plain=False),
            )
        if has_composed_layers(layers):
            ends = self._end_weights(is_plain=True)
            return ComposedLayers(
                layers, k_caches=k_caches, v_caches=v_caches, groups=groups, rotations=rotations, ends=ends
            )
        return None

    def _end_weights(self, *, is_plain: bool) -> EndWeights | None:
        """The parts before and after the layers; None if they are more than a table, a norm and a matrix.

        Args:
            is_plain: the required form of matrices.
        """
        spec, norm, table = self.spec, self.norm, self.embed_tokens
        if norm is None or norm.rms_weight is None or native("argmax") is None or self._parallel.world_size > 1:
            return None
        is_usual = self.lm_head_bias is None and spec.logit_multiplier == 1.0 and spec.logit_softcap is None
        is_usual = is_usual and self._embedding_multiplier == 1.0 and self.embedding_norm is None
        if not is_usual or self.embed_positions is not None or self.project_in is not None:
            return None
        matrix = table if self.lm_head is None else self.lm_head
        linear = matrix.method.fused_weights(matrix, None)
        embedding = table.method.fused_weights(table, None)
        if linear is None or embedding is None or linear.is_plain != is_plain:
            return None
        return EndWeights(
            embedding=embedding,
            norm=norm.rms_weight,
            eps=norm.eps,
            weight_offset=norm.offset,
            linear=linear,
        )

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] rows of `forward` to [n, vocab_size] float32 on rank 0; other ranks' results are meaningless."""
        if self.lm_head is not None:
            logits = self.lm_head.method.apply(self.lm_head, hidden, bias=self.lm_head_bias, out_dtype=torch.float32)
        elif self.embed_tokens.is_multiplied:
            table = self.embed_tokens
            logits = table.method.apply(table, hidden, bias=self.lm_head_bias, out_dtype=torch.float32)
        else:  # every rank has all rows, for its embeddings, and multiplies with some
            rows = self.embed_tokens.weight[self._head_rows.start : self._head_rows.stop]
            logits = F.linear(hidden, rows, self.lm_head_bias).float()
        if self.lora is not None:
            logits = self.lora.add(HEAD, hidden, logits)
        logits = self._parallel.gather_columns(logits, self.spec.vocab_size)
        if self.spec.logit_multiplier != 1.0:
            logits = logits * self.spec.logit_multiplier
        if self.spec.logit_softcap is not None:
            logits = self.spec.logit_softcap * torch.tanh(logits / self.spec.logit_softcap)
        return logits

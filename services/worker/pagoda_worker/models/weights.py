"""Sources of the decoder core's parameters in checkpoints. Knows names; no tensors."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from pagoda_kernels.linear.scaled_matrix import ScaledMatrix
from pagoda_worker.models.recurrent_spec import DeltaNetSpec, Mamba2Spec, MambaSpec, ShortConvSpec
from pagoda_worker.models.spec import DecoderSpec, LatentSpec, MoeSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSource:
    """One tensor of a checkpoint and its target: rows of a parameter."""

    name: str
    """Name in the checkpoint, without the family's optional prefix."""
    parameter: str
    """Dotted name in the Decoder."""
    row_start: int = 0
    """First row of the parameter that it fills."""
    num_rows: int | None = None
    """Number of rows that it fills; None: all."""
    is_transposed: bool = False
    """Whether it is stored [in, out] (GPT-2's Conv1D)."""
    is_row: bool = False
    """Whether it is a vector that fills one row of the parameter."""
    group_rows: tuple[int, ...] = ()
    """If several projections are stored group by group (each KV head's queries, key and value): the rows of each
    projection in one group. They are loaded projection by projection. Empty: stored as loaded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MadeWeights:
    """Parameters that are computed from several tensors of a checkpoint."""

    names: tuple[str, ...]
    """Name in the checkpoint, without the family's optional prefix."""
    parameters: tuple[str, ...]
    """Dotted names in the model."""
    make: Callable[[list[Tensor]], dict[str, Tensor]]
    """Computes whole parameters, by name, from the tensors in order."""
    pairs_rows: bool = False
    """Rows of gate and up alternate in the checkpoint and in adapters; in the model, gates are first."""
    is_swapped: bool = False
    """Experts are stored [in, out], which PEFT reads as [out, in], so its A and B are swapped."""
    make_scaled: Callable[[list[Tensor]], dict[str, ScaledMatrix]] | None = None
    """The same as small floats with scales, if they are stored so."""

    def within(self, prefix: str) -> "MadeWeights":
        """The same source for a model that has these parameters under a prefix."""

        def make(tensors: list[Tensor]) -> dict[str, Tensor]:
            return {prefix + name: value for name, value in self.make(tensors).items()}

        def make_scaled(tensors: list[Tensor]) -> dict[str, ScaledMatrix]:
            assert self.make_scaled is not None, "it is not passed on"
            return {prefix + name: value for name, value in self.make_scaled(tensors).items()}

        return MadeWeights(
            names=self.names,
            parameters=tuple(prefix + name for name in self.parameters),
            make=make,
            pairs_rows=self.pairs_rows,
            is_swapped=self.is_swapped,
            make_scaled=None if self.make_scaled is None else make_scaled,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightNames:
    """All tensors of a family's checkpoint."""

    sources: list[WeightSource]
    prefixes: tuple[str, ...]
    """Optional prefixes of these names in a checkpoint; the first is transformers'."""
    lm_head: str = "lm_head"
    """Name of the head, which has no prefix."""
    ignored: tuple[re.Pattern[str], ...] = ()
    """Tensors that are ignored."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Alternative names of tensors: tied weights have two."""
    module_names: Mapping[str, str] = field(default_factory=dict)
    """Names of transformers' modules, if they differ from tensors', to the names in `sources`; adapters use the former,
    and tensors may."""
    made: tuple[MadeWeights, ...] = ()
    """Several entries for the same parameters are alternatives, of which a checkpoint has one."""

    def within(self, prefix: str) -> "WeightNames":
        """The same source for a model that has these parameters under a prefix."""
        return replace(
            self,
            sources=[replace(source, parameter=prefix + source.parameter) for source in self.sources],
            made=tuple(one.within(prefix) for one in self.made),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorNames:
    """A family's names of the decoder's tensors. The defaults are Llama's."""

    prefixes: tuple[str, ...] = ("model.",)
    embed_tokens: str = "embed_tokens"
    embed_positions: str = "embed_positions"
    embedding_norm: str = "embedding_norm"
    layers: str = "layers"
    block_norms: dict[str, str] = field(
        default_factory=lambda: {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    )
    """By DecoderSpec.block_norms."""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """One name: the three are stored as one tensor."""
    is_qkv_grouped: bool = False
    """If they are one tensor: whether it is stored KV head by KV head."""
    o_proj: str = "self_attn.o_proj"
    latent_q: str = "self_attn.q_proj"
    """Projection of the hidden state; latent_q_b projects a latent, which latent_q_a makes."""
    latent_q_a: str = "self_attn.q_a_proj"
    latent_q_norm: str = "self_attn.q_a_layernorm"
    latent_q_b: str = "self_attn.q_b_proj"
    latent_kv_a: str = "self_attn.kv_a_proj_with_mqa"
    latent_kv_norm: str = "self_attn.kv_a_layernorm"
    latent_kv_b: str = "self_attn.kv_b_proj"
    """Stored head by head, with the rows of its key and of its value."""
    sinks: str = "self_attn.sinks"
    linear_attention: str = "self_attn.linear_attn"
    """A matrix instead of attention; linear_mlp: instead of a feed-forward."""
    linear_mlp: str = "mlp.linear_mlp"
    recurrent: str = "linear_attn"
    conv: str = "conv1d"
    """Prefix of the recurrent part."""
    delta_net_in: tuple[str, ...] = ("in_proj_qkvz",)
    """One name: stored key head by key head."""
    delta_net_beta: tuple[str, ...] = ("in_proj_ba",)
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """One name: stored as one tensor, or there is no gate."""
    down_proj: str = "mlp.down_proj"
    router: str = "mlp.gate"
    correction: str = "mlp.gate.e_score_correction_bias"
    latent_in: str = ""
    latent_out: str = ""
    shared_expert: str = "mlp.shared_expert"
    shared_gate: str = "mlp.shared_expert_gate"
    expert: str = "mlp.experts.{}"
    """The place of one expert, whose tensors have the last parts of `up` and `down_proj` as names."""
    expert_up: tuple[str, ...] = ("gate_proj", "up_proj")
    expert_down: str = "down_proj"
    norm: str = "norm"
    lm_head: str = "lm_head"
    is_transposed: bool = False
    """Whether projections are stored [in, out]."""
    ignored: tuple[re.Pattern[str], ...] = (re.compile(r"rotary_emb\.inv_freq$"),)


def weight_names(spec: DecoderSpec, names: TensorNames) -> WeightNames:
    """All tensors of a checkpoint, for any options."""
    writer = _Writer(spec, names)
    writer.tensor(names.embed_tokens + ".weight", "embed_tokens.weight")
    if spec.has_embedding_norm:
        writer.norm(names.embedding_norm, "embedding_norm")
    if spec.has_learned_positions:
        writer.tensor(names.embed_positions + ".weight", "embed_positions.weight")
    if spec.embedding_dim is not None:
        writer.linear(["project_in"], "project_in", bias=False)
        writer.linear(["project_out"], "project_out", bias=False)
    if spec.layer_inputs is not None:
        writer.tensor("embed_tokens_per_layer.weight", "layer_inputs.table.weight")
        writer.linear(["per_layer_model_projection"], "layer_inputs.projection", bias=False)
        writer.norm("per_layer_projection_norm", "layer_inputs.norm")
    for stream in range(spec.alt_up.num_streams - 1 if spec.alt_up is not None else 0):
        writer.linear([f"altup_projections.{stream}"], f"streams.opening.{stream}", bias=False)
        writer.linear([f"altup_unembed_projections.{stream}"], f"streams.joining.{stream}", bias=False)
    for layer in range(spec.num_layers):
        writer.layer(layer)
    if spec.has_final_norm:
        writer.norm(names.norm, "norm")
    ignored, aliases = names.ignored, {}
    if spec.tie_word_embeddings:
        aliases[f"{names.embed_tokens}.weight"] = f"{names.lm_head}.weight"
        ignored += (re.compile(rf"^{re.escape(names.lm_head)}\.weight$"),)
    else:
        writer.tensor(names.lm_head + ".weight", "lm_head.weight")
    if spec.head_bias:
        writer.tensor(names.lm_head + ".bias", "lm_head_bias")
    return WeightNames(
        sources=writer.sources, prefixes=names.prefixes, lm_head=names.lm_head, ignored=ignored, aliases=aliases
    )


class _Writer:
    """Collects the sources of one model."""

    def __init__(self, spec: DecoderSpec, names: TensorNames) -> None:
        self.sources: list[WeightSource] = []
        self._spec = spec
        self._names = names

    def tensor(self, name: str, parameter: str) -> None:
        self.sources.append(WeightSource(name=name, parameter=parameter))

    def norm(self, name: str, parameter: str) -> None:
        if self._spec.norm_has_weights:
            self.tensor(f"{name}.weight", f"{parameter}.weight")
            if self._spec.norm == "layer_norm" and self._spec.norm_has_bias:
                self.tensor(f"{name}.bias", f"{parameter}.bias")

    def linear(
        self,
        names: Sequence[str],
        parameter: str,
        *,
        bias: bool,
        rows: Sequence[int] = (),
        group_rows: tuple[int, ...] = (),
    ) -> None:
        """Add one projection, or several stacked ones of `rows` rows each."""
        for kind in ("weight", "bias") if bias else ("weight",):
            start = 0
            for index, name in enumerate(names):
                num_rows = rows[index] if len(names) > 1 else None
                self.sources.append(
                    WeightSource(
                        name=f"{name}.{kind}",
                        parameter=f"{parameter}.{kind}",
                        row_start=start,
                        num_rows=num_rows,
                        is_transposed=self._names.is_transposed and kind == "weight",
                        group_rows=group_rows,
                    )
                )
                start += num_rows or 0

    def layer(self, layer: int) -> None:
        spec, names = self._spec, self._names
        name, parameter = f"{names.layers}.{layer}", f"layers.{layer}"
        for norm in spec.layer_norms(layer):
            self.norm(f"{name}.{names.block_norms[norm]}", f"{parameter}.{norm}")
        both = spec.mixer(layer) == "both"
        if spec.is_recurrent(layer):
            place = f"{parameter}.attention.recurrent" if both else f"{parameter}.attention"
            self._recurrent(f"{name}.{names.recurrent}", place)
        if spec.attends(layer):
            self._attention(name, f"{parameter}.attention.attention" if both else f"{parameter}.attention", layer)
        if spec.mixer(layer) == "linear":
            self.linear([f"{name}.{names.linear_attention}"], f"{parameter}.attention.linear", bias=False)
        if not spec.has_feed_forward(layer):
            return
        if spec.has_linear_feed_forward(layer):
            self.linear([f"{name}.{names.linear_mlp}"], f"{parameter}.mlp.linear", bias=False)
            return
        moe, size = spec.layer_moe(layer), spec.of_layer(layer).intermediate_size
        if moe is None or moe.is_beside:
            self._feed_forward(name, f"{parameter}.mlp", names.up, names.down_proj, size)
        if moe is not None:
            self._experts(name, f"{parameter}.experts" if moe.is_beside else f"{parameter}.mlp", moe)
            self._beside(name, parameter, moe)
        if spec.layer_inputs is not None:
            for stored, ours in (("per_layer_input_gate", "gate"), ("per_layer_projection", "projection")):
                self.linear([f"{name}.{stored}"], f"{parameter}.input_gate.{ours}", bias=False)
            self.norm(f"{name}.post_per_layer_input_norm", f"{parameter}.input_gate.norm")
        if spec.has_layer_scale:
            self.tensor(f"{name}.layer_scalar", f"{parameter}.layer_scale")
        if spec.alt_up is not None:
            self._alt_up(name, parameter)

    def _beside(self, name: str, parameter: str, moe: MoeSpec) -> None:
        """Add the additional parameters of experts next to a feed-forward."""
        if moe.is_beside:
            self.tensor(f"{name}.router.scale", f"{parameter}.router_scale")
            self.tensor(f"{name}.router.per_expert_scale", f"{parameter}.expert_scale")
            self.norm(f"{name}.post_feedforward_layernorm_1", f"{parameter}.dense_output_norm")
            self.norm(f"{name}.pre_feedforward_layernorm_2", f"{parameter}.expert_norm")
            self.norm(f"{name}.post_feedforward_layernorm_2", f"{parameter}.expert_output_norm")

    def _alt_up(self, name: str, parameter: str) -> None:
        for stored, ours in (
            ("altup.modality_router", "alt_up.router"),
            ("altup.prediction_coefs", "alt_up.prediction"),
            ("altup.correction_coefs", "alt_up.correction"),
            ("laurel.linear_left", "laurel.left"),
            ("laurel.linear_right", "laurel.right"),
        ):
            self.linear([f"{name}.{stored}"], f"{parameter}.{ours}", bias=False)
        self.norm(f"{name}.altup.router_norm", f"{parameter}.alt_up.router_norm")
        self.tensor(f"{name}.altup.correct_output_scale", f"{parameter}.alt_up.output_scale")
        self.norm(f"{name}.laurel.post_laurel_norm", f"{parameter}.laurel.norm")

    def _latent_attention(self, latent: LatentSpec, name: str, parameter: str) -> None:
        spec, names = self._spec, self._names
        q_proj, bias = names.latent_q, latent.bias
        if latent.q_rank is not None:
            self.linear([f"{name}.{names.latent_q_a}"], f"{parameter}.q_a_proj", bias=bias)
            self.norm(f"{name}.{names.latent_q_norm}", f"{parameter}.q_a_norm")
            q_proj = names.latent_q_b
        self.linear([f"{name}.{q_proj}"], f"{parameter}.q_proj", bias=False)
        self.linear([f"{name}.{names.latent_kv_a}"], f"{parameter}.kv_a_proj", bias=bias)
        self.norm(f"{name}.{names.latent_kv_norm}", f"{parameter}.kv_a_norm")
        group = (latent.key_dim, latent.value_dim)
        self.linear([f"{name}.{names.latent_kv_b}"], f"{parameter}.kv_up", bias=False, group_rows=group)
        self.linear([f"{name}.{names.o_proj}"], f"{parameter}.o_proj", bias=spec.o_bias)

    def _attention(self, name: str, parameter: str, layer: int) -> None:
        spec, names = self._spec.of_layer(layer), self._names
        if spec.latent is not None:
            self._latent_attention(spec.latent, name, parameter)
            return
        query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        group = (query // spec.num_kv_heads, spec.head_dim, spec.head_dim) if names.is_qkv_grouped else ()
        num_projections = spec.num_kv_projections(layer)
        qkv = [f"{name}.{part}" for part in (names.qkv[: 1 + num_projections] if len(names.qkv) > 1 else names.qkv)]
        rows = (query * 2 if spec.has_attention_gate else query, key, key)
        self.linear(qkv, f"{parameter}.qkv_proj", bias=spec.qkv_bias, rows=rows, group_rows=group)
        if spec.has_attention_gate:  # each head's query, then its gate
            self.sources = [
                replace(source, group_rows=(spec.head_dim, spec.head_dim)) if source.name.startswith(qkv[0]) else source
                for source in self.sources
            ]
        if spec.has_sinks:
            self.tensor(f"{name}.{names.sinks}", f"{parameter}.sinks")
        self.linear([f"{name}.{names.o_proj}"], f"{parameter}.o_proj", bias=spec.o_bias)
        for stored, ours, num_heads in (
            (names.q_norm, "q_norm", spec.num_heads),
            (names.k_norm, "k_norm", spec.num_kv_heads),
        ):
            if ours == "k_norm" and not num_projections:
                continue
            if spec.qk_norm is not None and "{}" in stored:  # one tensor a head
                for head in range(num_heads):
                    source = f"{name}.{stored.format(head)}.weight"
                    self.sources.append(
                        WeightSource(
                            name=source,
                            parameter=f"{parameter}.{ours}.weight",
                            row_start=head,
                            num_rows=1,
                            is_row=True,
                        )
                    )
            elif spec.qk_norm == "each_head":
                self.tensor(f"{name}.{stored}.weight", f"{parameter}.{ours}.weight")
            elif spec.qk_norm not in (None, "plain"):
                self.norm(f"{name}.{stored}", f"{parameter}.{ours}")

    def _recurrent(self, name: str, parameter: str) -> None:
        net, conv = self._spec.recurrence, self._names.conv
        self.tensor(f"{name}.{conv}.weight", f"{parameter}.conv_weight")
        if isinstance(net, DeltaNetSpec):
            self._delta_net(net, name, parameter)
        elif isinstance(net, MambaSpec):
            self._mamba(net, name, parameter)
        elif isinstance(net, Mamba2Spec):
            self._mamba2(net, name, parameter)
        elif isinstance(net, ShortConvSpec):
            self.linear([f"{name}.in_proj"], f"{parameter}.in_proj", bias=net.bias)
            self.linear([f"{name}.out_proj"], f"{parameter}.o_proj", bias=net.bias)
        if (isinstance(net, MambaSpec | Mamba2Spec) and net.conv_bias) or (isinstance(net, ShortConvSpec) and net.bias):
            self.tensor(f"{name}.{conv}.bias", f"{parameter}.conv_bias")

    def _delta_net(self, net: DeltaNetSpec, name: str, parameter: str) -> None:
        heads = net.num_value_heads // net.num_key_heads
        values = heads * net.value_dim
        rows = (net.num_channels, net.num_value_heads * net.value_dim)
        first = [f"{name}.{part}" for part in self._names.delta_net_in]
        groups: tuple[int, ...] = (net.key_dim, net.key_dim, values, values) if len(first) == 1 else ()
        self.linear(first, f"{parameter}.in_proj", bias=False, rows=rows, group_rows=groups)
        second = [f"{name}.{part}" for part in self._names.delta_net_beta]
        groups = (heads, heads) if len(second) == 1 else ()
        self.linear(second, f"{parameter}.ba_proj", bias=False, rows=(net.num_value_heads,) * 2, group_rows=groups)
        self.tensor(f"{name}.A_log", f"{parameter}.decay_log")
        self.tensor(f"{name}.dt_bias", f"{parameter}.step_bias")
        self.tensor(f"{name}.norm.weight", f"{parameter}.output_scale")
        self.linear([f"{name}.out_proj"], f"{parameter}.o_proj", bias=False)

    def _mamba(self, net: MambaSpec, name: str, parameter: str) -> None:
        self.linear([f"{name}.in_proj"], f"{parameter}.in_proj", bias=net.bias)
        self.linear([f"{name}.x_proj"], f"{parameter}.x_proj", bias=False)
        self.linear([f"{name}.dt_proj"], f"{parameter}.step_proj", bias=False)
        self.tensor(f"{name}.dt_proj.bias", f"{parameter}.step_bias")
        self.tensor(f"{name}.A_log", f"{parameter}.decay_log")
        self.tensor(f"{name}.D", f"{parameter}.skip")
        if net.norm == "weights":
            for stored, ours in (("dt_layernorm", "step"), ("b_layernorm", "b"), ("c_layernorm", "c")):
                self.tensor(f"{name}.{stored}.weight", f"{parameter}.{ours}_norm_weight")
        self.linear([f"{name}.out_proj"], f"{parameter}.o_proj", bias=net.bias)

    def _mamba2(self, net: Mamba2Spec, name: str, parameter: str) -> None:
        self.linear([f"{name}.in_proj"], f"{parameter}.in_proj", bias=net.in_bias)
        self.tensor(f"{name}.A_log", f"{parameter}.decay_log")
        self.tensor(f"{name}.dt_bias", f"{parameter}.step_bias")
        self.tensor(f"{name}.D", f"{parameter}.skip")
        if net.norm != "none":
            self.tensor(f"{name}.norm.weight", f"{parameter}.norm_weight")
        self.linear([f"{name}.out_proj"], f"{parameter}.o_proj", bias=net.out_bias)

    def _feed_forward(
        self, name: str, parameter: str, up: tuple[str, ...], down: str, size: int, *, bias: bool | None = None
    ) -> None:
        has_bias = self._spec.mlp_bias if bias is None else bias
        self.linear([f"{name}.{part}" for part in up], f"{parameter}.up_proj", bias=has_bias, rows=(size, size))
        self.linear([f"{name}.{down}"], f"{parameter}.down_proj", bias=has_bias)

    def _experts(self, name: str, parameter: str, moe: MoeSpec) -> None:
        names = self._names
        self.linear([f"{name}.{names.router}"], f"{parameter}.router", bias=moe.router_bias)
        if moe.has_correction:
            self.tensor(f"{name}.{names.correction}", f"{parameter}.correction")
        if moe.latent_size:
            self.linear([f"{name}.{names.latent_in}"], f"{parameter}.latent_in", bias=False)
            self.linear([f"{name}.{names.latent_out}"], f"{parameter}.latent_out", bias=False)
        for index in range(moe.num_experts):
            place = f"{name}.{names.expert.format(index)}"
            self._feed_forward(
                place,
                f"{parameter}.experts.{index}",
                names.expert_up,
                names.expert_down,
                moe.intermediate_size,
                bias=moe.expert_bias,
            )
        if moe.shared_intermediate_size:
            self._feed_forward(
                f"{name}.{names.shared_expert}",
                f"{parameter}.shared_expert",
                names.expert_up,
                names.expert_down,
                moe.shared_intermediate_size,
            )
            if moe.shared_is_gated:
                self.linear([f"{name}.{names.shared_gate}"], f"{parameter}.shared_gate", bias=False)

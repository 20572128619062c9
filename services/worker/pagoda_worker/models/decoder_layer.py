"""One layer of the decoder core: a mixer of tokens, and feed-forward. Knows tensors; no requests."""

import torch
from torch import Tensor, nn

from pagoda_kernels.decoder.decoder_layers import LayerWeights
from pagoda_worker.models.attention import Attention
from pagoda_worker.models.feed_forward import FeedForward, MixtureOfExperts
from pagoda_worker.models.forward_context import ForwardContext
from pagoda_worker.models.latent_attention import LatentAttention
from pagoda_worker.models.layers import Norm
from pagoda_worker.models.linear_part import LinearPart
from pagoda_worker.models.recurrent import RecurrentMixer, recurrent_mixer
from pagoda_worker.models.side_by_side import SideBySide
from pagoda_worker.models.spec import DecoderSpec
from pagoda_worker.parallel.tensor_parallel import ALONE, TensorParallel


class DecoderLayer(nn.Module):
    """Attention and feed-forward, in sequence or in parallel, or only one of them, with norms as in the spec."""

    def __init__(self, *, spec: DecoderSpec, layer: int, prefix: str = "", parallel: TensorParallel = ALONE) -> None:
        super().__init__()
        self._is_parallel = spec.is_parallel
        self._multiplier = spec.residual_multiplier
        # The last projection of a part adds what it computed to the residual, where nothing comes in between.
        names = spec.layer_norms(layer)
        has_output_norm = spec.norms in ("output", "both")
        self._adds_residual = not (
            spec.is_parallel or has_output_norm or spec.residual_multiplier != 1 or parallel.world_size > 1
        )
        self._is_usual = self._adds_residual and set(names) == {"attention_norm", "mlp_norm"}

        def norm(name: str) -> nn.Module:
            if name not in names:
                return nn.Identity()
            return Norm(spec=spec, shape=(spec.hidden_size,), prefix=f"{prefix}.{name}")

        self.attention_norm = norm("attention_norm")
        self.attention = _mixer(spec=spec, layer=layer, prefix=f"{prefix}.attention", parallel=parallel)
        self.attention_output_norm = norm("attention_output_norm")
        self.attention_sum_norm = norm("attention_sum_norm")
        self._shares_norm = spec.is_parallel and not spec.has_mlp_norm
        self.mlp_norm = norm("mlp_norm")
        self.mlp = _feed_forward(spec=spec, layer=layer, prefix=f"{prefix}.mlp", parallel=parallel)
        self.mlp_output_norm = norm("mlp_output_norm")
        self.mlp_sum_norm = norm("mlp_sum_norm")

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """[num_tokens, hidden_size] to the same."""
        if self.attention is None or self.mlp is None:
            return self._one_part(x, context)
        if self._adds_residual:
            x = self.attention_sum_norm(self.attention(self.attention_norm(x), context, residual=x))
            # torch: Module calls are Any
            return self.mlp_sum_norm(self.mlp(self.mlp_norm(x), residual=x))  # type: ignore[no-any-return]  # torch: Module calls are Any
        normed = self.attention_norm(x)
        attended = self.attention_output_norm(self.attention(normed, context))
        if self._is_parallel:
            mlp_input = normed if self._shares_norm else self.mlp_norm(x)
            return x + attended + self.mlp(mlp_input)  # type: ignore[no-any-return]  # torch: Module calls are Any
        if isinstance(self.mlp_norm, Norm):
            x, normed = self.mlp_norm.add(x, attended, alpha=self._multiplier)
        else:
            x = normed = self.attention_sum_norm(torch.add(x, attended, alpha=self._multiplier))
        transformed = self.mlp_output_norm(self.mlp(normed))
        # torch: Module calls are Any
        return self.mlp_sum_norm(torch.add(x, transformed, alpha=self._multiplier))  # type: ignore[no-any-return]  # torch: Module calls are Any

    def _one_part(self, x: Tensor, context: ForwardContext) -> Tensor:
        """`forward` of a layer with at most one part."""
        residual = x if self._adds_residual else None
        if self.attention is not None:
            output = self.attention_output_norm(self.attention(self.attention_norm(x), context, residual=residual))
            sum_norm = self.attention_sum_norm
        elif self.mlp is not None:
            output = self.mlp_output_norm(self.mlp(self.mlp_norm(x), residual=residual))
            sum_norm = self.mlp_sum_norm
        else:
            return x
        total = output if self._adds_residual else torch.add(x, output, alpha=self._multiplier)
        return sum_norm(total)  # type: ignore[no-any-return]  # torch: Module calls are Any

    def fused_weights(self) -> LayerWeights | None:
        """The layer's description for a call of all layers; None if that call does not support it."""
        first, second = self.attention_norm, self.mlp_norm
        if not self._is_usual or not isinstance(first, Norm) or not isinstance(second, Norm):
            return None
        assert self.attention is not None, "there is a norm before it"
        attention = self.attention.fused_weights()
        mlp = self.mlp.fused_weights() if isinstance(self.mlp, FeedForward | MixtureOfExperts) else None
        if attention is None or mlp is None or first.rms_weight is None or second.rms_weight is None:
            return None
        return LayerWeights(
            attention_norm=first.rms_weight,
            mlp_norm=second.rms_weight,
            eps=first.eps,
            weight_offset=first.offset,
            attention=attention,
            mlp=mlp,
        )


def _mixer(
    *, spec: DecoderSpec, layer: int, prefix: str, parallel: TensorParallel
) -> Attention | LatentAttention | LinearPart | RecurrentMixer | SideBySide | None:
    """The mixer of a layer before its feed-forward; None: nothing."""
    kind = spec.mixer(layer)
    if kind == "none":
        return None
    if kind == "linear":
        return LinearPart(spec=spec, prefix=prefix)
    if kind == "recurrent":
        return recurrent_mixer(spec=spec, layer=layer, prefix=prefix, parallel=parallel)
    if kind == "both":
        return SideBySide(spec=spec, layer=layer, prefix=prefix, parallel=parallel)
    if spec.latent is not None:
        return LatentAttention(spec=spec, latent=spec.latent, layer=layer, prefix=prefix, parallel=parallel)
    return Attention(spec=spec, layer=layer, prefix=prefix, parallel=parallel)


def _feed_forward(
    *, spec: DecoderSpec, layer: int, prefix: str, parallel: TensorParallel
) -> FeedForward | LinearPart | MixtureOfExperts | None:
    """The feed-forward of a layer; None: it has none."""
    moe = spec.layer_moe(layer)
    if not spec.has_feed_forward(layer):
        return None
    if spec.has_linear_feed_forward(layer):
        return LinearPart(spec=spec, prefix=prefix)
    if moe is not None:
        return MixtureOfExperts(spec=spec, moe=moe, prefix=prefix, parallel=parallel)
    size = spec.of_layer(layer).intermediate_size
    return FeedForward(spec=spec, intermediate_size=size, prefix=prefix, parallel=parallel)

"""Layers of Gemma 3n and Gemma 4: attention and feed-forward between norms, and additional branches. Knows tensors; no
requests."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pagoda_kernels.moe.route_tokens import route_tokens
from pagoda_worker.models.alt_up import AltUp, Laurel
from pagoda_worker.models.attention import Attention
from pagoda_worker.models.feed_forward import FeedForward, MixtureOfExperts
from pagoda_worker.models.forward_context import ForwardContext
from pagoda_worker.models.layer_inputs import LayerInputGate
from pagoda_worker.models.layers import Matrix, Norm
from pagoda_worker.models.spec import DecoderSpec, MoeSpec
from pagoda_worker.parallel.tensor_parallel import ALONE, TensorParallel


class GemmaLayer(nn.Module):
    """The shared part: attention and feed-forward with a norm before and after, and perhaps a layer's inputs."""

    def __init__(self, *, spec: DecoderSpec, layer: int, prefix: str = "", parallel: TensorParallel = ALONE) -> None:
        super().__init__()
        self._layer = layer

        def norm(name: str) -> Norm:
            return Norm(spec=spec, shape=(spec.hidden_size,), prefix=f"{prefix}.{name}")

        self.attention_norm = norm("attention_norm")
        self.attention = Attention(spec=spec, layer=layer, prefix=f"{prefix}.attention", parallel=parallel)
        self.attention_output_norm = norm("attention_output_norm")
        self.mlp_norm = norm("mlp_norm")
        self.mlp = FeedForward(
            spec=spec,
            intermediate_size=spec.of_layer(layer).intermediate_size,
            sparsity=spec.sparsity(layer),
            prefix=f"{prefix}.mlp",
            parallel=parallel,
        )
        self.mlp_output_norm = norm("mlp_output_norm")
        self.input_gate: LayerInputGate | None = None
        if spec.layer_inputs is not None:
            self.input_gate = LayerInputGate(spec=spec, inputs=spec.layer_inputs, prefix=f"{prefix}.input_gate")

    def _gated(self, x: Tensor, context: ForwardContext) -> Tensor | None:
        """The contribution of this layer's token inputs; None if there are none."""
        if self.input_gate is None:
            return None
        assert context.layer_inputs is not None, "the decoder has made them"
        # torch: Module calls are Any
        return self.input_gate(x, context.layer_inputs[:, self._layer])  # type: ignore[no-any-return]  # torch: Module calls are Any


class Gemma3nLayer(GemmaLayer):
    """A Gemma 3n layer: computes one of several hidden states of a token, and corrects all by it."""

    def __init__(self, *, spec: DecoderSpec, layer: int, prefix: str = "", parallel: TensorParallel = ALONE) -> None:
        super().__init__(spec=spec, layer=layer, prefix=prefix, parallel=parallel)
        alt_up = spec.alt_up
        assert alt_up is not None, "Gemma 3n has several hidden states a token"
        self._active = alt_up.active
        self.alt_up = AltUp(spec=spec, alt_up=alt_up, prefix=f"{prefix}.alt_up")
        self.laurel = Laurel(spec=spec, rank=alt_up.laurel_rank, prefix=f"{prefix}.laurel")

    def forward(self, streams: Tensor, context: ForwardContext) -> Tensor:
        """[num_streams, num_tokens, hidden_size] to the same."""
        predicted = self.alt_up.predict(streams)
        active = predicted[self._active]
        normed = self.attention_norm(active)
        attended = active + self.attention_output_norm(self.attention(normed, context))
        x = (attended + self.laurel(normed)) * 2**-0.5
        x = x + self.mlp_output_norm(self.mlp(self.mlp_norm(x)))
        corrected = self.alt_up.correct(predicted, x)
        gated = self._gated(self.alt_up.output(corrected), context)
        assert gated is not None, "Gemma 3n has inputs of layers"
        corrected[1:] += gated
        return corrected


class Gemma4Layer(GemmaLayer):
    """A Gemma 4 layer: the feed-forward may have experts next to it, and the output is scaled."""

    def __init__(self, *, spec: DecoderSpec, layer: int, prefix: str = "", parallel: TensorParallel = ALONE) -> None:
        super().__init__(spec=spec, layer=layer, prefix=prefix, parallel=parallel)
        self.layer_scale = nn.Parameter(torch.empty(1), requires_grad=False)
        self.experts: MixtureOfExperts | None = None
        if (moe := spec.layer_moe(layer)) is not None:
            self._add_experts(spec, moe, prefix, parallel)

    def _add_experts(self, spec: DecoderSpec, moe: MoeSpec, prefix: str, parallel: TensorParallel) -> None:
        self._eps, self._routing = spec.norm_eps, moe.routing
        self.experts = MixtureOfExperts(spec=spec, moe=moe, prefix=f"{prefix}.experts", parallel=parallel)
        for module in self.experts.experts.modules():
            if isinstance(module, Matrix):
                module.takes_adapters = False
        shape = (spec.hidden_size,)
        self.dense_output_norm = Norm(spec=spec, shape=shape, prefix=f"{prefix}.dense_output_norm")
        self.expert_norm = Norm(spec=spec, shape=shape, prefix=f"{prefix}.expert_norm")
        self.expert_output_norm = Norm(spec=spec, shape=shape, prefix=f"{prefix}.expert_output_norm")
        self.router_scale = nn.Parameter(torch.empty(shape), requires_grad=False)
        self.expert_scale = nn.Parameter(torch.empty(moe.num_experts), requires_grad=False)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """[num_tokens, hidden_size] to the same."""
        attended = self.attention_output_norm(self.attention(self.attention_norm(x), context))
        x, normed = self.mlp_norm.add(x, attended, alpha=1.0)
        transformed = self.mlp(normed)
        if self.experts is not None:
            transformed = self.dense_output_norm(transformed) + self._of_experts(x, self.experts)
        x = x + self.mlp_output_norm(transformed)
        gated = self._gated(x, context)
        return (x if gated is None else x + gated) * self.layer_scale

    def _of_experts(self, x: Tensor, experts: MixtureOfExperts) -> Tensor:
        """[num_tokens, hidden_size] before the feed-forward's norm to the same."""
        routed = F.rms_norm(x.float(), x.shape[-1:], eps=self._eps).to(x.dtype)
        routed = routed * self.router_scale * x.shape[-1] ** -0.5
        logits = experts.router.multiply(routed, out_dtype=torch.float32)
        weights, chosen = route_tokens(logits, self._routing)
        output = experts.of_routed(self.expert_norm(x), weights * self.expert_scale[chosen], chosen)
        return self.expert_output_norm(output)  # type: ignore[no-any-return]  # torch: Module calls are Any

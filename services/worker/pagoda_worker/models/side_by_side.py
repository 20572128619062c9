"""Attention and a recurrent part in parallel, over the same input (Falcon-H1). Knows tensors; no requests."""

from torch import Tensor, nn

from pagoda_kernels.decoder.decoder_layers import AttentionWeights
from pagoda_worker.models.attention import Attention
from pagoda_worker.models.forward_context import ForwardContext
from pagoda_worker.models.recurrent import recurrent_mixer
from pagoda_worker.models.spec import DecoderSpec
from pagoda_worker.parallel.tensor_parallel import ALONE, TensorParallel


class SideBySide(nn.Module):
    """The sum of attention over in * x and the recurrent part over x, each with a factor."""

    def __init__(self, *, spec: DecoderSpec, layer: int, prefix: str = "", parallel: TensorParallel = ALONE) -> None:
        super().__init__()
        self._input, self._attended, self._moved = spec.mixer_multipliers
        self.attention = Attention(spec=spec, layer=layer, prefix=f"{prefix}.attention", parallel=parallel)
        self.recurrent = recurrent_mixer(spec=spec, layer=layer, prefix=f"{prefix}.recurrent", parallel=parallel)

    def forward(self, x: Tensor, context: ForwardContext, residual: Tensor | None = None) -> Tensor:
        """[num_tokens, hidden_size] to the same, added to `residual`."""
        moved = self.recurrent(x, context) * self._moved
        output: Tensor = moved + self.attention(x * self._input, context) * self._attended
        return output if residual is None else residual + output

    def fused_weights(self) -> AttentionWeights | None:
        """See Attention."""
        return None

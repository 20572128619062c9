"""Vectors per token and layer, and their use in a layer (Gemma 3n, Gemma 4). Knows tensors; no requests."""

import torch
from torch import Tensor, nn

from pagoda_kernels.layers.act_and_mul import ACTIVATIONS
from pagoda_worker.models.layer_options import LayerInputsSpec
from pagoda_worker.models.layers import Embedding, Linear, Norm, activation_name
from pagoda_worker.models.spec import DecoderSpec


class LayerInputs(nn.Module):
    """(norm(projection of the embedding / sqrt(hidden_size)) + a row of the table * sqrt(width)) / sqrt(2)."""

    def __init__(self, *, spec: DecoderSpec, inputs: LayerInputsSpec, prefix: str = "") -> None:
        super().__init__()
        self._shape = (spec.num_layers, inputs.width)
        self._num_rows = inputs.vocab_size
        self._is_short = inputs.vocab_size < spec.vocab_size
        self._multiplier = spec.hidden_size**-0.5
        width = spec.num_layers * inputs.width
        self.table = Embedding(num_rows=inputs.vocab_size, dim=width, prefix=f"{prefix}.table")
        self.projection = Linear(
            in_features=spec.hidden_size, out_features=width, bias=False, prefix=f"{prefix}.projection"
        )
        self.norm = Norm(spec=spec, shape=(inputs.width,), prefix=f"{prefix}.norm")

    def forward(self, input_ids: Tensor, embedded: Tensor) -> Tensor:
        """[num_tokens] int64 and their embeddings [num_tokens, hidden_size] to [num_tokens, num_layers, width]."""
        if self._is_short:
            input_ids = torch.where(input_ids < self._num_rows, input_ids, 0)
        # Rounded as the table is, as its inventors do.
        rows = self.table(input_ids) * float(torch.tensor(self._shape[1] ** 0.5, dtype=self.table.dtype))
        projected = self.projection(embedded) * self._multiplier
        # torch: Module calls are Any
        return (self.norm(projected.unflatten(1, self._shape)) + rows.unflatten(1, self._shape)) * 2**-0.5  # type: ignore[no-any-return]  # torch: Module calls are Any


class LayerInputGate(nn.Module):
    """norm(projection(act(gate(x)) * input)): the contribution of a token's vector for a layer to its hidden state."""

    def __init__(self, *, spec: DecoderSpec, inputs: LayerInputsSpec, prefix: str = "") -> None:
        super().__init__()
        self._activation = ACTIVATIONS[activation_name(spec.activation)]
        hidden, width = spec.hidden_size, inputs.width
        self.gate = Linear(in_features=hidden, out_features=width, bias=False, prefix=f"{prefix}.gate")
        self.projection = Linear(in_features=width, out_features=hidden, bias=False, prefix=f"{prefix}.projection")
        self.norm = Norm(spec=spec, shape=(hidden,), prefix=f"{prefix}.norm")

    def forward(self, x: Tensor, inputs: Tensor) -> Tensor:
        """[num_tokens, hidden_size] and [num_tokens, width] to the shape of `x`."""
        # torch: Module calls are Any
        return self.norm(self.projection(self._activation(self.gate(x)) * inputs))  # type: ignore[no-any-return]  # torch: Module calls are Any

"""AltUp: several hidden states per token, of which a layer computes one; and LAuReL, a narrow branch next to attention
(Gemma 3n). Knows tensors; no requests."""

import torch
from torch import Tensor, nn

from pagoda_worker.models.layer_options import AltUpSpec
from pagoda_worker.models.layers import Linear, Norm
from pagoda_worker.models.spec import DecoderSpec

LEAST_SQUARE = 1e-5
"""Lower bound of a stream's mean square, before a division."""


class Streams(nn.Module):
    """Makes the hidden states of a token from its embedding, and joins them into one at the end."""

    def __init__(self, *, spec: DecoderSpec, alt_up: AltUpSpec, prefix: str = "") -> None:
        super().__init__()
        hidden = spec.hidden_size

        def projections(name: str) -> nn.ModuleList:
            return nn.ModuleList(
                Linear(in_features=hidden, out_features=hidden, bias=False, prefix=f"{prefix}.{name}.{number}")
                for number in range(alt_up.num_streams - 1)
            )

        self.opening = projections("opening")
        self.joining = projections("joining")

    def opened(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden_size] to [num_streams, num_tokens, hidden_size]: `x`, and projections as large as it."""
        size = _size(x)
        return torch.stack([x, *(_of_size(projection(x), size) for projection in self.opening)])

    def joined(self, streams: Tensor) -> Tensor:
        """The reverse: the mean of the first stream and of projections of the others, scaled to its magnitude."""
        first, size = streams[0], _size(streams[0])
        others = [_of_size(projection(x), size) for projection, x in zip(self.joining, streams[1:], strict=True)]
        return torch.stack([first, *others]).mean(dim=0)


def _size(x: Tensor) -> Tensor:
    """[num_tokens, 1] float32, the root of the mean square, which float16 may not hold."""
    return x.float().square().mean(dim=-1, keepdim=True).sqrt()


def _of_size(x: Tensor, size: Tensor) -> Tensor:
    squares = x.float().square().mean(dim=-1, keepdim=True)
    return (x * (size / squares.clamp(min=LEAST_SQUARE).sqrt())).to(x.dtype)


class AltUp(nn.Module):
    """Predicts a layer's output for each stream, and corrects the predictions by the output for the active stream."""

    def __init__(self, *, spec: DecoderSpec, alt_up: AltUpSpec, prefix: str = "") -> None:
        super().__init__()
        self._active, self._has_scale = alt_up.active, alt_up.has_output_scale
        self._multiplier = 1.0 / spec.hidden_size
        hidden, count = spec.hidden_size, alt_up.num_streams
        self.router_norm = Norm(spec=spec, shape=(hidden,), prefix=f"{prefix}.router_norm")
        self.router = self._mixing(hidden, count, f"{prefix}.router")
        self.prediction = self._mixing(count, count**2, f"{prefix}.prediction")
        self.correction = self._mixing(count, count, f"{prefix}.correction")
        self.output_scale = nn.Parameter(torch.empty(hidden), requires_grad=False)

    @staticmethod
    def _mixing(in_features: int, out_features: int, prefix: str) -> Linear:
        """A projection to factors of streams, small and not quantized."""
        linear = Linear(in_features=in_features, out_features=out_features, bias=False, prefix=prefix)
        linear.is_float = True
        return linear

    def _modalities(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden_size] to [num_tokens, num_streams]."""
        return torch.tanh(self.router(self.router_norm(x) * self._multiplier).float()).to(x.dtype)

    def predict(self, streams: Tensor) -> Tensor:
        """[num_streams, num_tokens, hidden_size] to the same: each stream with its share of all of them."""
        count = streams.shape[0]
        factors: Tensor = self.prediction(self._modalities(streams[self._active])).view(-1, count, count)
        predicted = streams
        for stream in range(count):
            predicted = predicted + factors[:, :, stream].t()[:, :, None] * streams[stream]
        return predicted

    def correct(self, predicted: Tensor, computed: Tensor) -> Tensor:
        """[num_streams, num_tokens, hidden_size], by what a layer has computed, [num_tokens, hidden_size]."""
        factors: Tensor = self.correction(self._modalities(computed)) + 1.0
        return predicted + factors.t()[:, :, None] * (computed - predicted[self._active])

    def output(self, corrected: Tensor) -> Tensor:
        """[num_tokens, hidden_size], the active stream, scaled for a layer's inputs."""
        active = corrected[self._active]
        return active * self.output_scale if self._has_scale else active


class Laurel(nn.Module):
    """x + norm(right(left(x)))."""

    def __init__(self, *, spec: DecoderSpec, rank: int, prefix: str = "") -> None:
        super().__init__()
        hidden = spec.hidden_size
        self.left = Linear(in_features=hidden, out_features=rank, bias=False, prefix=f"{prefix}.left")
        self.right = Linear(in_features=rank, out_features=hidden, bias=False, prefix=f"{prefix}.right")
        self.norm = Norm(spec=spec, shape=(hidden,), prefix=f"{prefix}.norm")

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden_size] to the same."""
        return x + self.norm(self.right(self.left(x)))  # type: ignore[no-any-return]  # torch: Module calls are Any

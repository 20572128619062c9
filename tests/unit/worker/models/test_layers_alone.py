"""A layer runs alone, with the default spec and no checkpoint."""

import torch

from pagoda_worker.models.decoder import Decoder
from pagoda_worker.models.feed_forward import FeedForward
from pagoda_worker.models.layers import Norm
from pagoda_worker.models.spec import DecoderSpec


def filled(layer: torch.nn.Module) -> torch.nn.Module:
    """With random values in place of a checkpoint's."""
    generator = torch.Generator().manual_seed(0)
    for module in layer.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            value = torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
            setattr(module, name, torch.nn.Parameter(value, requires_grad=False))
    return layer


def test_a_feed_forward_runs_alone() -> None:
    spec = DecoderSpec()
    layer = filled(FeedForward(spec=spec, intermediate_size=spec.intermediate_size))
    x = torch.randn(5, spec.hidden_size)
    gate, up = (x @ layer.up_proj.weight.T).chunk(2, dim=-1)
    expected = (torch.nn.functional.silu(gate) * up) @ layer.down_proj.weight.T
    torch.testing.assert_close(layer(x), expected)


def test_a_norm_runs_alone() -> None:
    spec = DecoderSpec()
    layer = filled(Norm(spec=spec, shape=(spec.hidden_size,)))
    x = torch.randn(5, spec.hidden_size)
    expected = torch.nn.functional.rms_norm(x, (spec.hidden_size,), eps=spec.norm_eps) * layer.weight
    torch.testing.assert_close(layer(x), expected)


def test_a_decoder_is_built_of_the_default() -> None:
    with torch.device("meta"):
        model = Decoder(spec=DecoderSpec())
    assert (model.num_layers, len(model.attention_layers)) == (2, 2)
    hidden = torch.randn(3, model.embedding_size)
    assert filled(model).compute_logits(hidden).shape == (3, model.vocab_size)

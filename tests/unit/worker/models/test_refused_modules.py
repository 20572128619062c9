"""Modules of transformers that do more than causal attention: each is refused, and the message says what it does."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP

from pagoda_common.errors import ModelLoadError
from pagoda_worker.loader.stored import StoredMatrix
from pagoda_worker.models.encoders import backbone as encoders
from pagoda_worker.models.encoders.packed_attention import PACKED, PackedRun, attend_packed
from pagoda_worker.models.transformers_model import attention as attentions
from pagoda_worker.models.transformers_model.attention import MaskRule
from pagoda_worker.models.transformers_model.backbone import build_backbone
from pagoda_worker.models.transformers_model.probe import probe

LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 32,
}


@pytest.fixture
def llama() -> PreTrainedModel:
    return build_backbone(LLAMA)


def refusal(backbone: PreTrainedModel) -> str:
    with pytest.raises(ModelLoadError) as raised:
        probe(backbone)
    return raised.value.message


def attending(monkeypatch: pytest.MonkeyPatch, change: Callable[..., Any]) -> None:
    """Attention of every layer gets what `change` makes of its arguments."""
    attention = attentions._attention

    def changed(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, **others: Any) -> Any:
        return attention(module, **change(query=query, key=key, value=value, attention_mask=mask, **others))

    monkeypatch.setitem(attentions.AttentionInterface._global_mapping, attentions.NAME, changed)


def test_attention_alone_is_not_refused(llama: PreTrainedModel) -> None:
    assert len(probe(llama).layers) == 2


def test_an_option_of_attention_that_is_unknown(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    attending(monkeypatch, lambda **arguments: arguments | {"temperature": 2.0, "bias": 1, "absent": None})
    assert refusal(llama) == "its attention takes bias, temperature"


def test_a_mask_that_is_no_window(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    attending(monkeypatch, lambda **arguments: arguments | {"attention_mask": MaskRule(None, is_known=False)})
    assert refusal(llama) == "its attention masks are neither causal nor sliding windows"


def test_queries_that_are_no_heads_of_tokens(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    attending(monkeypatch, lambda **arguments: arguments | {"query": arguments["query"][0]})
    assert refusal(llama) == "its attention takes other shapes than heads of tokens"


def test_keys_of_other_tokens_than_its_own(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    twice = {name: lambda x: torch.cat((x, x), dim=2) for name in ("key", "value")}
    attending(monkeypatch, lambda **given: given | {name: twice[name](given[name]) for name in twice})
    assert refusal(llama) == "it attends to other keys than those of its own tokens"


@pytest.mark.parametrize("count", [1, 4])
def test_sinks_that_are_not_of_its_heads(count: int, llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    attending(monkeypatch, lambda **given: given | {"s_aux": torch.zeros(count)})
    assert refusal(llama) == "its sinks are not one for each head of a rank"


def test_attention_that_sees_later_tokens(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    attending(monkeypatch, lambda **given: given | {"attention_mask": None, "is_causal": False})
    assert refusal(llama) == "its attention is not causal"


def test_a_mask_of_its_own_making(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    attending(monkeypatch, lambda **given: given | {"attention_mask": torch.ones(1, 1, 2, 2)})
    assert refusal(llama) == "it uses custom attention masks"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ImportError("no", name="fla"), "its LlamaMLP needs the package fla, which is not installed"),
        (AttributeError("no", name="num_experts"), "its LlamaMLP wants num_experts, which config.json does not have"),
        (ImportError("no"), "its LlamaMLP cannot be built of such a config.json"),
        (KeyError("x"), "its LlamaMLP cannot be built of such a config.json"),
        (KeyError(attentions.NAME), "its attention does not go through transformers' AttentionInterface"),
    ],
    ids=repr,
)
def test_a_module_that_cannot_be_built(error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def __init__(self: nn.Module, *args: Any, **others: Any) -> None:
        nn.Module.__init__(self)
        raise error

    monkeypatch.setattr(LlamaMLP, "__init__", __init__)
    with pytest.raises(ModelLoadError) as raised:
        build_backbone(LLAMA)
    assert raised.value.message == reason


def test_a_layer_that_does_not_attend(llama: PreTrainedModel) -> None:
    llama.model.layers = llama.model.layers[:1]
    assert refusal(llama) == "only 1 of its 2 layers attend through the interface"


def test_a_convolution_over_tokens(llama: PreTrainedModel) -> None:
    llama.model.layers[1].mix = nn.Conv1d(16, 16, 3)
    assert refusal(llama) == "it has convolutions over tokens (model.layers.1.mix)"


def test_a_module_without_positions(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        raise AssertionError("is not reached")

    monkeypatch.setattr(llama, "forward", forward)
    assert refusal(llama) == "its forward pass takes no positions"


def fails_with(error: type[Exception], backbone: PreTrainedModel, *named: str) -> None:
    """Its last layer raises, and names those of its inputs that are of a type named."""

    def forward(hidden: Tensor, **inputs: Any) -> Tensor:
        raise error(*(kind for value in inputs.values() if (kind := type(value).__name__) in named))

    backbone.model.layers[-1].forward = forward


def test_a_part_that_asks_for_values_gets_zeros(llama: PreTrainedModel) -> None:
    forward = llama.model.layers[-1].forward
    told: list[object] = []

    def asking(hidden: Tensor, *, position_ids: Tensor, **inputs: Any) -> Tensor:
        last = position_ids.max()
        told.extend((last.item(), (last > 0).item(), int(last), float(last), bool(last), range(9)[last], 1 in last))
        told.extend((position_ids.tolist(), len(hidden[0, :last]), len(torch.zeros(last)), len(hidden.nonzero())))
        result: Tensor = forward(hidden, position_ids=position_ids, **inputs)
        return result

    llama.model.layers[-1].forward = asking
    assert len(probe(llama).layers) == 2
    assert told == [0, False, 0, 0.0, False, 0, False, [[0, 0]], 0, 0, 0]


@pytest.mark.parametrize("error", [AssertionError, TypeError, ValueError])
def test_a_part_that_misses_an_input(error: type[Exception], llama: PreTrainedModel) -> None:
    fails_with(error, llama)
    assert refusal(llama) == "its LlamaDecoderLayer needs inputs other than token ids and positions"


def test_a_part_that_needs_values(llama: PreTrainedModel) -> None:
    fails_with(RuntimeError, llama)
    assert refusal(llama) == "its LlamaDecoderLayer cannot run on the meta device, so its attention cannot be checked"


def test_a_part_that_looks_at_its_mask(llama: PreTrainedModel) -> None:
    fails_with(AttributeError, llama, "MaskRule")
    assert refusal(llama) == "it uses custom attention masks"


def test_a_part_that_caches_more_than_keys_and_values(llama: PreTrainedModel) -> None:
    fails_with(AttributeError, llama, "PassingCache")
    assert refusal(llama) == "its layers cache more than keys and values"


def test_a_module_that_keeps_its_hidden_states_to_itself(llama: PreTrainedModel) -> None:
    forward = llama.model.forward
    names = ("cache", "past_key_values", "hidden_states", "attentions")

    def plain(**inputs: Any) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=forward(**inputs).last_hidden_state, **dict.fromkeys(names))

    llama.model.forward = plain
    assert refusal(llama) == "its module returns no final hidden states"


def test_a_failed_check_leaves_the_module_as_it_was(llama: PreTrainedModel) -> None:
    fails_with(RuntimeError, llama)
    refusal(llama)
    del llama.model.layers[-1].forward
    assert attentions.CURRENT.running is None
    assert not any(module._forward_hooks for module in llama.modules())
    assert len(probe(llama).layers) == 2


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "unheard_of"}, "does not know model_type 'unheard_of'"),
        ({"model_type": "unheard_of", "auto_map": {"a": "b"}}, "'unheard_of', and code of a checkpoint is not run"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key' is not supported by"),
        ({"is_encoder_decoder": True}, "it is an encoder and a decoder"),
        ({"hidden_size": "wide"}, "config.json cannot be understood: "),
    ],
)
def test_an_encoder_that_is_another_than_transformers_has(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelLoadError) as raised:
        encoders.build_encoder({"model_type": "bert"} | config, "none")
    assert reason in raised.value.message


def test_an_encoder_that_transformers_cannot_build() -> None:
    def build() -> PreTrainedModel:
        raise ValueError("a  key\nof the config " + 100 * "x")

    with pytest.raises(ModelLoadError) as raised:
        encoders._on_meta(build)
    assert raised.value.message.startswith("its module cannot be built: ValueError: a key of the config xxx")
    assert len(raised.value.message) < 150


@pytest.mark.parametrize("options", [{"softcap": 0.5}, {"s_aux": torch.zeros(2)}])
def test_an_encoder_with_sinks_or_bounded_scores(options: dict[str, Any]) -> None:
    states = torch.zeros(1, 2, 3, 4)
    PACKED.running = PackedRun(starts=[0, 3])
    try:
        with pytest.raises(ModelLoadError, match=r"^its attention has sinks or bounded scores$"):
            attend_packed(nn.Module(), states, states, states, **options)
        with pytest.raises(ModelLoadError, match=r"^its attention takes other shapes than heads of tokens$"):
            attend_packed(nn.Module(), states[0], states, states)
        assert PACKED.running.num_calls == 0
    finally:
        PACKED.running = None


def test_parts_of_a_quantized_matrix_that_do_not_fit() -> None:
    class Part:
        shape = (3, 5)

    class Format:
        described_by = None

        def shape(self, shapes: dict[str, list[int]]) -> list[int]:
            raise ValueError

    format_of_pairs: Any = Format()
    parts: Any = {"codes": Part(), "scales": Part()}
    matrix = StoredMatrix(format=format_of_pairs, stored_name="layers.0.q", parts=parts)
    with pytest.raises(ModelLoadError, match=r"^layers\.0\.q is not a matrix: codes \(3, 5\), scales \(3, 5\)$"):
        _ = matrix.shape

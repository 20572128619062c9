"""Encoders that the hub has with code of their own: what the worker computes is what that code computes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pagoda_common.errors import ModelLoadError
from pagoda_common.params.pooling_params import PoolingParams
from tests.encoders import SEP, prompts_of
from tests.hub_encoders import GTE, JINA, JINA_CODE, NTK, Reference, write_hub_encoder
from tests.unit.worker.pooling.driver import PoolingDriver
from tests.unit.worker.pooling.test_families import CLOSE, LENGTHS, cosine

FAMILIES: dict[str, dict[str, Any]] = {
    "gte": GTE,
    "gte without scaling": GTE | {"rope_scaling": None},
    "gte mixed": GTE | {"rope_scaling": NTK | {"mixed_b": 0.7}},
    "gte without types": GTE | {"type_vocab_size": 0},
    "gte by the name of transformers": GTE | {"model_type": "gte", "architectures": ["GteModel"]},
    "gte by the name of vLLM": GTE | {"architectures": ["GteNewModel"]},
    "jina": JINA,
    "jina of eight heads": JINA | {"num_attention_heads": 8},
    "jina reglu": JINA | {"feed_forward_type": "reglu"},
    "jina code": JINA_CODE,
}
RAW = PoolingParams(task="token_embed", normalize=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_are_those_of_the_published_code(family: str, tmp_path: Path) -> None:
    write_hub_encoder(tmp_path, FAMILIES[family])
    reference, driver = Reference(tmp_path), PoolingDriver(tmp_path)
    prompts = prompts_of(LENGTHS)
    for prompt, made in zip(prompts, driver.pool(prompts, [RAW] * len(prompts)), strict=True):
        wanted = reference.hidden(prompt)
        assert made.shape == wanted.shape
        assert cosine(made, wanted) > CLOSE
        np.testing.assert_allclose(made, wanted.numpy(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["gte", "jina", "jina code"])
def test_bfloat16_is_close(family: str, tmp_path: Path) -> None:
    write_hub_encoder(tmp_path, FAMILIES[family])
    reference, driver = Reference(tmp_path), PoolingDriver(tmp_path, dtype="bfloat16")
    prompts = prompts_of(LENGTHS)
    for prompt, made in zip(prompts, driver.pool(prompts), strict=True):
        hidden = reference.hidden(prompt)
        assert cosine(made, hidden[0] if family == "gte" else hidden.mean(0)) > 0.999


@pytest.mark.parametrize(("config", "prefix"), [(GTE, "new."), (JINA, "bert."), (JINA_CODE, "bert.")])
def test_scores_of_pairs(config: dict[str, Any], prefix: str, tmp_path: Path) -> None:
    name = "New" if prefix == "new." else "JinaBert"
    write_hub_encoder(
        tmp_path, config | {"architectures": [f"{name}ForSequenceClassification"]}, prefix=prefix, labels=1
    )
    reference, driver = Reference(tmp_path), PoolingDriver(tmp_path)
    assert driver.facts.pooling_tasks[0] == "classify"
    (prompt,) = prompts_of([40])
    prompt[8] = SEP
    params = [PoolingParams(second_text_start=9, use_activation=False), PoolingParams(use_activation=False)]
    paired, alone = driver.pool([prompt, prompt], params)
    np.testing.assert_allclose(alone, reference.logits(prompt).numpy(), atol=1e-4)
    np.testing.assert_allclose(paired, reference.logits(prompt, [0] * 9 + [1] * 31).numpy(), atol=1e-4)
    assert not np.allclose(paired, alone, atol=1e-4)


@pytest.mark.parametrize(("config", "prefix"), [(GTE, "new."), (JINA, "bert."), (JINA_CODE, "bert.")])
def test_labels_of_each_token(config: dict[str, Any], prefix: str, tmp_path: Path) -> None:
    name = "New" if prefix == "new." else "JinaBert"
    write_hub_encoder(tmp_path, config | {"architectures": [f"{name}ForTokenClassification"]}, prefix=prefix, labels=3)
    reference, driver = Reference(tmp_path), PoolingDriver(tmp_path)
    assert driver.facts.pooling_tasks == ("token_classify",)
    prompts = prompts_of([1, 40, 7])
    params = [PoolingParams(use_activation=False), PoolingParams(use_activation=False), PoolingParams()]
    for prompt, made, asked in zip(prompts, driver.pool(prompts, params), params, strict=True):
        wanted = reference.token_logits(prompt)
        wanted = wanted if asked.use_activation is False else wanted.softmax(-1)
        np.testing.assert_allclose(made, wanted.numpy(), atol=1e-4)


def test_an_embedding_may_be_stored_within_a_model_with_a_head(tmp_path: Path) -> None:
    """gte-multilingual-base has the names of its token classifier, and a classifier that no vector needs."""
    write_hub_encoder(tmp_path, GTE | {"architectures": ["NewModel", "NewForTokenClassification"]}, prefix="new.")
    (prompt,) = prompts_of([30])
    (made,) = PoolingDriver(tmp_path).pool([prompt])
    wanted = F.normalize(Reference(tmp_path).hidden(prompt)[0], dim=0)
    np.testing.assert_allclose(made, wanted.numpy(), atol=1e-4)


def test_the_mean_is_what_jina_asks_for(tmp_path: Path) -> None:
    write_hub_encoder(tmp_path, JINA)
    (prompt,) = prompts_of([30])
    (made,) = PoolingDriver(tmp_path).pool([prompt])
    wanted = F.normalize(Reference(tmp_path).hidden(prompt).mean(0), dim=0)
    np.testing.assert_allclose(made, wanted.numpy(), atol=1e-4)


@pytest.mark.parametrize(
    ("config", "other"),
    [
        (GTE, {"rope_scaling": {"type": "ntk", "factor": 4.0}}),
        (GTE, {"rope_scaling": None}),
        (GTE, {"rope_theta": 10_000}),
        (GTE, {"layer_norm_eps": 0.1}),
        (JINA, {"feed_forward_type": "reglu"}),
        (JINA, {"layer_norm_eps": 0.1}),
        (JINA, {"num_attention_heads": 8}),
    ],
)
def test_each_option_counts(config: dict[str, Any], other: dict[str, Any], tmp_path: Path) -> None:
    """A model that read one of them wrongly would be told from the reference."""
    for name, changed in (("one", config), ("other", config | other)):
        (tmp_path / name).mkdir()
        write_hub_encoder(tmp_path / name, changed)
    (prompt,) = prompts_of([200])
    first, second = (PoolingDriver(tmp_path / name).pool([prompt], [RAW])[0] for name in ("one", "other"))
    assert cosine(first, second) < CLOSE
    assert cosine(second, Reference(tmp_path / "other").hidden(prompt)) > CLOSE


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (GTE | {"position_embedding_type": "absolute"}, "position_embedding_type is 'absolute', must be 'rope'"),
        (GTE | {"layer_norm_type": "rms_norm"}, "layer_norm_type is 'rms_norm', must be 'layer_norm'"),
        (GTE | {"logn_attention_scale": True}, "logn_attention_scale is 'True', must be False"),
        (GTE | {"pack_qkv": False}, "pack_qkv is 'False', must be True"),
        (GTE | {"rope_scaling": {"type": "ntk"}}, "rope_scaling of type 'ntk' cannot be understood"),
        (GTE | {"rope_scaling": {"type": "ntk", "factor": -1}}, "must be positive"),
        (JINA | {"position_embedding_type": "absolute"}, "position_embedding_type is 'absolute', must be 'alibi'"),
        (JINA | {"feed_forward_type": "original"}, "feed_forward_type is 'original', must be geglu or reglu"),
        (JINA | {"emb_pooler": "max"}, "emb_pooler 'max' is not supported"),
    ],
)
def test_what_no_published_checkpoint_has_is_refused(config: dict[str, Any], told: str, tmp_path: Path) -> None:
    write_hub_encoder(tmp_path, config)
    with pytest.raises(ModelLoadError, match=told):
        PoolingDriver(tmp_path)


def test_weights_of_the_vocabulary_of_jina(tmp_path: Path) -> None:
    """A masked language model is one with its tokens' matrix as head."""
    write_hub_encoder(tmp_path, JINA, prefix="bert.")
    (tmp_path / "modules.json").write_text(
        '[{"path": "", "type": "sentence_transformers.sparse_encoder.models.MLMTransformer"},'
        '{"path": "1_SpladePooling", "type": "sentence_transformers.sparse_encoder.models.SpladePooling"}]'
    )
    from safetensors.torch import load_file, save_file

    tensors, size = load_file(tmp_path / "model.safetensors"), int(JINA["hidden_size"])
    generator = torch.Generator().manual_seed(1)
    head = {"dense.weight": (size, size), "dense.bias": (size,), "LayerNorm.weight": (size,), "LayerNorm.bias": (size,)}
    given = {
        f"cls.predictions.transform.{name}": torch.randn(shape, generator=generator) for name, shape in head.items()
    }
    given["cls.predictions.bias"] = torch.randn(int(JINA["vocab_size"]), generator=generator)
    save_file(tensors | given, tmp_path / "model.safetensors", metadata={"format": "pt"})
    reference = Reference(tmp_path)
    (prompt,) = prompts_of([20])
    (made,) = PoolingDriver(tmp_path).pool([prompt])
    x = reference._norm(
        "cls.predictions.transform.LayerNorm",
        F.gelu(reference._linear("cls.predictions.transform.dense", reference.hidden(prompt))),
    )
    logits = x @ reference.tensors["embeddings.word_embeddings.weight"].T + reference.tensors["cls.predictions.bias"]
    np.testing.assert_allclose(made, torch.log1p(logits.relu()).amax(0).numpy(), rtol=1e-3, atol=1e-3)

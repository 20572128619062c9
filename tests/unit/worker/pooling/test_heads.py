"""Labels and scores: what transformers' heads give, and what is made of other heads."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pagoda_common.params.pooling_params import PoolingParams
from tests.encoders import CLS, SEP, hidden_of, make_encoder, prompts_of
from tests.unit.worker.pooling.driver import PoolingDriver

LENGTHS = (1, 2, 17, 511, 64)
LABELS = ("BertFor", "RobertaFor", "XLMRobertaFor", "DistilBertFor", "ElectraFor", "MPNetFor", "AlbertFor")
LABELS += ("ModernBertFor", "DebertaV2For", "GteFor", "NomicBertFor", "Qwen3For", "JinaEmbeddingsV3For")
RAW = PoolingParams(use_activation=False)


@torch.inference_mode()
def logits_of(model: Any, prompt: list[int], types: list[int] | None = None) -> torch.Tensor:
    given = torch.tensor([prompt])
    named = {} if types is None else {"token_type_ids": torch.tensor([types])}
    return model(input_ids=given, attention_mask=torch.ones_like(given), **named).logits[0]


@pytest.mark.parametrize("family", LABELS)
@pytest.mark.parametrize("num_labels", [1, 3])
def test_labels_of_texts(family: str, num_labels: int, tmp_path: Path) -> None:
    model = make_encoder(family + "SequenceClassification", tmp_path, num_labels=num_labels)
    driver, prompts = PoolingDriver(tmp_path), prompts_of(LENGTHS)
    assert driver.facts.pooling_tasks[0] == "classify"
    for prompt, raw, made in zip(prompts, driver.pool(prompts, RAW), driver.pool(prompts), strict=True):
        wanted = logits_of(model, prompt)
        np.testing.assert_allclose(raw, wanted.numpy(), rtol=1e-3, atol=1e-4)
        activated = wanted.sigmoid() if num_labels == 1 else wanted.softmax(-1)
        np.testing.assert_allclose(made, activated.numpy(), atol=1e-4)


@pytest.mark.parametrize("family", ["BertFor", "ModernBertFor", "DistilBertFor", "DebertaV2For", "Qwen3For"])
def test_labels_of_tokens(family: str, tmp_path: Path) -> None:
    model = make_encoder(family + "TokenClassification", tmp_path, num_labels=3)
    driver, prompts = PoolingDriver(tmp_path), prompts_of(LENGTHS)
    for prompt, made in zip(prompts, driver.pool(prompts, RAW), strict=True):
        np.testing.assert_allclose(made, logits_of(model, prompt).numpy(), rtol=1e-3, atol=1e-4)


def test_the_mean_may_be_what_a_head_takes(tmp_path: Path) -> None:
    model = make_encoder("ModernBertForSequenceClassification", tmp_path, num_labels=2, classifier_pooling="mean")
    (prompt,) = prompts_of([50])
    made = PoolingDriver(tmp_path).pool([prompt], RAW)[0]
    np.testing.assert_allclose(made, logits_of(model, prompt).numpy(), atol=1e-4)


@pytest.mark.parametrize("family", ["BertFor", "XLMRobertaFor", "ModernBertFor", "ElectraFor"])
def test_the_second_text_of_a_pair_has_its_own_type(family: str, tmp_path: Path) -> None:
    model = make_encoder(family + "SequenceClassification", tmp_path, num_labels=1)
    driver = PoolingDriver(tmp_path)
    (prompt,) = prompts_of([20])
    prompt[8] = SEP
    has_types = family == "BertFor" or family == "ElectraFor"
    params = [PoolingParams(second_text_start=9 if has_types else 0, use_activation=False), RAW]
    paired, alone = driver.pool([prompt, prompt], params)
    types = [0] * 9 + [1] * 11 if has_types else None
    np.testing.assert_allclose(paired, logits_of(model, prompt, types).numpy(), atol=1e-4)
    assert has_types == (not np.allclose(paired, alone, atol=1e-4))


@pytest.mark.parametrize(("family", "num_types"), [("BertFor", 1), ("XLMRobertaFor", 1), ("DebertaV2For", 0)])
def test_a_model_of_one_type_takes_a_pair_as_one_text(family: str, num_types: int, tmp_path: Path) -> None:
    """Whatever types its tokenizer gives."""
    model = make_encoder(family + "SequenceClassification", tmp_path, num_labels=1, type_vocab_size=num_types)
    (prompt,) = prompts_of([20])
    prompt[8] = SEP
    (made,) = PoolingDriver(tmp_path).pool([prompt], PoolingParams(second_text_start=9, use_activation=False))
    np.testing.assert_allclose(made, logits_of(model, prompt).numpy(), atol=1e-4)


@pytest.mark.parametrize(
    ("options", "function"),
    [
        ({"problem_type": "multi_label_classification"}, torch.sigmoid),
        ({"problem_type": "regression"}, lambda x: x),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, lambda x: x),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, torch.sigmoid),
    ],
)
def test_activations_are_the_checkpoints(options: dict[str, Any], function: Any, tmp_path: Path) -> None:
    model = make_encoder("BertForSequenceClassification", tmp_path, num_labels=2, **options)
    (prompt,) = prompts_of([20])
    made = PoolingDriver(tmp_path).pool([prompt])[0]
    np.testing.assert_allclose(made, function(logits_of(model, prompt)).numpy(), atol=1e-4)


def test_weights_of_the_vocabulary(tmp_path: Path) -> None:
    model = make_encoder("BertForMaskedLM", tmp_path)
    (tmp_path / "modules.json").write_text(
        '[{"path": "", "type": "sentence_transformers.sparse_encoder.models.MLMTransformer"},'
        '{"path": "1_SpladePooling", "type": "sentence_transformers.sparse_encoder.models.SpladePooling"}]'
    )
    driver, prompts = PoolingDriver(tmp_path), prompts_of((2, 30))
    assert driver.facts.pooling_tasks == ("embed", "sparse")
    for prompt, made in zip(prompts, driver.pool(prompts), strict=True):
        wanted = torch.log1p(torch.relu(logits_of(model, prompt))).amax(0)
        np.testing.assert_allclose(made, wanted.numpy(), rtol=1e-3, atol=1e-4)


VLLM_OVERRIDES = {"architectures": ["Qwen3ForSequenceClassification"], "is_original_qwen3_reranker": True}


@pytest.mark.parametrize(("runner", "others"), [("pooling", {}), ("auto", VLLM_OVERRIDES)])
def test_a_reranker_by_the_logits_of_two_tokens(runner: str, others: dict[str, Any], tmp_path: Path) -> None:
    model = make_encoder("Qwen3ForCausalLM", tmp_path, tie_word_embeddings=False)
    overrides = {"classifier_from_token": ["a", "b"], "method": "from_2_way_softmax"} | others
    driver = PoolingDriver(tmp_path, runner=runner, hf_overrides=json.dumps(overrides))
    assert driver.facts.pooling_tasks[:2] == ("classify", "score")
    first, second = model_token("a"), model_token("b")
    for prompt, made in zip(prompts := prompts_of((2, 40)), driver.pool(prompts), strict=True):
        last = logits_of(model, prompt)[-1]
        wanted = torch.stack([last[first], last[second]]).softmax(0)[1]
        np.testing.assert_allclose(made, [float(wanted)], atol=1e-5)


def model_token(text: str) -> int:
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet()).index(text)


def test_lexical_weights_and_vectors_of_tokens_of_bge_m3(tmp_path: Path) -> None:
    model = make_encoder("XLMRobertaModel", tmp_path, bos_token_id=CLS, eos_token_id=SEP)
    sparse, dense = torch.nn.Linear(64, 1), torch.nn.Linear(64, 64)
    torch.save(sparse.state_dict(), tmp_path / "sparse_linear.pt")
    torch.save(dense.state_dict(), tmp_path / "colbert_linear.pt")
    driver = PoolingDriver(tmp_path)
    (prompt,) = prompts_of([12])
    prompt[0], prompt[-1] = CLS, SEP
    params = [PoolingParams(task="embed"), PoolingParams(task="token_classify"), PoolingParams(task="token_embed")]
    vector, weights, tokens = driver.pool([prompt] * 3, params)
    hidden = hidden_of(model, prompt)
    with torch.inference_mode():
        np.testing.assert_allclose(vector, torch.nn.functional.normalize(hidden[0], dim=0).numpy(), atol=1e-5)
        wanted = torch.relu(sparse(hidden))[1:-1]
        np.testing.assert_allclose(weights.reshape(-1, 1), wanted.numpy(), atol=1e-4)
        wanted = torch.nn.functional.normalize(dense(hidden[1:]), dim=-1)
    np.testing.assert_allclose(tokens, wanted.numpy(), atol=1e-4)


def test_tasks_that_the_pooler_config_leaves_out_are_known(tmp_path: Path) -> None:
    make_encoder("BertModel", tmp_path)
    all_of_them = PoolingDriver(tmp_path).facts
    assert (all_of_them.pooling_tasks, all_of_them.unserved_pooling_tasks) == (("embed", "token_embed"), ())
    facts = PoolingDriver(tmp_path, pooler_config='{"task": "token_embed"}').facts
    assert (facts.pooling_tasks, facts.unserved_pooling_tasks) == (("token_embed",), ("embed",))


def test_a_sequence_without_finite_states_fails_alone(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    make_encoder("BertModel", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["embeddings.word_embeddings.weight"][7] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    output = PoolingDriver(tmp_path).step([[1, 2, 3], [1, 7, 3], [4, 5]])
    assert [bad.slot for bad in output.bad_slots] == [1]
    assert output.pooled is not None
    assert output.pooled.slots.tolist() == [0, 2]


def test_a_colbert_gives_shorter_vectors_of_tokens_alone(tmp_path: Path) -> None:
    model = make_encoder("BertModel", tmp_path)
    matrix = torch.randn(24, 64, generator=torch.Generator().manual_seed(4)) * 0.1
    stored = {f"bert.{name}": tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    save_file({**stored, "linear.weight": matrix}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["HF_ColBERT"]}))
    driver, prompts = PoolingDriver(tmp_path), prompts_of(LENGTHS)
    assert driver.facts.pooling_tasks == ("token_embed",)
    for prompt, made in zip(prompts, driver.pool(prompts), strict=True):
        wanted = torch.nn.functional.normalize(hidden_of(model, prompt) @ matrix.T, dim=-1)
        np.testing.assert_allclose(made.reshape(len(prompt), -1), wanted.numpy(), atol=1e-4)


def test_a_colbert_by_vllms_name_has_its_matrix_in_a_module(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = make_encoder("ModernBertModel", tmp_path)
    matrix = torch.randn(24, 64, generator=torch.Generator().manual_seed(4)) * 0.1
    (tmp_path / "1_Dense").mkdir()
    save_file({"linear.weight": matrix}, tmp_path / "1_Dense" / "model.safetensors")
    (tmp_path / "1_Dense" / "config.json").write_text('{"activation_function": "torch.nn.modules.linear.Identity"}')
    kinds = [("", "sentence_transformers.models.Transformer"), ("1_Dense", "pylate.models.Dense.Dense")]
    (tmp_path / "modules.json").write_text(json.dumps([{"path": path, "type": kind} for path, kind in kinds]))
    assert PoolingDriver(tmp_path).facts.pooling_tasks == ("token_embed", "embed")
    driver = PoolingDriver(tmp_path, hf_overrides='{"architectures": ["ColBERTModernBertModel"]}')
    assert driver.facts.pooling_tasks == ("token_embed",)
    (prompt,) = prompts_of([12])
    (made,) = driver.pool([prompt])
    wanted = torch.nn.functional.normalize(hidden_of(model, prompt) @ matrix.T, dim=-1)
    np.testing.assert_allclose(made.reshape(len(prompt), -1), wanted.numpy(), atol=1e-4)

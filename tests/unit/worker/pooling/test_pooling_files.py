"""What stands beside a checkpoint decides what a text becomes: poolings, matrices, normalisation; or it is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pagoda_common.config.engine_config import ModelConfig
from pagoda_common.errors import ModelLoadError
from pagoda_common.params.pooling_params import PoolingParams
from pagoda_worker.loader.checkpoint import open_checkpoint
from tests.encoders import hidden_of, make_encoder, prompts_of, write_modules
from tests.unit.worker.pooling.driver import PoolingDriver
from tests.unit.worker.pooling.test_families import CLOSE, cosine

PREFIX = "sentence_transformers.models."
LENGTHS = (1, 2, 17, 300)


def by_hand(hidden: Tensor, pooling: str) -> Tensor:
    """sentence-transformers' Pooling of one sequence, written out."""
    if pooling == "cls_token":
        return hidden[0]
    if pooling == "lasttoken":
        return hidden[len(hidden) - 1]
    if pooling == "max_tokens":
        return hidden.amax(0)
    total = torch.zeros(hidden.shape[1], dtype=torch.float64)
    weight = 0.0
    for place, row in enumerate(hidden.double()):
        one = place + 1.0 if pooling == "weightedmean_tokens" else 1.0
        total, weight = total + one * row, weight + one
    return (total / (weight**0.5 if pooling == "mean_sqrt_len_tokens" else weight)).float()


POOLINGS = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")


@pytest.mark.parametrize("pooling", [*POOLINGS, "cls_token+mean_tokens"])
@pytest.mark.parametrize("normalizes", [True, False])
def test_poolings_of_the_files(pooling: str, normalizes: bool, tmp_path: Path) -> None:
    model = make_encoder("BertModel", tmp_path)
    write_modules(tmp_path, pooling, normalizes=normalizes)
    driver, prompts = PoolingDriver(tmp_path), prompts_of(LENGTHS)
    assert driver.facts.embedding_size == 64 * len(pooling.split("+"))
    for prompt, made in zip(prompts, driver.pool(prompts), strict=True):
        wanted = torch.cat([by_hand(hidden_of(model, prompt), one) for one in pooling.split("+")])
        wanted = wanted / wanted.norm() if normalizes else wanted
        np.testing.assert_allclose(made, wanted.numpy(), rtol=1e-3, atol=1e-4)
        assert cosine(made, wanted) > CLOSE


def test_a_matrix_after_the_pooling_with_its_activation(tmp_path: Path) -> None:
    model = make_encoder("BertModel", tmp_path)
    dense = torch.randn(24, 64) * 0.1
    write_modules(tmp_path, "mean_tokens", dense=dense, normalizes=False)
    driver = PoolingDriver(tmp_path)
    assert driver.facts.embedding_size == 24
    (prompt,) = prompts_of([40])
    wanted = torch.tanh(dense @ hidden_of(model, prompt).mean(0))
    np.testing.assert_allclose(driver.pool([prompt])[0], wanted.numpy(), atol=1e-5)


def test_tokens_keep_their_vectors_where_there_is_no_pooling(tmp_path: Path) -> None:
    model = make_encoder("BertModel", tmp_path)
    write_modules(tmp_path, None, normalizes=False)
    driver = PoolingDriver(tmp_path)
    assert driver.facts.pooling_tasks == ("token_embed", "embed")
    (prompt,) = prompts_of([9])
    wanted = hidden_of(model, prompt)
    wanted = wanted / wanted.norm(dim=1, keepdim=True)
    np.testing.assert_allclose(driver.pool([prompt])[0], wanted.numpy(), atol=1e-5)


def test_a_request_may_ask_for_another_form(tmp_path: Path) -> None:
    model = make_encoder("BertModel", tmp_path)
    write_modules(tmp_path, "mean_tokens")
    driver = PoolingDriver(tmp_path, hf_overrides='{"is_matryoshka": true}')
    assert driver.facts.matryoshka == ()
    (prompt,) = prompts_of([9])
    mean = hidden_of(model, prompt).mean(0).numpy()
    params = [PoolingParams(normalize=False), PoolingParams(dimensions=16), PoolingParams(task="token_embed")]
    raw, short, tokens = driver.pool([prompt] * 3, params)
    np.testing.assert_allclose(raw, mean, atol=1e-5)
    np.testing.assert_allclose(short, mean[:16] / np.linalg.norm(mean[:16]), atol=1e-5)
    assert tokens.shape == (9, 64)


@pytest.mark.parametrize(
    "config", ['{"pooling_type": "MAX", "normalize": false}', '{"seq_pooling_type": "max", "use_activation": false}']
)
def test_the_operator_goes_before_the_files(config: str, tmp_path: Path) -> None:
    model = make_encoder("BertModel", tmp_path)
    write_modules(tmp_path, "mean_tokens")
    (prompt,) = prompts_of([30])
    made = PoolingDriver(tmp_path, pooler_config=config).pool([prompt])[0]
    np.testing.assert_allclose(made, hidden_of(model, prompt).amax(0).numpy(), atol=1e-5)


def test_a_decoder_that_is_not_causal_sees_all(tmp_path: Path) -> None:
    model = make_encoder("Qwen3Model", tmp_path)
    write_modules(tmp_path, "mean_tokens", normalizes=False)
    (prompt,) = prompts_of([30])
    causal = PoolingDriver(tmp_path).pool([prompt])[0]
    np.testing.assert_allclose(causal, hidden_of(model, prompt).mean(0).numpy(), atol=1e-4)
    free = PoolingDriver(tmp_path, hf_overrides='{"is_causal": false}').pool([prompt])[0]
    for layer in model.layers:  # a mask that hides nothing, by transformers itself
        layer.self_attn.is_causal = False
    model.config._attn_implementation = "sdpa"
    mask = torch.zeros(1, 1, 30, 30)
    with torch.inference_mode():
        wanted = (
            model(input_ids=torch.tensor([prompt]), attention_mask={"full_attention": mask})
            .last_hidden_state[0]
            .mean(0)
        )
    np.testing.assert_allclose(free, wanted.numpy(), atol=1e-4)
    assert cosine(free, causal) < 0.999


def test_a_decoder_with_windows_that_is_not_causal_sees_both_sides_of_them(tmp_path: Path) -> None:
    make_encoder("MistralModel", tmp_path)
    (prompt,) = prompts_of([60])
    driver = PoolingDriver(tmp_path, runner="pooling", hf_overrides='{"is_causal": false}')
    asked = PoolingParams(task="token_embed")
    before, after = (driver.pool([ids], asked)[0] for ids in (prompt, [*prompt[:-1], (prompt[-1] + 1) % 256]))
    assert not np.allclose(before[50], after[50], atol=1e-5), "a later token is seen"


def test_texts_are_no_longer_than_the_files_say(tmp_path: Path) -> None:
    make_encoder("BertModel", tmp_path)
    write_modules(tmp_path, "mean_tokens", sentence_bert_config={"max_seq_length": 128, "do_lower_case": False})
    assert PoolingDriver(tmp_path).facts.max_model_len == 128
    assert PoolingDriver(tmp_path, max_model_len=512).facts.max_model_len == 512


def open_with(directory: Path, *, pooling: Any = None, modules: Any = None) -> None:
    (directory / "config.json").write_text("{}")
    if pooling is not None:
        (directory / "1_Pooling").mkdir()
        (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if modules is not None:
        (directory / "modules.json").write_text(json.dumps(modules))
    open_checkpoint(ModelConfig(model=str(directory)))


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"pooling": {"pooling_mode": "median"}}, r"1_Pooling/config.json asks for pooling 'median', which is not"),
        ({"pooling": {"pooling_mode_mean_tokens": True, "include_prompt": False}}, "leaves prompts out of the pooling"),
        ({"pooling": [1]}, "must hold a JSON object"),
        ({"modules": [{"path": "2", "type": PREFIX + "WordWeights"}]}, "has a module of type '.*WordWeights', which"),
        ({"modules": [{"path": "../2", "type": PREFIX + "Dense"}]}, "must be below the checkpoint's directory"),
        ({"modules": [3]}, "has a module of type '3'"),
    ],
)
def test_what_is_not_known_is_refused(files: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=told):
        open_with(tmp_path, **files)


def test_a_decoder_that_generates_embeds_its_last_token_alone(tmp_path: Path) -> None:
    make_encoder("Qwen3Model", tmp_path)
    with pytest.raises(ModelLoadError, match=r"transformers cannot run|needs the hidden states of all tokens"):
        PoolingDriver(tmp_path, runner="generate", pooler_config='{"pooling_type": "MEAN"}')

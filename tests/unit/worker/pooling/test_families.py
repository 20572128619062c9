"""Every family of encoders: what the worker computes is what transformers computes, whatever runs beside it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pagoda_common.errors import ConfigError
from pagoda_common.params.pooling_params import PoolingParams
from tests.encoders import DECODERS, FAMILIES, hidden_of, make_encoder, prompts_of
from tests.unit.worker.pooling.driver import PoolingDriver

LENGTHS = (1, 2, 17, 511, 512, 17, 64, 3)
CLOSE = 1 - 1e-5


def cosine(one: Any, other: Any) -> float:
    return float(F.cosine_similarity(torch.as_tensor(one).double(), torch.as_tensor(other).double(), dim=-1).min())


@pytest.mark.parametrize("architecture", [*FAMILIES, *DECODERS])
def test_hidden_states_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    model = make_encoder(architecture, tmp_path)
    driver = PoolingDriver(tmp_path, runner="pooling")
    prompts = prompts_of(LENGTHS)
    params = [PoolingParams(task="token_embed", normalize=False)] * len(prompts)
    for prompt, made in zip(prompts, driver.pool(prompts, params), strict=True):
        wanted = hidden_of(model, prompt)
        assert made.shape == wanted.shape
        assert cosine(made, wanted) > CLOSE
        np.testing.assert_allclose(made, wanted.numpy(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("architecture", ["BertModel", "ModernBertModel", "MPNetModel"])
def test_bfloat16_is_close(architecture: str, tmp_path: Path) -> None:
    model = make_encoder(architecture, tmp_path)
    driver = PoolingDriver(tmp_path, dtype="bfloat16")
    prompts = prompts_of(LENGTHS)
    for prompt, made in zip(prompts, driver.pool(prompts), strict=True):
        assert cosine(made, hidden_of(model, prompt)[0]) > 0.999


YARN = {"rope_type": "yarn", "rope_theta": 1000, "factor": 4.0, "original_max_position_embeddings": 514}


@pytest.mark.parametrize(
    ("overrides", "length"),
    [
        ({}, 514),
        ({"max_model_len": 100}, 100),
        ({"rope_parameters": YARN}, 2056),
        ({"rope_parameters": YARN, "max_model_len": 2056}, 2056),
        ({"max_model_len": 515}, None),
        ({"rope_parameters": YARN, "max_model_len": 2057}, None),
    ],
)
def test_the_context_is_that_of_the_rotation(overrides: dict[str, Any], length: int | None, tmp_path: Path) -> None:
    """None: it is refused."""
    make_encoder("NomicBertModel", tmp_path)
    if length is None:
        with pytest.raises(ConfigError, match=r"max_model_len is \d+, the model was made for"):
            PoolingDriver(tmp_path, hf_overrides=json.dumps(overrides))
        return
    assert PoolingDriver(tmp_path, hf_overrides=json.dumps(overrides)).facts.max_model_len == length

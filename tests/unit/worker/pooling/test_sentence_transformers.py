"""Vectors against sentence-transformers itself, over padded batches: its poolings, matrices and norms, every family."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.encoders import DECODERS, FAMILIES, PAD, make_encoder, prompts_of, write_modules
from tests.unit.worker.pooling.driver import PoolingDriver

sentence_transformers = pytest.importorskip("sentence_transformers")

LENGTHS = (1, 2, 17, 511, 512)
SIMILAR = 0.99999


def reference(directory: Path, prompts: list[list[int]]) -> npt.NDArray[np.float32]:
    """Of one padded batch of all prompts."""
    model = sentence_transformers.SentenceTransformer(str(directory), device="cpu")
    ids = torch.full((len(prompts), max(map(len, prompts))), PAD)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)], mask[row, : len(prompt)] = torch.tensor(prompt), 1
    features: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    with torch.inference_mode():
        return np.asarray(model(features)["sentence_embedding"].float())


def alike(made: list[npt.NDArray[np.float32]], wanted: npt.NDArray[np.float32], *, is_normal: bool) -> None:
    for one, other in zip(made, wanted, strict=True):
        cosine = float(one @ other) / float(np.linalg.norm(one) * np.linalg.norm(other))
        assert cosine >= SIMILAR
        assert np.linalg.norm(one) == pytest.approx(1 if is_normal else np.linalg.norm(other), rel=1e-3)


@pytest.mark.parametrize("family", [*FAMILIES, "Qwen3Model"])
def test_every_family_in_a_mixed_batch(family: str, tmp_path: Path) -> None:
    make_encoder(family, tmp_path)
    write_modules(tmp_path, "lasttoken" if family in DECODERS else "mean_tokens")
    prompts = prompts_of(LENGTHS)
    alike(PoolingDriver(tmp_path).pool(prompts), reference(tmp_path, prompts), is_normal=True)


@pytest.mark.parametrize(
    "pooling",
    ["cls_token", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken", "cls_token+mean_tokens"],
)
def test_every_pooling_with_a_matrix_and_without_a_norm(pooling: str, tmp_path: Path) -> None:
    make_encoder("BertModel", tmp_path)
    size = 64 * len(pooling.split("+"))
    dense = torch.randn(48, size, generator=torch.Generator().manual_seed(2)) * 0.2
    write_modules(tmp_path, pooling, normalizes=False, dense=dense)
    prompts = prompts_of(LENGTHS)
    alike(PoolingDriver(tmp_path).pool(prompts), reference(tmp_path, prompts), is_normal=False)

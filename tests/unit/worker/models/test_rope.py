"""How long a sequence may be with a stretched rotation, and which experts' layers a config names."""

from typing import Any

import pytest

from pagoda_worker.models.moe import qwen_moe
from pagoda_worker.models.rope import max_positions
from pagoda_worker.models.spec import RopeSpec

YARN = {"original_max_position_embeddings": 512, "factor": 4.0}


def spec(rope_type: str) -> RopeSpec:
    return RopeSpec(theta=1e4, rope_type=rope_type, parameters=tuple(sorted(YARN.items())))


@pytest.mark.parametrize(("configured", "expected"), [(512, 2048), (2048, 2048), (4096, 4096)])
def test_yarn_stretches_what_is_configured_and_never_shortens_it(configured: int, expected: int) -> None:
    assert max_positions(spec("yarn"), configured) == expected


@pytest.mark.parametrize("rope_type", ["default", "linear", "dynamic", "llama3", "longrope"])
def test_no_other_rotation_changes_the_longest_sequence(rope_type: str) -> None:
    assert max_positions(spec(rope_type), 512) == 512


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [True] * 6),
        ({"decoder_sparse_step": 2}, [False, True, False, True, False, True]),
        ({"decoder_sparse_step": 3}, [False, False, True, False, False, True]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, [False, True, False, False, False, True]),
        ({"mlp_only_layers": [0, 5]}, [False, True, True, True, True, False]),
    ],
)
def test_every_nth_layer_has_experts_but_for_those_that_are_dense(
    options: dict[str, Any], expected: list[bool]
) -> None:
    config = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, **options}
    moe = qwen_moe(config, 6)
    assert moe is not None
    assert list(moe.sparse_layers) == expected
    assert qwen_moe({**config, "num_experts": 0}, 6) is None

"""The keys of --pooler-config and of a generation config: each in its field, each bound, each fault by name."""

from pathlib import Path
from typing import Any

import orjson
import pytest

from pagoda_common.config.checkpoint.generation_config import resolve_generation_config
from pagoda_common.config.pooler_config import PoolerConfig, pooler_config
from pagoda_common.errors import ConfigError
from pagoda_common.params.logprobs_bound import exceeds_max_logprobs
from pagoda_common.params.pooling_params import TASKS


@pytest.mark.parametrize(
    ("given", "config"),
    [
        ({}, PoolerConfig()),
        *(
            ({"pooling_type": name.upper()}, PoolerConfig(pooling_type=name))
            for name in ("last", "cls", "mean", "max", "mean_sqrt_len", "weightedmean", "all", "step")
        ),
        ({"seq_pooling_type": "CLS"}, PoolerConfig(pooling_type="cls")),
        ({"tok_pooling_type": "ALL"}, PoolerConfig(pooling_type="all")),
        ({"seq_pooling_type": "CLS", "tok_pooling_type": "ALL"}, PoolerConfig(pooling_type="cls")),
        ({"pooling_type": "MAX", "seq_pooling_type": "CLS"}, PoolerConfig(pooling_type="max")),
        ({"normalize": False}, PoolerConfig(normalize=False)),
        ({"use_activation": False}, PoolerConfig(normalize=False, use_activation=False)),
        ({"softmax": True}, PoolerConfig(normalize=True, use_activation=True)),
        ({"activation": False}, PoolerConfig(normalize=False, use_activation=False)),
        ({"normalize": True, "activation": False}, PoolerConfig(normalize=True, use_activation=False)),
        ({"dimensions": 1}, PoolerConfig(dimensions=1)),
        ({"step_tag_id": 0, "returned_token_ids": [0, 7]}, PoolerConfig(step_tag_id=0, returned_token_ids=(0, 7))),
        ({"task": "embed", "logit_bias": 0, "head_dtype": None}, PoolerConfig(task="embed")),
    ],
)
def test_a_pooler_config(given: dict[str, Any], config: PoolerConfig) -> None:
    assert pooler_config(orjson.dumps(given).decode()) == config
    assert pooler_config("") == PoolerConfig()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pooling_type": "sum"}, "pooling_type 'sum', must be one of last, cls, mean"),
        ({"task": "sing"}, f"task 'sing', must be one of {', '.join(TASKS)}"),
        ({"normalize": 1}, "normalize '1', must be true or false"),
        ({"use_activation": "no"}, "use_activation 'no', must be true or false|normalize 'no', must be true or false"),
        ({"dimensions": 0}, "dimensions '0', must be a whole number of at least 1"),
        ({"dimensions": True}, "dimensions 'True', must be a whole number of at least 1"),
        ({"step_tag_id": -1}, "step_tag_id '-1', must be a whole number of at least 0"),
        ({"returned_token_ids": 5}, "returned_token_ids '5', must be a list of token ids"),
        ({"returned_token_ids": [-1]}, "returned_token_ids '-1', must be a whole number of at least 0"),
        ({"returned_token_ids": [None]}, "returned_token_ids .*, must be a list of token ids"),
        ({"other": None}, "'other', which is not known"),
        ({"enable_chunked_processing": 1}, "enable_chunked_processing '1', must be true or false"),
        *(
            ({name: 1}, f"{name}, which is not supported")
            for name in (*("logit_bias", "logit_mean", "logit_sigma", "head_dtype"),)
        ),
    ],
)
def test_what_is_wrong_with_it_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        pooler_config(orjson.dumps(given).decode())
    assert caught.value.field == "pooler_config"


def test_where_defaults_of_sampling_come_from(tmp_path: Path) -> None:
    own, override = '{"top_k": 1, "top_p": 0.5}', '{"top_k": 2}'
    (tmp_path / "generation_config.json").write_text('{"top_k": 3}')

    def resolved(source: str, override: str = "", own: str = own) -> Any:
        return orjson.loads(resolve_generation_config(own, source=source, override=override))

    assert resolved("auto") == {"top_k": 1, "top_p": 0.5}
    assert resolved("auto", override) == {"top_k": 2, "top_p": 0.5}
    assert resolved("auto", own="") == {}
    assert resolved("vllm") == {}
    assert resolved("vllm", override) == {"top_k": 2}
    assert resolved(str(tmp_path)) == {"top_k": 3}
    for source, asked, field in (
        ("auto", "[]", "override_generation_config"),
        ("auto", "{", "override_generation_config"),
        (str(tmp_path / "none"), "", "generation_config"),
    ):
        with pytest.raises(ConfigError) as caught:
            resolved(source, asked)
        assert caught.value.field == field
    with pytest.raises(ConfigError, match="generation_config is '5', must be a JSON object"):
        resolved("auto", own="5")


@pytest.mark.parametrize(
    ("value", "bound", "is_above"),
    [
        *((20, 20, False), (21, 20, True), (None, 0, False), (0, 0, False), (1, 0, True)),
        *((-1, 100, False), (-1, 99, True), (-1, -1, False), (10**6, -1, False)),
    ],
)
def test_log_probabilities_above_the_bound(value: int | None, bound: int, is_above: bool) -> None:
    assert exceeds_max_logprobs(value, max_logprobs=bound, vocab_size=100) == is_above

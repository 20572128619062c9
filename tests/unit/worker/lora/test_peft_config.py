"""adapter_config.json: fields, patterns and bounds; files that are none, or that someone spoiled on purpose."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from pagoda_common.errors import ModelLoadError
from pagoda_worker.lora.module_patterns import places_of
from pagoda_worker.lora.peft_config import CONFIG_FILE, PeftConfig, read_peft_config


@pytest.mark.parametrize("kind", ["pipe", "device", "directory", "link to itself"])
def test_a_config_that_is_no_file_is_refused_and_not_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / CONFIG_FILE
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(path)
    with pytest.raises(ModelLoadError, match=CONFIG_FILE):
        read_peft_config(tmp_path)


def write(directory: Path, **fields: Any) -> Path:
    (directory / CONFIG_FILE).write_text(json.dumps({"peft_type": "LORA", **fields}))
    return directory


def test_fields_have_peft_s_defaults(tmp_path: Path) -> None:
    config = read_peft_config(write(tmp_path))
    assert config == PeftConfig(rank=8, alpha=8)
    assert (config.scales_of(["any"]), config.extras) == ({"any": 1.0}, ())


def test_a_pattern_is_the_end_of_a_module_s_name_and_the_first_that_matches_counts(tmp_path: Path) -> None:
    config = read_peft_config(
        write(
            tmp_path,
            r=4,
            lora_alpha=6,
            rank_pattern={"q_proj": 16, r"layers\.\d+\.self_attn": 2, "proj": 32},
            alpha_pattern={r"layers\.0\.mlp\.up_proj": 40, "up_proj": 20},
        )
    )
    ranks = {"q_proj": 16, "a.q_proj": 16, "a.xq_proj": 4, "q_proj.b": 4, "model.layers.12.self_attn": 2, "a.proj": 32}
    assert config.scales_of(ranks) == {module: 6 / rank for module, rank in ranks.items()}
    scales = {
        "layers.0.mlp.up_proj": 40 / 4,
        "layers.1.mlp.up_proj": 20 / 4,
        "layers.1.self_attn.q_proj": 6 / 16,
        "k_proj": 6 / 4,
    }
    assert config.scales_of(scales) == scales


def test_rslora_scales_by_the_root_of_the_rank(tmp_path: Path) -> None:
    config = read_peft_config(write(tmp_path, r=16, lora_alpha=8, use_rslora=True, rank_pattern={"q_proj": 4}))
    assert config.scales_of(["k_proj", "q_proj"]) == {"k_proj": 2.0, "q_proj": 4.0}


@pytest.mark.parametrize(
    ("fields", "extra"),
    [
        ({"use_dora": True}, "use_dora is True"),
        ({"use_qalora": True}, "use_qalora is True"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head']"),
        ({"layer_replication": [[0, 1]]}, "layer_replication is [[0, 1]]"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices is [3]"),
        ({"alora_invocation_tokens": [3]}, "alora_invocation_tokens is [3]"),
        ({"megatron_config": {"a": 1}}, "megatron_config is {'a': 1}"),
    ],
)
def test_a_field_that_asks_for_more_than_matrices_is_kept_to_be_refused(
    fields: dict[str, Any], extra: str, tmp_path: Path
) -> None:
    assert read_peft_config(write(tmp_path, **fields)).extras == (extra,)


@pytest.mark.parametrize(
    "fields",
    [
        {"use_dora": False, "use_qalora": None, "bias": "none", "lora_bias": False, "modules_to_save": []},
        {"bias": None, "modules_to_save": None, "layer_replication": [], "trainable_token_indices": {}},
        {"trainable_token_indices": [], "alora_invocation_tokens": [], "megatron_config": {}, "use_dora": None},
        {"lora_dropout": 0.5, "init_lora_weights": "pissa", "target_modules": ["q_proj"]},
    ],
)
def test_a_field_that_adds_nothing_is_left_out(fields: dict[str, Any], tmp_path: Path) -> None:
    assert read_peft_config(write(tmp_path, **fields)) == PeftConfig(rank=8, alpha=8)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"r": 0.5}, r"r is 0.5, must be a number from 1 to 1e\+09"),
        ({"r": True}, "r is True, must be a number from 1"),
        ({"lora_alpha": None}, "lora_alpha is None, must be a number"),
        ({"lora_alpha": float("inf")}, "lora_alpha is inf, must be a number"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan, must be a number"),
        ({"rank_pattern": [1]}, r"rank_pattern is \[1\], must be an object"),
        ({"rank_pattern": {"a": 1.5}}, "rank_pattern must have whole numbers of at least 1"),
        ({"rank_pattern": {"a": 0}}, "rank_pattern must have whole numbers of at least 1"),
        ({"alpha_pattern": {"a": "b"}}, "a is 'b', must be a number"),
        ({"peft_type": None}, "peft_type is None, must be 'LORA'"),
    ],
)
def test_a_field_out_of_its_bounds_is_named(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read_peft_config(write(tmp_path, **fields))


@pytest.mark.parametrize(
    ("pattern", "message"),
    [("[", r"'\[' is not a regular expression"), ("a{99999999999}", "the repetition number is too large")],
)
def test_a_pattern_that_is_none_is_named_once_it_is_asked_for(pattern: str, message: str, tmp_path: Path) -> None:
    config = read_peft_config(write(tmp_path, alpha_pattern={pattern: 1}))
    with pytest.raises(ModelLoadError, match=message):
        config.scales_of(["a"])


def test_the_bounds_themselves_are_taken(tmp_path: Path) -> None:
    config = read_peft_config(write(tmp_path, r=1, lora_alpha=-2.5, rank_pattern={"a": 1.0}, alpha_pattern={"a": 0}))
    assert (config.rank, config.alpha, config.rank_pattern) == (1, -2.5, {"a": 1})
    assert isinstance(config.rank_pattern["a"], int)
    assert config.scales_of(["a", "b"]) == {"a": 0.0, "b": -2.5}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "must hold a JSON object, got list"),
        ("{", "cannot read"),
        ("\xff", "cannot read"),
        ("[" * 99_999, "read"),
    ],
)
def test_a_config_that_is_no_object_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_text(text, encoding="latin-1")
    with pytest.raises(ModelLoadError, match=message):
        read_peft_config(tmp_path)


def test_a_config_may_be_as_large_as_its_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = (write(tmp_path) / CONFIG_FILE).stat().st_size
    monkeypatch.setattr("pagoda_worker.lora.peft_config.MAX_CONFIG_BYTES", size)
    read_peft_config(tmp_path)
    monkeypatch.setattr("pagoda_worker.lora.peft_config.MAX_CONFIG_BYTES", size - 1)
    with pytest.raises(ModelLoadError, match=f"has {size} bytes, must have at most {size - 1}"):
        read_peft_config(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"a":' * 100_000, '{"r": ' + "9" * 9999 + "}", "[]", "", "\0", '{"peft_type": ["LORA"]}'],
    ids=["lists", "objects", "a long number", "a list", "nothing", "a zero", "a list of types"],
)
def test_a_config_of_any_text_is_one_error(tmp_path: Path, text: str) -> None:
    (tmp_path / CONFIG_FILE).write_text(text)
    with pytest.raises(ModelLoadError, match=CONFIG_FILE) as caught:
        read_peft_config(tmp_path)
    assert len(caught.value.message) < 1000


MODULES = [f"model.layers.{layer}.{name}" for layer in range(12) for name in ("self_attn.q_proj", "mlp.up_proj")]


@pytest.mark.parametrize(
    "patterns",
    [
        ["q_proj"],
        ["proj"],
        ["layers.1.self_attn.q_proj", "q_proj"],
        ["q_proj", "layers.1.self_attn.q_proj"],
        [r"layers\.1\.self_attn\.q_proj", "up_proj", r"layers\.\d+\..*"],
        ["up_proj", r".*\.[0-3]\.\w+\.\w+", "self_attn.q_proj"],
        [r"^model\.layers\.(7|8)\..*", r"(?:q|k)_proj|up_proj"],
        ["model.layers.1.mlp.up_proj"],
        [],
    ],
)
def test_the_first_pattern_of_a_module_is_peft_s(patterns: list[str]) -> None:
    expected = {}
    for module in MODULES:  # as peft has it
        for place, pattern in enumerate(patterns):
            if re.match(rf"(.*\.)?({pattern})$", module):
                expected[module] = place
                break
    assert places_of(patterns, MODULES) == expected


def test_many_names_are_looked_up_and_not_searched(tmp_path: Path) -> None:
    names = {f"other.{number}": 4 for number in range(300_000)} | {"layers.3.mlp.up_proj": 16}
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 32, "rank_pattern": names}
    (tmp_path / CONFIG_FILE).write_text(json.dumps(config))
    scales = read_peft_config(tmp_path).scales_of(MODULES)
    assert scales == {module: 2.0 if module.endswith("layers.3.mlp.up_proj") else 4.0 for module in MODULES}


def test_patterns_are_searched_where_no_ctrl_c_of_the_terminal_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that searches has a session of its own."""
    script, session = tmp_path / "python", tmp_path / "session"
    code = f"import os; open({str(session)!r}, 'w').write(str(os.getsid(0) == os.getppid()))"
    script.write_text(f'#!/bin/sh\n{sys.executable} -c "{code}"\nexec {sys.executable} "$@"\n')
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    assert places_of(["a|b"], ["x.b"]) == {"x.b": 0}
    assert session.read_text() == "True"

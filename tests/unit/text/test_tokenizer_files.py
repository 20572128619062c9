"""What only tokenizer_config.json says of tokens counts, as it does for transformers."""

import json
from pathlib import Path
from typing import Any

import pytest

from pagoda_common.config.engine_config import EMBEDDED_MODEL
from pagoda_common.text.tokenizer import Tokenizer
from pagoda_common.text.tokenizer_files import TokenizerFiles, find_tokenizer_files

FLAGS = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
TEXTS = ["hi<|im_end|>", "hi <|im_end|> <|pad|>there", "<tool> a</tool>", "a <tool>\n b"]


def variant(directory: Path, *, without: tuple[int, ...] = (), **config: Any) -> Path:
    """The embedded model's tokenizer with other options in tokenizer_config.json; None removes one."""
    source = find_tokenizer_files(EMBEDDED_MODEL)
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if token["id"] not in without]
    known = json.loads((source / "tokenizer_config.json").read_text()) | config
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    kept = {name: value for name, value in known.items() if value is not None}
    (directory / "tokenizer_config.json").write_text(json.dumps(kept))
    return directory


CASES: dict[str, dict[str, Any]] = {
    "in added_tokens_decoder": {
        "without": (2,),
        "additional_special_tokens": None,
        "added_tokens_decoder": {"2": {"content": "<|im_end|>", "special": True, **FLAGS}},
    },
    "not special": {
        "without": (2,),
        "additional_special_tokens": None,
        "added_tokens_decoder": {"2": {"content": "<|im_end|>", "special": False, **FLAGS, "lstrip": True}},
    },
    "new ids": {
        "added_tokens_decoder": {
            "2048": {"content": "<tool>", "special": False, **FLAGS, "rstrip": True},
            "2049": {"content": "</tool>", "special": True, **FLAGS},
        }
    },
    "new ids of which the first has a role": {
        "added_tokens_decoder": {
            "3072": {"content": "<tool>", "special": True, **FLAGS},
            "3073": {"content": "</tool>", "special": True, **FLAGS},
        },
        "pad_token": "<tool>",
    },
    "in additional_special_tokens": {"without": (1, 2), "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]},
    "in extra_special_tokens": {"without": (2,), "extra_special_tokens": ["<|im_end|>"]},
    "by a role": {"without": (3,), "pad_token": "<|pad|>"},
    "by a role in an object": {
        "without": (2,),
        "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", **FLAGS},
    },
}


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    directory = variant(tmp_path, **CASES[case])
    ours, theirs = Tokenizer.load(str(directory)), AutoTokenizer.from_pretrained(directory)
    for text in TEXTS:
        for add_special_tokens in (True, False):
            expected = theirs.encode(text, add_special_tokens=add_special_tokens)
            assert ours.encode(text, add_special_tokens=add_special_tokens) == expected, text
        ids = theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_tokens_of_the_older_added_tokens_json_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    directory = variant(tmp_path, without=(2,))
    (directory / "added_tokens.json").write_text('{"<tool>": 3072, "</tool>": 3073}')
    ours, theirs = Tokenizer.load(str(directory)), AutoTokenizer.from_pretrained(directory)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text), text
    assert ours.decode([3072, 260, 3073]) == theirs.decode([3072, 260, 3073], skip_special_tokens=True)


@pytest.mark.parametrize("place", ["added_tokens_decoder", "added_tokens", "vocab", "unigram", "vocab.json"])
def test_the_id_of_a_role_is_found_without_loading(place: str, tmp_path: Path) -> None:
    directory = variant(tmp_path, eos_token="<|im_end|>", without=(2,) if place != "added_tokens" else ())
    path, config = directory / "tokenizer.json", directory / "tokenizer_config.json"
    if place == "added_tokens_decoder":
        decoder = {"7": {"content": "<|im_end|>", "special": True}}
        config.write_text(json.dumps(json.loads(config.read_text()) | {"added_tokens_decoder": decoder}))
    elif place == "unigram":
        path.write_text(json.dumps({"model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["<|im_end|>", -1.0]]}}))
    elif place == "vocab.json":
        path.unlink()
        (directory / "vocab.json").write_text('{"a": 0, "<|im_end|>": 9}')
    expected = {"added_tokens_decoder": 7, "unigram": 1, "vocab.json": 9}.get(place, 2)
    assert TokenizerFiles.read(directory).find_token_id("eos_token") == expected


def test_a_role_without_a_token_has_no_id(tmp_path: Path) -> None:
    files = TokenizerFiles.read(variant(tmp_path, eos_token="<gone>"))
    assert files.find_token_id("eos_token") is None
    assert files.find_token_id("sep_token") is None


def test_a_token_without_an_id_is_not_made_up(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(str(variant(tmp_path, pad_token="[PAD]")))
    assert tokenizer.token_id("[PAD]") is None

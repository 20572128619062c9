"""What a GGUF file's metadata make of a tokenizer's files, role by role, without a file."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from pagoda_common.errors import ModelLoadError
from pagoda_common.gguf.file import GgufFile
from pagoda_common.gguf.tokenizer import END_NAMES, SPLITTINGS, _merges, _Vocabulary, tokenizer_files

TOKENS = ["<unk>", "<s>", "</s>", "a", "b", "ab", "<|eot_id|>", "<tool>", "abb", "<|im_end|>"]
TYPES = [2, 3, 3, 1, 1, 1, 3, 4, 1, 1]
BASE = {"model": "gpt2", "pre": "gpt-2", "tokens": TOKENS, "token_type": TYPES, "merges": ["a b", "ab b", "b b"]}


def file_of(architecture: str = "llama", **keys: Any) -> GgufFile:
    given = {name: value for name, value in (BASE | keys).items() if value is not ...}
    metadata = {
        name.replace("__", ".") if name.startswith("tokenizer") else f"tokenizer.ggml.{name}": value
        for name, value in given.items()
    }
    return GgufFile(path=Path("m.gguf"), metadata={"general.architecture": architecture, **metadata}, tensors={})


def made(**keys: Any) -> tuple[Tokenizer, dict[str, Any], dict[str, Any]]:
    files = tokenizer_files(file_of(**keys))
    assert list(files) == ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]
    fast, config, generation = files.values()
    return Tokenizer.from_str(fast), json.loads(config), json.loads(generation)


def test_roles_of_tokens() -> None:
    _, config, generation = made()
    assert (config, generation) == ({}, {"eos_token_id": [6]}), "an end of its own, without a role"
    roles = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "padding_token_id": 7}
    fast, config, generation = made(**roles, eot_token_id=6, eom_token_id=9)
    assert config == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<tool>"}
    assert generation == {"bos_token_id": 1, "eos_token_id": [2, 6, 9]}
    assert {token.content: token.special for token in fast.get_added_tokens_decoder().values()} == {
        "<unk>": True,
        "<s>": True,
        "</s>": True,
        "<|eot_id|>": True,
        "<tool>": True,
    }
    plain, _, _ = made()
    assert {token.content: token.special for token in plain.get_added_tokens_decoder().values()} == {
        "<s>": True,
        "</s>": True,
        "<|eot_id|>": True,
        "<tool>": False,
    }


@pytest.mark.parametrize("wrong", [-1, len(TOKENS), "2", None])
def test_a_role_of_no_token_is_none(wrong: Any) -> None:
    _, config, _ = made(eos_token_id=wrong)
    assert config == {}
    _, config, _ = made(eos_token_id=len(TOKENS) - 1)
    assert config == {"eos_token": "<|im_end|>"}


def test_names_that_end_an_answer() -> None:
    assert (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>"),
        "<|return|>",
    ) == END_NAMES
    types = [*TYPES[:9], 4]
    assert made(token_type=types)[2] == {"eos_token_id": [6, 9]}


def test_templates() -> None:
    assert made(tokenizer__chat_template="t")[1]["chat_template"] == "t"
    named = made(tokenizer__chat_template="t", tokenizer__chat_template__rag="r")[1]["chat_template"]
    assert named == [{"name": "default", "template": "t"}, {"name": "rag", "template": "r"}]
    assert "chat_template" not in made(tokenizer__chat_template=5)[1]
    only = made(tokenizer__chat_template__rag="r")[1]["chat_template"]
    assert only == [{"name": "rag", "template": "r"}]


def test_merges_in_order_and_only_of_tokens() -> None:
    fast, _, _ = made()
    assert fast.encode("abbab").ids == [8, 5]
    model = json.loads(fast.to_str())["model"]
    assert model["merges"] == [["a", "b"], ["ab", "b"]], "bb is no token"
    assert not model["ignore_merges"]
    assert json.loads(made(pre="llama-bpe")[0].to_str())["model"]["ignore_merges"]


@pytest.mark.parametrize(
    ("model", "flag", "is_begun"),
    [("gpt2", ..., False), ("gpt2", True, True), ("gpt2", False, False), ("llama", ..., True), ("llama", False, False)],
)
def test_a_text_is_begun_where_the_file_says_so(model: str, flag: Any, is_begun: bool) -> None:
    scores = [0.0] * len(TOKENS)
    keys: dict[str, Any] = {"model": model, "scores": scores, "bos_token_id": 1, "add_space_prefix": False}
    fast, _, _ = made(**keys, add_bos_token=flag)
    assert fast.encode("ab").ids == [*([1] if is_begun else []), 5]
    assert fast.encode("ab", add_special_tokens=False).ids == [5]
    pair = fast.encode("ab", "a").ids
    assert pair == ([1, 5, 1, 3] if is_begun else [5, 3])
    without, _, _ = made(**keys | {"bos_token_id": ...}, add_bos_token=True)
    assert without.encode("ab").ids == [5]


def pieces(**keys: Any) -> Tokenizer:
    tokens = ["<unk>", "▁", "a", "b", "ab", "ba", "▁a", "<0x41>"]
    types = [2, 1, 1, 1, 1, 1, 1, 6]
    given = {"model": "llama", "tokens": tokens, "token_type": types, "unknown_token_id": 0, "merges": ...}
    return made(**given | {"scores": [0, 0, 0, 0, -1, -2, -3, 0]} | keys)[0]


def test_pieces_merge_by_their_scores() -> None:
    assert pieces().encode("bab").ids == [1, 3, 4]
    assert pieces(scores=[0, 0, 0, 0, -2, -1, -3, 0]).encode("bab").ids == [1, 5, 3]
    assert pieces(scores=[0, 0, 0, 0, -2, -1, 1, 0]).encode("a").ids == [6]
    assert pieces(add_space_prefix=False).encode("ab").ids == [4]
    assert pieces().encode("A").ids == [1, 7]
    without = pieces(token_type=[2, 1, 1, 1, 1, 1, 1, 1])
    assert without.encode("A").ids == [1, 0], "no bytes, so it is unknown"
    assert pieces().decode([1, 2, 1, 3]) == "a b"
    assert pieces(add_space_prefix=False).decode([1, 2, 1, 3]) == " a b"


def test_which_pairs_are_merged() -> None:
    vocabulary = _Vocabulary.read(
        file_of(tokens=["a", "b", "ab", "abb", "bb", "<a>"], token_type=[1, 1, 1, 4, 3, 1], merges=...)
    )
    pairs = _merges(vocabulary, [0, 0, -2, -1, 0, 0])
    assert pairs == [("a", "bb"), ("ab", "b"), ("a", "b")], "bb is a control token, and merged into none"


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"tokens": ...}, "m.gguf has no tokenizer.ggml.tokens, a list of texts"),
        ({"tokens": []}, "m.gguf has no tokenizer.ggml.tokens, a list of texts"),
        ({"token_type": ["1"] * len(TOKENS)}, "m.gguf must have a tokenizer.ggml.token_type for each token"),
        (
            {"model": ...},
            "m.gguf: tokenizer.ggml.model is missing, must be gpt2 or llama; --tokenizer names another one",
        ),
        ({"merges": ...}, "m.gguf: tokenizer.ggml.merges is missing, must be a list"),
        ({"merges": ["ab"]}, "m.gguf: tokenizer.ggml.merges is 'ab', must be two tokens with a space between them"),
        ({"model": "llama"}, "m.gguf: tokenizer.ggml.scores is missing, must be a list"),
        (
            {"model": "llama", "scores": [1.0]},
            "m.gguf: tokenizer.ggml.scores is '1 values', must be 10, one a token",
        ),
    ],
)
def test_what_is_wrong_is_told(keys: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        tokenizer_files(file_of(**keys))
    assert (str(caught.value), caught.value.field) == (told, "tokenizer")


def test_ordinary_tokens_where_no_types_are_told() -> None:
    assert _Vocabulary.read(file_of(token_type=...)).types == [1] * len(TOKENS)
    twice = _Vocabulary.read(file_of(tokens=["a", "b", "a"], token_type=[1, 1, 1]))
    assert twice.ids == {"a": 0, "b": 1}


@pytest.mark.parametrize(
    ("architecture", "taken"), [("llama", "llama-bpe"), ("qwen2", "qwen2"), ("qwen3", "qwen2"), ("phi", "gpt-2")]
)
@pytest.mark.parametrize("pre", [..., "default"])
def test_older_files_do_not_say_how_texts_are_parted(
    architecture: str, taken: str, pre: Any, caplog: pytest.LogCaptureFixture
) -> None:
    written = tokenizer_files(file_of(architecture, pre=pre))["tokenizer.json"]
    assert written == tokenizer_files(file_of(architecture, pre=taken))["tokenizer.json"]
    assert [record.getMessage() for record in caplog.records] == [
        f"m.gguf does not say how its tokenizer parts texts: taken as {taken}"
    ]


def test_which_ways_of_parting_there_are() -> None:
    shown = {
        name: (len(one.patterns), one.is_normalized, one.ignores_merges, one.patterns[0][:10])
        for name, one in SPLITTINGS.items()
    }
    letters, words, digits = "(?i:'s|'t|", "'s|'t|'re|", r"\p{N}"
    assert shown == {
        **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe"), (1, False, True, letters)),
        **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), (1, True, False, letters)),
        **dict.fromkeys(("gpt-2", "phi-2", "olmo"), (1, False, False, words)),
        **dict.fromkeys(("smollm", "starcoder", "refact"), (2, False, False, digits)),
        "tekken": (1, False, True, r"[^\r\n\p{L"),
    }
    assert r"\p{N}{1,3}" in SPLITTINGS["llama3"].patterns[0]
    assert r"\p{N}{1,3}" not in SPLITTINGS["qwen2"].patterns[0]

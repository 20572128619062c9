"""What a checkpoint's files say of its tokenizer, file by file, without a vocabulary of any size."""

import json
from pathlib import Path
from typing import Any

import pytest

from pagoda_common.config.checkpoint.translated_files import TOKENIZER_FAULT
from pagoda_common.errors import ModelLoadError
from pagoda_common.text import tokenizer_files
from pagoda_common.text.tokenizer_files import FILE_PATTERNS, TokenizerFiles, _added_token, find_tokenizer_files


def files(directory: Path, **written: Any) -> TokenizerFiles:
    """Writes files by their names without the ending, and reads them."""
    for name, value in written.items():
        (directory / f"{name}.json").write_text(json.dumps(value))
    return TokenizerFiles.read(directory)


def test_all_files_that_a_hub_is_asked_for() -> None:
    assert [
        *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
        *("tekken.json", "chat_template.*", "additional_chat_templates/*", "config_sentence_transformers.json"),
    ] == FILE_PATTERNS


def test_a_hub_is_asked_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[Any] = []

    def snapshot_download(name: str, **options: Any) -> str:
        asked.append((name, options))
        if len(asked) > 1:
            raise OSError("no route")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(tokenizer_files, "resolve_model", lambda name: name)
    assert find_tokenizer_files("a/b", revision="r") == tmp_path
    assert asked == [("a/b", {"revision": "r", "allow_patterns": FILE_PATTERNS})]
    with pytest.raises(ModelLoadError) as caught:
        find_tokenizer_files("a/b")
    assert str(caught.value) == (
        "'a/b' is neither a directory nor the embedded model, and the hub did not give its tokenizer: no route"
    )
    assert caught.value.field == "tokenizer"


def test_special_tokens_are_those_of_the_config_and_else_of_the_map(tmp_path: Path) -> None:
    read = files(
        tmp_path,
        special_tokens_map={"eos_token": "map", "unk_token": {"content": "<unk>"}, "pad_token": None},
        tokenizer_config={"eos_token": {"content": "</s>"}, "bos_token": "<s>", "add_bos_token": True, "other": "x"},
    )
    assert read.special_tokens == {"eos_token": "</s>", "unk_token": "<unk>", "bos_token": "<s>"}
    assert read.config["other"] == "x"
    assert TokenizerFiles.read(tmp_path / "nothing").special_tokens == {}


def test_templates_in_order_of_precedence(tmp_path: Path) -> None:
    assert files(tmp_path, tokenizer_config={}).chat_templates == {}
    config = {"chat_template": "config"}
    assert files(tmp_path, tokenizer_config=config).chat_templates == {"default": "config"}
    several = [{"name": "default", "template": "d"}, {"name": "rag", "template": "r"}]
    read = files(tmp_path, tokenizer_config={"chat_template": several})
    assert read.chat_templates == {"default": "d", "rag": "r"}
    read = files(tmp_path, chat_template={"chat_template": "older"})
    assert read.chat_templates == {"default": "older", "rag": "r"}
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("t")
    (tmp_path / "chat_template.jinja").write_text("newest")
    assert TokenizerFiles.read(tmp_path).chat_templates == {"default": "newest", "rag": "r", "tool_use": "t"}


@pytest.mark.parametrize("name", ["tokenizer_config", "special_tokens_map", "chat_template"])
def test_a_file_that_is_no_json_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.json").write_text("{")
    with pytest.raises(ModelLoadError, match=rf"{name}\.json is not valid JSON"):
        TokenizerFiles.read(tmp_path)


@pytest.mark.parametrize(
    ("token", "flags"),
    [
        ("<a>", {"special": True, "normalized": False}),
        ({"content": "<a>"}, {"special": False, "normalized": True}),
        ({"content": "<a>", "special": True}, {"special": True, "normalized": False}),
        ({"content": "<b>"}, {"special": True, "normalized": False}),
        ({"content": "<a>", "lstrip": True}, {"lstrip": True, "rstrip": False, "single_word": False}),
        ({"content": "<a>", "rstrip": True}, {"lstrip": False, "rstrip": True, "single_word": False}),
        ({"content": "<a>", "single_word": True}, {"lstrip": False, "rstrip": False, "single_word": True}),
        ({"content": "<a>", "special": True, "normalized": True}, {"special": True, "normalized": True}),
    ],
)
def test_the_flags_of_an_added_token(token: Any, flags: dict[str, bool]) -> None:
    made = _added_token(token, {"<b>"})
    assert {name: getattr(made, name) for name in flags} == flags


def test_added_tokens_are_in_order_of_their_ids_and_then_by_role(tmp_path: Path) -> None:
    read = files(
        tmp_path,
        tokenizer_config={
            "added_tokens_decoder": {"12": {"content": "<c>"}, "5": {"content": "<b>", "special": True}},
            "eos_token": "</s>",
            "additional_special_tokens": ["<e>", {"content": "<c>"}],
            "extra_special_tokens": {"image_token": "<i>"},
        },
        added_tokens={"<old>": 3, "<c2>": 12, "<wrong>": "x"},
    )
    tokens = read._added_tokens()
    assert [token.content for token in tokens] == ["<old>", "<b>", "<c>", "</s>", "<e>", "<i>"], "<c> is named twice"
    assert [token.special for token in tokens] == [False, True, True, True, True, True]
    assert [place for place, _ in read._decoder] == [3, 5, 12]
    assert [token.normalized for token in tokens[:2]] == [False, False], "as transformers adds the older ones"
    decoder = {"5": {"content": "<b>"}, "12": {"content": "</s>"}}
    named = files(tmp_path, tokenizer_config={"added_tokens_decoder": decoder, "eos_token": "</s>"})
    assert named.find_token_id("eos_token") == 12


def test_ids_of_roles_without_a_vocabulary(tmp_path: Path) -> None:
    read = files(
        tmp_path,
        tokenizer_config={"eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>", "pad_token": "<pad>"},
        tokenizer={"added_tokens": [{"id": 7, "content": "<s>"}], "model": {"vocab": {"</s>": 3, "<s>": 1}}},
        vocab={"<unk>": 9},
    )
    ids = [read.find_token_id(role) for role in ("bos_token", "eos_token", "unk_token", "sep_token")]
    assert ids == [7, 3, None, None]
    read = files(tmp_path, tokenizer={})
    assert read.find_token_id("unk_token") == 9


def test_tekken_has_ids_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_files, "tekken_template", lambda path: f"template of {path.name}")
    (tmp_path / "tekken.json").write_text("{}")
    read = TokenizerFiles.read(tmp_path)
    assert read.chat_templates == {"default": "template of tekken.json"}
    assert read.config == {}
    ids = {role: read.find_token_id(role) for role in ("unk_token", "bos_token", "eos_token", "sep_token")}
    assert ids == {"unk_token": 0, "bos_token": 1, "eos_token": 2, "sep_token": None}
    (tmp_path / "chat_template.jinja").write_text("own")
    assert TokenizerFiles.read(tmp_path).chat_templates == {"default": "own"}
    (tmp_path / "tokenizer.json").write_text("{}")
    assert TokenizerFiles.read(tmp_path).special_tokens == {}, "a tokenizer.json goes before"


def test_why_there_is_no_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError) as caught:
        files(tmp_path, tokenizer_config={}, vocab={"a": 0}).load_fast_tokenizer()
    assert (str(caught.value), caught.value.field) == (f"{tmp_path} has no tokenizer.json", "tokenizer")
    (tmp_path / TOKENIZER_FAULT).write_text("why not")
    with pytest.raises(ModelLoadError) as caught:
        TokenizerFiles.read(tmp_path).load_fast_tokenizer()
    assert (str(caught.value), caught.value.field) == ("why not", "tokenizer")
    with pytest.raises(ModelLoadError, match=f"the tokenizer in {tmp_path} cannot be read: "):
        files(tmp_path, tokenizer=[]).load_fast_tokenizer()


@pytest.mark.parametrize(
    ("config", "ids"),
    [
        ({"add_bos_token": True, "bos_token": "</s>"}, [0, 5]),
        ({"add_bos_token": False, "bos_token": "</s>"}, [5]),
        ({"add_bos_token": True}, [5]),
        ({"add_prefix_space": False}, [5]),
    ],
)
@pytest.mark.parametrize("name", ["GPT2Tokenizer", "GPT2TokenizerFast"])
def test_the_older_files_of_gpt2(name: str, config: dict[str, Any], ids: list[int], tmp_path: Path) -> None:
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh i\nĠ hi\n")
    vocabulary = {"</s>": 0, "h": 1, "i": 2, "hi": 3, "Ġ": 4, "Ġhi": 5}
    read = files(tmp_path, vocab=vocabulary, tokenizer_config={"tokenizer_class": name, **config})
    fast = read.load_fast_tokenizer()
    assert fast.encode(" hi").ids == ids
    assert fast.encode(" hi", add_special_tokens=False).ids == [5]


def test_a_space_goes_before_where_the_config_says_so(tmp_path: Path) -> None:
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh i\nĠ hi\n")
    vocabulary = {"</s>": 0, "h": 1, "i": 2, "hi": 3, "Ġ": 4, "Ġhi": 5}
    config = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "</s>", "add_bos_token": True}
    spaced = files(tmp_path, vocab=vocabulary, tokenizer_config=config | {"add_prefix_space": True})
    fast = spaced.load_fast_tokenizer()
    assert fast.encode("hi").ids == [0, 5]
    assert fast.encode("hi", " hi").ids == [0, 5, 0, 5]
    assert fast.decode([0, 5], skip_special_tokens=True) == " hi"

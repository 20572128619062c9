"""Prompts of a checkpoint's files: which goes before a text, and what is left of a file that is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from pagoda_common.errors import InvalidRequest
from pagoda_common.text.prompt_files import PromptFiles, read_prompt_files

PROMPTS = {"query": "Q: ", "passage": "P: ", "": "E: "}


def test_a_name_has_its_prompt_and_none_the_default() -> None:
    files = PromptFiles(PROMPTS, "query")
    assert [files.prompt_of(name) for name in ("query", "passage", "", None)] == ["Q: ", "P: ", "E: ", "Q: "]
    assert PromptFiles(PROMPTS).prompt_of(None) == ""
    assert PromptFiles().prompt_of(None) == ""


@pytest.mark.parametrize(
    ("names", "asked", "prompt"),
    [
        (("query", "s2p_query"), "search_query", "query"),
        (("s2p_query",), "search_query", "s2p_query"),
        (("search_query", "query"), "search_query", "search_query"),
        (("document", "passage", "corpus"), "search_document", "document"),
        (("passage", "corpus"), "search_document", "passage"),
        (("corpus",), "search_document", "corpus"),
    ],
)
def test_cohere_s_names_find_those_of_checkpoints(names: tuple[str, ...], asked: str, prompt: str) -> None:
    assert PromptFiles({name: name for name in names}).prompt_of(asked) == prompt


def test_a_name_that_is_not_there_is_an_error_or_nothing() -> None:
    files = PromptFiles(PROMPTS)
    with pytest.raises(InvalidRequest) as caught:
        files.prompt_of("x" * 150)
    assert caught.value.field == "prompt_name"
    assert caught.value.message == (
        f"prompt_name is {'x' * 100!r}, must be one of the model's prompts: query, passage, "
    )
    with pytest.raises(InvalidRequest, match="must be one of the model's prompts: none"):
        PromptFiles().prompt_of("x")
    assert files.prompt_of("x", is_strict=False) == ""
    assert files.prompt_of("search_document", is_strict=False) == "P: "


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({}, PromptFiles()),
        ([], PromptFiles()),
        (
            {"prompts": PROMPTS, "default_prompt_name": "passage", "similarity_fn_name": "dot"},
            PromptFiles(PROMPTS, "passage", "dot"),
        ),
        ({"prompts": {"a": 1, "b": "B"}, "default_prompt_name": "a"}, PromptFiles({"b": "B"})),
        ({"prompts": ["a"], "default_prompt_name": 3}, PromptFiles()),
        ({"similarity_fn_name": "hamming"}, PromptFiles()),
        ({"similarity_fn_name": "euclidean"}, PromptFiles(similarity="euclidean")),
        ({"similarity_fn_name": "manhattan"}, PromptFiles(similarity="manhattan")),
    ],
)
def test_what_a_file_says(tmp_path: Path, config: Any, files: PromptFiles) -> None:
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(config))
    assert read_prompt_files(tmp_path) == files


@pytest.mark.parametrize("content", [None, b"{", b"\xff", b"[" * 100_000])
def test_a_file_that_cannot_be_read_says_nothing(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "config_sentence_transformers.json").write_bytes(content)
    assert read_prompt_files(tmp_path) == PromptFiles()
